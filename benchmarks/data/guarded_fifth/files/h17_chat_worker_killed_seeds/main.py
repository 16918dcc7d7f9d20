import os
import signal
import threading
import time

import psutil
from vllm import LLM, SamplingParams

import oomguard


class Interviews:
    """Simulated interviews: every turn is one call of chat for all of them."""

    def __init__(self, people):
        self.conversations = [[{"role": "system", "content": f"You are person {n}."}] for n in range(people)]

    @oomguard.guard(restart=True, max_attempts=4)
    def start(self):
        self.llm = LLM(
            "./persona",
            max_model_len=2048,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1_100_000_000,
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
        )

    def turn(self, question, max_tokens=120):
        for conversation in self.conversations:
            conversation.append({"role": "user", "content": question})
        sampling = [
            SamplingParams(temperature=0.7, seed=number, max_tokens=max_tokens, ignore_eos=True)
            for number in range(len(self.conversations))
        ]
        outputs = self.llm.chat(self.conversations, sampling, use_tqdm=False)
        for conversation, output in zip(self.conversations, outputs, strict=True):
            conversation.append({"role": "assistant", "content": f"({len(output.outputs[0].token_ids)} tokens)"})
        return [len(output.outputs[0].token_ids) for output in outputs]


def kill_largest(after):
    time.sleep(after)
    workers = psutil.Process().children(recursive=True)
    os.kill(max(workers, key=lambda process: process.memory_info().rss).pid, signal.SIGKILL)


def main():
    interviews = Interviews(people=200)
    interviews.start()
    killer = threading.Thread(target=kill_largest, args=(2.5,))
    for turn, question in enumerate(["Who are you?", "What did you do yesterday?", "Thank you!"]):
        if turn == 1:
            killer.start()
        lengths = interviews.turn(question, max_tokens=8 if turn == 2 else 120)
        print("turn", turn, len(lengths), set(lengths))
        assert len(lengths) == 200 and set(lengths) == {8 if turn == 2 else 120}
    killer.join()
    config = interviews.llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
