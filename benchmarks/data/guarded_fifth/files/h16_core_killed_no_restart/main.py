"""A batch under a supervisor that wants to know when the engine dies: no restart is asked for here."""

import os
import signal
import threading

import psutil
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.engine.exceptions import EngineDeadError

import oomguard


def kill_the_core():
    for process in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(process.cmdline()) or "EngineCore" in process.name():
            os.kill(process.pid, signal.SIGKILL)
            return


def main():
    with oomguard.guard():
        llm = LLM(
            "./batch",
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory_bytes=300_000_000,
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
        )
    asked = {
        "max_model_len": llm.llm_engine.vllm_config.model_config.max_model_len,
        "max_num_seqs": llm.llm_engine.vllm_config.scheduler_config.max_num_seqs,
        "kv_cache_memory_bytes": llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes,
    }
    timer = threading.Timer(3.0, kill_the_core)  # an operator's kill -9
    timer.start()
    prompts = [TokensPrompt(prompt_token_ids=[40 + n % 100, 50, 60, 70]) for n in range(1500)]
    try:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=200, temperature=0, ignore_eos=True), use_tqdm=False)
    except EngineDeadError as error:
        print("the supervisor is told:", type(error).__name__)
    else:
        raise SystemExit(f"{len(outputs)} outputs came, though the core was killed and no restart was asked for")
    timer.join()
    for name, value in asked.items():
        print("VALUE", name, value)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
