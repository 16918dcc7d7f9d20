"""``vllm serve`` on the CPU: it prints vLLM 0.32's lines and takes the memory of its weights and KV cache.

The KV cache is ``--gpu-memory-utilization`` of ``--total`` without the weights, in MiB. ``--count FILE`` gets a line a start.
"""

import argparse
import mmap
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("serve")
parser.add_argument("model")
parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
parser.add_argument("--weights", type=int, default=100)
parser.add_argument("--total", type=int, default=4096)
parser.add_argument("--count", default="")
args = parser.parse_args()
share = args.gpu_memory_utilization
given = {"model": "./none"}
if "--gpu-memory-utilization" in sys.argv:
    given["gpu_memory_utilization"] = share
API, CORE = "(APIServer pid=1) ", "(EngineCore pid=2) "
if args.count:
    with open(args.count, "a") as file:
        file.write(f"{share}\n")


def take(size_mib: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(1, size_mib) << 20)
    for at in range(0, size_mib << 20, 4096):
        memory[at] = 1
    return memory


print(
    f"{API}INFO 11-22 04:20:27 [api_utils.py:286] non-default args: {given}\n"
    f"{CORE}INFO 11-22 04:20:47 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./none',"
    " dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, quantization=None, enforce_eager=False, device_config=cpu",
    flush=True,
)
time.sleep(0.3)
weights = take(args.weights)
print(
    f"{CORE}INFO 11-22 04:20:50 [cpu_model_runner.py:81] Model loading took {args.weights / 1024:.2f} GiB and 1.2 seconds",
    flush=True,
)
cache = take(round(share * args.total) - args.weights)
print(f"RESULT {share}", flush=True)
