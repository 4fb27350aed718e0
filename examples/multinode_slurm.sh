#!/bin/sh
#SBATCH --job-name=v4-indexer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
# One torchrun per node; output_dir must be on storage that all nodes share. Before the time is up the run saves a
# checkpoint and stops; the same job with train.resume=true goes on, on any number of nodes.
#   sbatch examples/multinode_slurm.sh output_dir=/shared/run train.resume=true
# Other recipes: CONFIG=pretrain_v4_flash, or CONFIG=pretrain_v4_pro with parallel.pipeline=2
# megatron.decoder_last_pipeline_num_layers=30.
set -eu
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
CONFIG=${CONFIG:-pretrain_v4_4layer_megatron}

exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:29500" \
    -m nemo_v4_indexer.pretrain --config-name "$CONFIG" \
    parallel.tensor=8 parallel.sequence=true megatron.exit_duration_in_mins=225 "$@"
