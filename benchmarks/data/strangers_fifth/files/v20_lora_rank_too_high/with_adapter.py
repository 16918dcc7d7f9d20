"""Two prompts through an adapter."""
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest


def main():
    llm = LLM(
        model="./base",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 * 1024**2,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    prompts = [TokensPrompt(prompt_token_ids=[5 + i] * 30) for i in range(2)]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
                        lora_request=LoRARequest("support", 1, "./adapter"))
    print("ADAPTED", [len(o.outputs[0].token_ids) for o in outs], flush=True)


if __name__ == "__main__":
    main()
