"""Sort crash logs of our cluster by cause."""
from vllm import LLM, SamplingParams

LOGS = [
    "worker 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "worker 5: ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "worker 7: " + "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp: unhandled cuda error. " * 12,
]


def main():
    llm = LLM("./pythia", max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=64 * 2**20, dtype="float16",
              load_format="dummy", enforce_eager=True)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    done = 0
    for log in LOGS:
        print("log:", log[:100], flush=True)
        llm.generate([log], params, use_tqdm=False)
        done += 1
    print("TRIAGED", done, flush=True)


if __name__ == "__main__":
    main()
