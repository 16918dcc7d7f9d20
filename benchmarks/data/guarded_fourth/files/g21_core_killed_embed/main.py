import os
import signal
import threading
import time

import psutil
from vllm import LLM, PoolingParams, TokensPrompt

import oomguard


def cores():
    """The process of vLLM's core, which names itself."""
    return [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]


class Index:
    def __init__(self, llm):
        self.llm, self.vectors = llm, {}

    def add(self, documents):
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in documents.values()]
        outputs = self.llm.embed(prompts, pooling_params=PoolingParams(), use_tqdm=False)
        for key, output in zip(documents, outputs, strict=True):
            self.vectors[key] = output.outputs.embedding


def documents(first, count, length):
    return {n: [10 + (n * 31 + i * 7) % 1500 for i in range(length)] for n in range(first, first + count)}


@oomguard.guard(restart=True)
def open_index():
    return Index(
        LLM(
            "./finder",
            runner="pooling",
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=50_000_000,
            enable_prefix_caching=False,
        )
    )


def main():
    index = open_index()
    index.add(documents(0, 5, 40))
    killed = []

    def kill():
        time.sleep(1.0)
        for process in cores():
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    index.add(documents(5, 300, 900))  # 270,000 tokens: takes longer than a second
    killer.join()
    index.add(documents(305, 3, 12))
    again = Index(index.llm)
    again.add(documents(0, 1, 40))
    assert max(abs(a - b) for a, b in zip(again.vectors[0], index.vectors[0])) < 1e-3
    print("vectors", len(index.vectors), {len(v) for v in index.vectors.values()}, "killed", len(killed))
    assert len(index.vectors) == 308 and killed
    config = index.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
