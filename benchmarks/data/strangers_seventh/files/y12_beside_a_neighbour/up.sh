#!/usr/bin/env bash
# the index first, the model beside it
set -u
python index.py "${INDEX_ROWS:-1048576}" &
INDEX=$!
trap 'kill $INDEX 2>/dev/null' EXIT
sleep 6
vllm serve ./starcoder --num-gpu-blocks-override 260 --dtype half --load-format dummy --enforce-eager --port 18712
