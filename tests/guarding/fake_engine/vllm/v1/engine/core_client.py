"""The caller's end of the core: it learns that the core died, and not why."""

import contextlib
import logging
import multiprocessing
import os
from multiprocessing.connection import wait

from vllm.core import run_core, start


class CoreClient:
    def __init__(self, config):
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            start(config, logging.getLogger("vllm.v1.engine.core"))
            return
        context = multiprocessing.get_context(
            os.environ.get("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        )
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_core, name="EngineCore", args=(config, theirs))
        self.process.start()
        theirs.close()
        try:
            wait([self.pipe, self.process.sentinel])
            self.receive_ready()
        except BaseException:
            self.shutdown()
            raise

    def receive_ready(self):
        try:
            self.pipe.recv()
        except EOFError:
            self.process.join()
            died = f"{{'EngineCore': {self.process.exitcode}}}"
            raise RuntimeError(
                f"Engine core initialization failed. See root cause above. Failed core proc(s): {died}"
            ) from None

    def shutdown(self):
        with contextlib.suppress(OSError):
            self.pipe.send("end")
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.terminate()
        self.process.join()
