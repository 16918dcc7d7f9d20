"""One engine writes, another one judges: both live in this program."""
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

COMMON = dict(dtype="float16", load_format="dummy", enforce_eager=True)


def lengths(outputs):
    return [len(o.outputs[0].token_ids) for o in outputs]


def main():
    writer = LLM(model="./writer", max_model_len=8192, max_num_seqs=8, kv_cache_memory_bytes=7 * 1024**3, **COMMON)
    judge = LLM(model="./judge", max_model_len=4096, max_num_seqs=8, gpu_memory_utilization=0.8,
                num_gpu_blocks_override=64, **COMMON)
    prompts = [TokensPrompt(prompt_token_ids=[7 + i] * 50) for i in range(2)]
    drafts = writer.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    to_judge = [TokensPrompt(prompt_token_ids=[9] * 20 + list(d.outputs[0].token_ids)) for d in drafts]
    marks = judge.generate(to_judge, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    print("JUDGED", lengths(drafts), lengths(marks), flush=True)


if __name__ == "__main__":
    main()
