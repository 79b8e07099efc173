#!/bin/bash
# sbatch examples/slurm.sh sd35_medium_ocr prompts_per_step=64
# A process for each GPU. SLURM tells each its rank, the first node and a port of this job's own.
#SBATCH --job-name=flow-grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120   # two minutes before the end: the run saves and stops

srun flow-grpo train "$@" --resume auto
