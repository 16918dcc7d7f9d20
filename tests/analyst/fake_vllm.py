"""``vllm serve`` that fails while it warms up, in vLLM 0.32's words, until its share of the card fits; then it listens and ends.

What is asked for and what is free stay the same at every share, or what is free grows by what the share leaves (--mode helps).
It binds its address before it fails, as vLLM does. ``--count FILE`` gets a line a start, ``--before FILE`` is waited for before
the failure.
"""

import argparse
import socket
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("serve")
parser.add_argument("model")
parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
parser.add_argument("--fits", type=float, default=0.0)
parser.add_argument("--mode", default="same")
parser.add_argument("--count", default="")
parser.add_argument("--before", default="")
parser.add_argument("--host", default="")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--uds")
args = parser.parse_args()
share = args.gpu_memory_utilization

if args.uds:
    server = socket.socket(socket.AF_UNIX)
    server.bind(args.uds)
else:
    server = socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((args.host, args.port))
if args.count:
    with open(args.count, "a") as file:
        file.write(f"{share}\n")

API, CORE = "(APIServer pid=1) ", "(EngineCore pid=2) "
print(
    f"{API}INFO 11-22 04:20:27 [api_utils.py:286] non-default args: {{'model': './none', 'gpu_memory_utilization': {share}}}\n"
    f"{CORE}INFO 11-22 04:20:47 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./none',"
    " dtype=torch.float16, max_seq_len=8192, tensor_parallel_size=1, quantization=None",
    flush=True,
)
if share <= args.fits:
    server.listen()
    print(f"RESULT {share}")
    sys.exit()
free_mib = 512 + round((0.9 - share) * 8192) if args.mode == "helps" else 512
FAILED = f"""ERROR 11-22 04:21:38 [core.py:1510] EngineCore failed to start.
ERROR 11-22 04:21:38 [core.py:1510] Traceback (most recent call last):
ERROR 11-22 04:21:38 [core.py:1510]   File "/env/vllm/v1/worker/gpu_model_runner.py", line 5127, in _dummy_sampler_run
ERROR 11-22 04:21:38 [core.py:1510]     sampler_output = self.sampler(logits=logits, sampling_metadata=dummy_metadata)
ERROR 11-22 04:21:38 [core.py:1510] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which {free_mib}.00 MiB is free. Including non-PyTorch memory, this process has 22.10 GiB memory in use. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.
ERROR 11-22 04:21:38 [core.py:1510]
ERROR 11-22 04:21:38 [core.py:1510] The above exception was the direct cause of the following exception:
ERROR 11-22 04:21:38 [core.py:1510]
ERROR 11-22 04:21:38 [core.py:1510] RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."""
while args.before and not Path(args.before).exists():
    time.sleep(0.02)
for line in FAILED.splitlines():
    print(CORE + line, flush=True)
print(
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    file=sys.stderr,
)
sys.exit(1)
