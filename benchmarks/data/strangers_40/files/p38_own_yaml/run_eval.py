import argparse
import yaml


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    config = yaml.safe_load(open(parser.parse_args().config))
    from vllm import LLM, SamplingParams

    llm = LLM(**config["engine"])
    outs = llm.generate(config["prompts"], SamplingParams(**config["sampling"]))
    print("BLIND40-DONE", [len(o.outputs[0].token_ids) for o in outs], flush=True)


if __name__ == "__main__":
    main()
