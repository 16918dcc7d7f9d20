import os
import signal
import threading
import time

import psutil
from vllm import LLM, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

import oomguard

SETTINGS = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 60_000_000}


def main():
    # no restart: of a death that is none of memory we want to hear
    with oomguard.guard(allow="reduces-capacity"):
        llm = LLM("./batch", dtype="float32", load_format="dummy", enforce_eager=True, **SETTINGS)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    first = llm.generate(["hello"], sampling, use_tqdm=False)
    assert len(first) == 1 and len(first[0].outputs[0].token_ids) == 100
    killed_at = []

    def kill():
        for process in psutil.Process().children(recursive=True):
            if "EngineCore" in " ".join(process.cmdline()):
                killed_at.append(time.monotonic())
                process.send_signal(signal.SIGKILL)

    timer = threading.Timer(1.0, kill)
    timer.start()
    try:
        outputs = llm.generate([f"item {n}" for n in range(3000)], sampling, use_tqdm=False)
    except EngineDeadError as error:
        waited = time.monotonic() - killed_at[0]
        print("dead after", round(waited, 1), "s:", str(error).splitlines()[0])
        assert waited < 60, waited
    else:
        raise SystemExit(f"{len(outputs)} answers, though nobody asked for a restart")
    timer.join()
    for name, value in SETTINGS.items():
        print("VALUE", name, value)


if __name__ == "__main__":
    main()
    print("INPROC-DONE", flush=True)
    os._exit(0)  # the engine is dead: nothing to close
