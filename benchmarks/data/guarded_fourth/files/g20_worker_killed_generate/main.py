import os
import signal
import threading

import psutil
from vllm import LLM, SamplingParams, TokensPrompt

import oomguard


def out_of_memory_killer():
    """Does what the kernel does where memory runs out: ends the largest process (here: below this one)."""
    processes = psutil.Process().children(recursive=True)
    largest = max(processes, key=lambda process: process.memory_info().rss)
    os.kill(largest.pid, signal.SIGKILL)


class Corpus(LLM):
    """Writes variations of seeds, in one large call."""

    def __init__(self, *args, variations=600, **kwargs):
        self.variations = variations
        super().__init__(*args, dtype="float32", load_format="dummy", enforce_eager=True, **kwargs)

    def write(self):
        prompts = [
            TokensPrompt(prompt_token_ids=[20 + (n * 13 + i) % 1000 for i in range(8 + n % 5)])
            for n in range(self.variations)
        ]
        sampling = SamplingParams(max_tokens=96, ignore_eos=True, temperature=0)
        return self.generate(prompts, sampling, use_tqdm=False)


def main():
    with oomguard.guard(restart=True):
        corpus = Corpus("./seeds", max_model_len=512, max_num_seqs=64, kv_cache_memory_bytes=800_000_000)
    timer = threading.Timer(2.0, out_of_memory_killer)
    timer.start()
    outputs = corpus.write()
    timer.join()
    assert not timer.is_alive()
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    print("written", len(outputs), lengths, {output.outputs[0].finish_reason for output in outputs})
    assert len(outputs) == 600 and lengths == {96}
    config = corpus.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
