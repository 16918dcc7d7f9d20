"""A script that fails as vLLM does, until its settings fit: what oomguard run is tested with where speed matters.

The texts are vLLM's; the real engine is used in tests/vllm. The length comes from --max-model-len, or from the
overrides that the plugin would apply; ``--fits N`` is the length that fits, ``--mode`` chooses other behaviours.
"""

import argparse
import json
import os
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--max-model-len", type=int)
parser.add_argument("--fits", type=int, default=1792)
parser.add_argument("--estimate", type=int)
parser.add_argument("--mode", default="")
parser.add_argument("--count", default="")
args, _ = parser.parse_known_args()

prompts = len(sys.stdin.read().splitlines()) if args.mode == "prompts" else None

overrides = json.loads(os.environ.get("OOMGUARD_VLLM_OVERRIDES", "{}"))
if args.mode == "silent":  # AsyncEngineArgs: the plugin tells what the engine does not print
    with open(os.environ.get("OOMGUARD_VLLM_ACKNOWLEDGE", os.devnull), "a") as told:
        row = {
            "pid": os.getpid(),
            "order": 1,
            "model": "./none",
            "arguments": {"max_model_len": 32768},
        }
        told.write(json.dumps(row) + "\n")
if overrides and args.mode != "deaf":
    with open(os.environ.get("OOMGUARD_VLLM_ACKNOWLEDGE", os.devnull), "a") as told:
        told.write(json.dumps({"pid": os.getpid(), "order": 1, "applied": overrides}) + "\n")
length = overrides.get("max_model_len", args.max_model_len or 32768)
if args.mode in (
    "deaf",
    "stubborn",
):  # the change does not arrive, or the program sets the length after it
    length = args.max_model_len or 32768
if args.count:
    with open(args.count, "a") as file:
        file.write(f"{length}\n")
given = {"model": "./none"} | ({"max_model_len": args.max_model_len} if args.max_model_len else {})
if args.mode != "silent":
    print(
        f"(APIServer pid=1) INFO 11-21 07:14:27 [api_utils.py:286] non-default args: {given}",
        flush=True,
    )
if length > args.fits:
    estimate = args.estimate or args.fits
    print(
        "(EngineCore pid=2) ERROR 11-21 07:14:52 [core.py:1510] ValueError: To serve at least one request with the model's max seq len"
        f" ({length}), (0.02 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the"
        f" available memory, the estimated maximum model length is {estimate}. Try increasing `gpu_memory_utilization`",
        flush=True,
    )
    print(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        file=sys.stderr,
    )
    sys.exit(1)
if args.mode == "prompt" and length <= 3000:
    print("Traceback (most recent call last):", file=sys.stderr)
    print('  File "s.py", line 9, in <module>', file=sys.stderr)
    sys.exit(
        f"ValueError: The decoder prompt (length 3000) is longer than the maximum model length of {length}. Make sure that"
    )
if args.mode == "wait":
    print("READY", flush=True)
    time.sleep(60)
print(f"RESULT {length}" if prompts is None else f"RESULT {length} {prompts}")
