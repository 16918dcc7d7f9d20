import os
import signal
import threading
import time

import psutil
from vllm import LLM, SamplingParams

import oomguard


class Reaper(threading.Thread):
    """Ends vLLM's core as soon as it has worked for a while."""

    def __init__(self, after):
        super().__init__(daemon=True)
        self.after = after
        self.ended = []

    def run(self):
        time.sleep(self.after)
        for child in psutil.Process().children(recursive=True):
            if "EngineCore" in " ".join(child.cmdline()):
                self.ended.append(child.pid)
                os.kill(child.pid, signal.SIGKILL)


def conversation(number):
    return [
        {"role": "system", "content": "short answers"},
        {"role": "user", "content": f"question {number}: " + "why " * (number % 6)},
    ]


def main():
    with oomguard.guard(restart=True):
        llm = LLM(
            "./support",
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=640,
            max_num_seqs=24,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=120_000_000,
        )
    sampling = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0)
    conversations = [conversation(n) for n in range(400)]
    expected = {n: list(llm.chat(conversations[n], sampling, use_tqdm=False)[0].outputs[0].token_ids) for n in (0, 399)}
    reaper = Reaper(after=1.5)
    reaper.start()
    outputs = llm.chat(conversations, sampling, use_tqdm=False)
    reaper.join()
    assert len(reaper.ended) == 1, reaper.ended
    assert len(outputs) == 400
    for number, output in enumerate(outputs):
        assert f"question {number}:" in output.prompt if output.prompt else output.prompt_token_ids
        assert len(output.outputs) == 1 and len(output.outputs[0].token_ids) == 80, number
    for number, tokens in expected.items():
        assert list(outputs[number].outputs[0].token_ids) == tokens, number
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
