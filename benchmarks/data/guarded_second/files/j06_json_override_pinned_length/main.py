import dataclasses
import json
import pathlib

from vllm import LLM, EngineArgs, SamplingParams

import oomguard


@dataclasses.dataclass
class Settings:
    engine: dict
    policy: dict

    @classmethod
    def read(cls, path):
        return cls(**json.loads(pathlib.Path(path).read_text()))


def main():
    settings = Settings.read("settings.json")
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert settings.engine.keys() <= known
    with oomguard.guard(**settings.policy):
        llm = LLM(**settings.engine)
    outputs = llm.generate([{"prompt_token_ids": list(range(10, 400))}] * 3, SamplingParams(max_tokens=5, ignore_eos=True))
    print("tokens", sum(len(output.outputs[0].token_ids) for output in outputs))
    config = llm.llm_engine.vllm_config
    print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
