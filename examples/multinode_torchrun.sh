#!/bin/sh
# One node of several: run this on every node, with the same settings but NODE_RANK.
#   NODES=2 NODE_RANK=0 HEAD=node0 sh examples/multinode_torchrun.sh train.steps=500
# output_dir must be on storage that all nodes share. After a stop, the same with train.resume=true goes on from the
# newest checkpoint, on any number of nodes. Other recipes: CONFIG=pretrain_v4_flash, or CONFIG=pretrain_v4_pro with
# parallel.pipeline=2 megatron.decoder_last_pipeline_num_layers=30.
set -eu
NODES=${NODES:-2} NODE_RANK=${NODE_RANK:?the number of this node, from 0} HEAD=${HEAD:?the name of node 0}
GPUS=${GPUS:-8} PORT=${PORT:-29500} CONFIG=${CONFIG:-pretrain_v4_4layer_megatron}

# Tensor parallel ranks stay within a node; what is left of the GPUs is data parallel.
exec torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-id "$CONFIG" --rdzv-endpoint "$HEAD:$PORT" \
    -m nemo_v4_indexer.pretrain --config-name "$CONFIG" \
    parallel.tensor="$GPUS" parallel.sequence=true "$@"
