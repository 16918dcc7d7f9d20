"""The synchronous front end."""

from vllm.v1.engine.core_client import CoreClient


class LLMEngine:
    def __init__(self, vllm_config, executor_class=None, log_stats=False):
        self.vllm_config = vllm_config
        self.engine_core = CoreClient(vllm_config)

    @classmethod
    def from_engine_args(
        cls, engine_args, usage_context="engine", stat_loggers=None, enable_multiprocessing=False
    ):
        config = engine_args.create_engine_config(usage_context)
        config["usage_context"] = usage_context
        return cls(vllm_config=config)

    @classmethod
    def from_vllm_config(cls, vllm_config):
        return cls(vllm_config=vllm_config)
