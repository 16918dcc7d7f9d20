from engines import make_engine


def main():
    from vllm import SamplingParams

    llm = make_engine("extract")
    outputs = llm.generate(["name: ", "date: ", "place: "], SamplingParams(max_tokens=4, ignore_eos=True))
    print(sum(len(o.outputs[0].token_ids) for o in outputs), "tokens")
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
