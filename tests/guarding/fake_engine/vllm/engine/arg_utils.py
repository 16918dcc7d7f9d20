"""Engine arguments: a dataclass that vLLM writes into while it makes the configuration."""

import dataclasses


@dataclasses.dataclass
class EngineArgs:
    model: str = "org/model"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    compilation_config: dict = dataclasses.field(default_factory=dict)
    disable_log_stats: bool = False

    def create_engine_config(self, usage_context=None):
        self.max_num_seqs = self.max_num_seqs or 256
        self.compilation_config["sizes"] = [1, 2, 4]
        self.max_model_len = self.max_model_len or 32768
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
