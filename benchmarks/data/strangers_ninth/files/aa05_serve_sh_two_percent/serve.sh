#!/usr/bin/env bash
# The small model beside the big one: keep its share low.
set -euo pipefail
cd "$(dirname "$0")"
: "${MODEL:=./qwen}"
: "${PORT:=18905}"
: "${GPU_UTIL:=0.02}"
ARGS=(
  --port "$PORT"
  --served-model-name qwen2.5-0.5b
  --max-model-len 8192
  --max-num-seqs 8
  --gpu-memory-utilization "$GPU_UTIL"
  --dtype float16
  --load-format dummy
  --enforce-eager
)
echo "serving $MODEL with ${#ARGS[@]} arguments"
exec vllm serve "$MODEL" "${ARGS[@]}"
