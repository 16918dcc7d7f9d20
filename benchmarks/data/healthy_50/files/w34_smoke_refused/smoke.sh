#!/bin/bash
# starts a server, asks it twice, takes it down
vllm serve ./model --served-model-name m --max-model-len 256 --kv-cache-memory-bytes 32M --dtype float16 --load-format dummy --enforce-eager --port 18324 > server.log 2>&1 &
SERVER=$!
trap 'kill $SERVER 2>/dev/null; wait $SERVER 2>/dev/null' EXIT
for i in $(seq 1 240); do
  kill -0 $SERVER 2>/dev/null || { echo "server died" >&2; tail -5 server.log >&2; exit 1; }
  python -S wait_for.py 18324 && break
  sleep 1
done
python -S ask.py 18324
