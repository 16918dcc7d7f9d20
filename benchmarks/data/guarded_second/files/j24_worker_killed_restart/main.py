import os
import signal
import threading
import time

import psutil
from vllm import LLM, SamplingParams

import oomguard


def descendants():
    return [child for child in psutil.Process().children(recursive=True) if "tracker" not in " ".join(child.cmdline())]


def kill_the_worker():
    """The core is our child, its worker the core's: an operator kills the wrong process."""
    ours = {child.pid for child in psutil.Process().children()}
    workers = [child for child in descendants() if child.pid not in ours]
    if workers:
        print("killing a worker", flush=True)
        os.kill(workers[0].pid, signal.SIGKILL)


def main():
    records = []
    with oomguard.guard(restart=True, on_incident=records.append):
        llm = LLM("./steady", dtype="float32", load_format="dummy", enforce_eager=True, max_model_len=2048, kv_cache_memory_bytes=32_000_000, max_num_seqs=64)
    llm.generate(["ready?"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    timer = threading.Timer(1.0, kill_the_worker)
    timer.start()
    begun = time.monotonic()
    outputs = llm.generate([f"Item {n}:" for n in range(1500)], SamplingParams(max_tokens=80, ignore_eos=True, temperature=0), use_tqdm=False)
    timer.join()
    print("outputs", len(outputs), {len(output.outputs[0].token_ids) for output in outputs}, round(time.monotonic() - begun), "s")
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    assert len(outputs) == 1500 and {len(output.outputs[0].token_ids) for output in outputs} == {80}
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
