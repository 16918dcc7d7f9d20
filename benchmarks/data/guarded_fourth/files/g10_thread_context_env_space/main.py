import contextvars
import os
import queue
import threading

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # as the CPU page of vLLM's documentation says

from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402

import oomguard  # noqa: E402


class Worker(threading.Thread):
    """Owns the engine; takes prompts from one queue, puts lengths into another."""

    def __init__(self, args):
        super().__init__(name="engine")
        self.args, self.context = args, contextvars.copy_context()
        self.prompts, self.results = queue.Queue(), queue.Queue()

    def run(self):
        try:
            engine = self.context.run(LLMEngine.from_engine_args, self.args)
        except Exception as error:
            self.results.put(error)
            return
        self.results.put(engine.vllm_config)
        number = 0
        while (text := self.prompts.get()) is not None:
            engine.add_request(str(number), text, SamplingParams(max_tokens=7, ignore_eos=True))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        self.results.put(len(output.outputs[0].token_ids))
            number += 1


def main():
    args = EngineArgs(
        "./librarian", max_model_len=50_000, max_num_seqs=4, dtype="float16", load_format="dummy", enforce_eager=True
    )
    with oomguard.guard(allow="reduces-capacity"):
        worker = Worker(args)  # takes the guard's context along
        worker.start()
        config = worker.results.get()
    if isinstance(config, Exception):
        raise config
    for text in ("where is it?", "and the other one?"):
        worker.prompts.put(text)
        print("length", worker.results.get())
    worker.prompts.put(None)
    worker.join()
    assert args.max_model_len == 50_000
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
