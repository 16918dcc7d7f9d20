#!/bin/bash
set -e
cd "$(dirname "$0")"
set -a; source ./serve.env; set +a
echo "starting $MODEL"
exec vllm serve "$MODEL" $ARGS --port "$PORT"
