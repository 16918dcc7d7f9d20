#!/bin/bash
#SBATCH --job-name=rollouts
#SBATCH --mem=3G
# our cluster gives a job what it asked for, as a limit of private memory:
ulimit -d $((3 * 1024 * 1024))
export TOKENIZERS_PARALLELISM=false
exec python rollouts.py --samples 16 --seats 1024
