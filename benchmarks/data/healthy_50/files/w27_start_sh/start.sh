#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
PROFILE=${1:-dev}
source "./env.$PROFILE"
ARGS=(
  --dtype float16
  --load-format dummy
  --enforce-eager
  --max-model-len "$MAX_LEN"
  --kv-cache-memory-bytes "$KV"
  --port "$PORT"
)
if [[ "${LORA:-no}" == yes ]]; then ARGS+=(--enable-lora); fi
echo "[$(date +%T)] starting profile $PROFILE" >&2
# raise this on the big machine: --max-model-len 1048576 (CUDA out of memory on ours!)
exec vllm serve "$MODEL" "${ARGS[@]}"
