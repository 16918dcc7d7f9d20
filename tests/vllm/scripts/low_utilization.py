from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(model="./tiny", gpu_memory_utilization=0.02, enforce_eager=True)
    outputs = llm.generate(
        ["the quick brown", "the lazy dog"],
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )
    print("RESULT", [len(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    main()
