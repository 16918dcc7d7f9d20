#!/usr/bin/env bash
# start the server; look into vllm.log if it does not come up
set -euo pipefail
cd "$(dirname "$0")"

ARGS=(
  --max-model-len 32768
  --kv-cache-memory-bytes 80M
  --dtype float16
  --load-format dummy
  --enforce-eager
  --port 18615
)

nohup vllm serve ./minicpm3 "${ARGS[@]}" > vllm.log 2>&1
