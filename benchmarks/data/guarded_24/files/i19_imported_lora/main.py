import argparse

from service import registry


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", default="Dear customer,")
    args = parser.parse_args()
    llm = registry.engine()
    print("length", len(registry.complete(args.prompt, tokens=6)))
    assert llm is registry.engine()
    config = llm.llm_engine.vllm_config
    print("VALUE max_loras", config.lora_config.max_loras)
    print("VALUE max_lora_rank", config.lora_config.max_lora_rank)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
