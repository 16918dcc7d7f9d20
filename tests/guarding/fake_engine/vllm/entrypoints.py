"""LLM: what most programs call."""

from vllm.engine.arg_utils import EngineArgs


class LLM:
    def __init__(
        self,
        model,
        *,
        enforce_eager=False,
        gpu_memory_utilization=0.92,
        kv_cache_memory_bytes=None,
        **kwargs,
    ):
        from vllm.v1.engine.llm_engine import LLMEngine

        engine_args = EngineArgs(
            model=model,
            enforce_eager=enforce_eager,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            **kwargs,
        )
        self.llm_engine = LLMEngine.from_engine_args(
            engine_args=engine_args, usage_context="llm_class"
        )

    @classmethod
    def from_engine_args(cls, engine_args):
        return cls(**vars(engine_args))

    def shutdown(self):
        self.llm_engine.engine_core.shutdown()
