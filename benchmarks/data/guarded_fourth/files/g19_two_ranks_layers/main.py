import os
from collections import UserDict

from vllm import LLM, SamplingParams

import oomguard


class Settings(UserDict):
    """Defaults of the team, then the file of the host, then what the environment says."""

    def layer(self, **values):
        self.update({key: value for key, value in values.items() if value is not None})
        return self


def main():
    settings = Settings(dtype="float16", load_format="dummy", enforce_eager=True)
    settings.layer(max_model_len=50_000, max_num_seqs=16, kv_cache_memory_bytes=12_000_000)
    settings.layer(tensor_parallel_size=2, max_num_seqs=8, seed=int(os.environ["SEED"]) if "SEED" in os.environ else None)
    with oomguard.guard(allow="reduces-capacity"):
        llm = LLM("./twin", **settings)
    outputs = llm.generate(["left", "right"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    print("tokens", [len(output.outputs[0].token_ids) for output in outputs])
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE tensor_parallel_size", config.parallel_config.tensor_parallel_size)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
