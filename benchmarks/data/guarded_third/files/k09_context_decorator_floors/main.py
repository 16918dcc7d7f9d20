import contextlib
import itertools

from vllm import EngineArgs, LLMEngine, SamplingParams

import oomguard


class serving(contextlib.ContextDecorator):
    """Our own context manager; the guard is one of the things it holds."""

    def __init__(self, **kwargs):
        self.args = EngineArgs(dtype="float16", load_format="dummy", enforce_eager=True, **kwargs)

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 4096}, pin=["max_num_seqs"]))
            self.engine = LLMEngine.from_engine_args(self.args)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc):
        return self._stack.__exit__(*exc)

    def complete(self, texts):
        for number, text in zip(itertools.count(), texts):
            self.engine.add_request(str(number), text, SamplingParams(max_tokens=5, ignore_eos=True))
        done = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = len(output.outputs[0].token_ids)
        return done


service = serving(model="./guide", max_model_len=16384, max_num_seqs=6, kv_cache_memory_bytes=12_000_000)


@service
def main():
    print("tokens", service.complete(["left", "right", "straight on"]))
    config = service.engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    assert service.args.max_model_len == 16384
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
