"""The asynchronous front end."""

from vllm.v1.engine.core_client import CoreClient


class AsyncLLM:
    def __init__(self, vllm_config, executor_class=None, log_stats=False):
        self.vllm_config = vllm_config
        self.engine_core = CoreClient(vllm_config)

    @classmethod
    def from_engine_args(
        cls, engine_args, start_engine_loop=True, usage_context="engine", stat_loggers=None
    ):
        return cls(vllm_config=engine_args.create_engine_config(usage_context))
