#!/usr/bin/env bash
# start the small model
cd "$(dirname "$0")"
export TOKENIZERS_PARALLELISM=false

vllm serve ./model \
  --port 18210 \
  --dtype float16 --load-format dummy --enforce-eager \
  --kv-cache-memory-bytes 48M \
  # --enable-prefix-caching \
  --max-model-len 4096 \
  --max-num-seqs 8
