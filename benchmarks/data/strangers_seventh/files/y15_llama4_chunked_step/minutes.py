"""Minutes of a meeting from its transcript; settings from the environment, as in our cluster."""
import os
from dataclasses import asdict, dataclass, field

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def env(name, default):
    return field(default_factory=lambda: int(os.environ.get(f"MINUTES_{name}", default)))


@dataclass
class Engine:
    model: str = "./scout"
    dtype: str = "float16"
    load_format: str = "dummy"
    enforce_eager: bool = True
    max_num_seqs: int = env("SEQS", 8)
    max_model_len: int = env("CONTEXT", 32768)
    max_num_batched_tokens: int = env("STEP", 8192)
    kv_cache_memory_bytes: int = env("KV", 48 << 20)


def main():
    llm = LLM(**asdict(Engine()))
    talk = TokensPrompt(prompt_token_ids=[(5 * j) % 1900 + 20 for j in range(5000)])
    outs = llm.generate([talk], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    print("MINUTES", len(outs[0].prompt_token_ids), len(outs[0].outputs[0].token_ids), flush=True)


if __name__ == "__main__":
    main()
