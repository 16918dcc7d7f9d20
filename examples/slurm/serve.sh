#!/bin/bash
#SBATCH --gpus=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
# A server that goes back to the queue with its changes where memory failed, and at the time limit ends as it should.
oomguard plan --exit-code vllm serve "$MODEL" >&2 || exit   # before minutes of loading: does it fit this node's GPU?
oomguard run --restart on-failure --slurm-comment --slurm-requeue 3 -- vllm serve "$MODEL" --port 8000 &
pid=$!
trap 'kill -TERM $pid' TERM
while wait $pid; status=$?; kill -0 $pid 2>/dev/null; do :; done   # a signal ends the wait, not the server
exit $status
