import pathlib
import tomllib

from vllm import LLM, SamplingParams

import oomguard


class Service:
    def __init__(self, path):
        self.settings = tomllib.loads(pathlib.Path(path).read_text())
        self.changed = []

    @oomguard.guard(allow="reduces-capacity")
    def open(self):
        self.llm = LLM(**self.settings["engine"])
        return self

    def __getitem__(self, texts):
        sampling = SamplingParams(**self.settings["sampling"])
        return [o.outputs[0].token_ids for o in self.llm.generate(list(texts), sampling, use_tqdm=False)]

    @property
    def config(self):
        return self.llm.llm_engine.vllm_config


if __name__ == "__main__":
    service = Service(pathlib.Path(__file__).with_name("service.toml")).open()
    assert "max_model_len" not in service.settings["engine"]  # the file's settings stay as they are
    print("tokens", [len(tokens) for tokens in service["alpha", "beta", "gamma"]])
    print("VALUE max_model_len", service.config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", service.config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", service.config.scheduler_config.max_num_seqs)
    print("VALUE enable_prefix_caching", service.config.cache_config.enable_prefix_caching)
    print("INPROC-DONE")
