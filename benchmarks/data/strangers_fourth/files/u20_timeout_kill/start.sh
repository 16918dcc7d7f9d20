#!/usr/bin/env bash
# kept from the smoke test: gives up after a few seconds
set -u
LIMIT=${LIMIT:-4}
timeout --signal=KILL "$LIMIT" vllm serve ./mixtral \
    --max-model-len 4096 --max-num-seqs 64 \
    --gpu-memory-utilization 0.3 \
    --dtype float16 --load-format dummy --enforce-eager --port 18420
status=$?
echo "vllm ended with $status" >&2
exit $status
