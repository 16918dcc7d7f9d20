"""A thousand slogans at once, none of which repeats itself."""
import resource

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

GIB = 2**30


def main():
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, 3 * GIB))  # what the batch system gives a job
    llm = LLM("./qwen", max_model_len=512, max_num_seqs=1024, max_num_batched_tokens=8192, seed=1,
              kv_cache_memory_bytes=160 * 2**20, dtype="float16", load_format="dummy", enforce_eager=True,
              skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=4, temperature=0.0, presence_penalty=0.8, detokenize=False, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=[100 + i, 7, 9, 11, 13, 15]) for i in range(1024)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    print("SLOGANS", len(outs), sum(len(o.outputs[0].token_ids) for o in outs), flush=True)


if __name__ == "__main__":
    main()
