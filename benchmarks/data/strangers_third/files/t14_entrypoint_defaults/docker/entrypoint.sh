#!/bin/sh
set -eu
: "${MODEL:=./gpt2}"
: "${MAX_LEN:=32768}"
: "${KV_BYTES:=256M}"
: "${PORT:=18314}"
echo "entrypoint: serving $MODEL on $PORT" >&2
exec vllm serve "$MODEL" --served-model-name gpt2 --dtype float16 --load-format dummy \
  --max-model-len "$MAX_LEN" --kv-cache-memory-bytes "$KV_BYTES" --port "$PORT" ${EXTRA_ARGS:-}
