"""The core's process: it loads the plugin, makes a segment of shared memory, and starts or fails."""

import logging
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import shared_memory

BYTES_PER_TOKEN = 512


def run_core(config: dict, ready) -> None:
    from vllm.logger import configure

    configure()
    log = logging.getLogger("vllm.v1.engine.core")
    try:
        from oomguard.engines.vllm.plugin import register

        if "oomguard" in os.environ.get("VLLM_PLUGINS", "oomguard").split(","):
            register()
        segment = shared_memory.SharedMemory(create=True, size=4096)
        print("segment", segment.name, flush=True)
        log.info("Initializing a V1 LLM engine (v0.32.0) with config: model='org/model'")
        start(config, log)
    except Exception:
        log.exception("EngineCore failed to start.")
        segment.close()
        if os.environ.get("FAKE_DIES") == "leaves a worker":
            os._exit(1)
        raise
    ready.send("READY")
    ready.recv()
    segment.close()
    segment.unlink()


def start(config: dict, log: logging.Logger) -> None:
    dies = os.environ.get("FAKE_DIES")
    if dies == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if dies == "aborts":
        os.write(
            2,
            b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            b"8.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 6.00 GiB memory in use.\n",
        )
        os._exit(134)
    if dies == "other":
        log.error(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (tried again with less, and it went)"
        )
        raise ValueError("the tokenizer has no such file")
    if dies == "hangs":
        log.info("waiting")
        time.sleep(60)
    memory, length = config["kv_cache_memory_bytes"] or 1 << 34, config["max_model_len"]
    if length * BYTES_PER_TOKEN > memory:
        if dies in ("leaves a worker", "waits for its worker"):
            own, theirs = multiprocessing.Pipe()
            multiprocessing.get_context("spawn").Process(
                target=work, name="VllmWorker-0", args=(theirs,)
            ).start()
            own.recv()
        needed, available = length * BYTES_PER_TOKEN / 2**30, memory / 2**30
        raise ValueError(
            f"To serve at least one request with the model's max seq len ({length}), ({needed:.2f} GiB KV cache is needed, "
            f"which is larger than the available KV cache memory ({available:.2f} GiB). Based on the available memory, the "
            f"estimated maximum model length is {memory // BYTES_PER_TOKEN}. Try increasing `gpu_memory_utilization` or "
            f"decreasing `max_model_len` when initializing the engine."
        )
    print("core started", file=sys.stderr, flush=True)


def work(ready) -> None:
    from oomguard.engines.vllm.plugin import register

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    register()
    ready.send("READY")
    time.sleep(60)
