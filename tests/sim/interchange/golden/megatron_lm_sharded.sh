#!/bin/bash
# Written by memo.
set -euo pipefail

# On each of several nodes: NODE_RANK=0, 1, ... and MASTER_ADDR, the first node's name or address.
NNODES=${NNODES:-2}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

# From the root of a checkout of Megatron-LM, or name its script.
PRETRAIN=${PRETRAIN:-pretrain_gpt.py}

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 16384
    --num-attention-heads 32
    --kv-channels 128
    --normalization LayerNorm
    --norm-epsilon 1e-05
    --max-position-embeddings 65536
    --position-embedding-type rope
    --padded-vocab-size 50257
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --no-bias-gelu-fusion
    --rotary-base 10000
    --attention-backend flash
    --flash-attention-version 2
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 4
    --cp-comm-type a2a+p2p
    --hierarchical-context-parallel-sizes 2 2
    --use-megatron-fsdp
    --use-distributed-optimizer
    --ckpt-format fsdp_dtensor
    --data-parallel-sharding-strategy optim_grads_params
)
TRAINING_ARGS=(
    --seq-length 65536
    --micro-batch-size 1
    --global-batch-size 4
    --bf16
    --use-precision-aware-optimizer
    --optimizer-cpu-offload
    --optimizer-offload-fraction 1.0
    --recompute-granularity selective
    --recompute-modules layernorm
)

# Training data: mock data unless DATA_ARGS says otherwise, for example
# DATA_ARGS=(--data-path PREFIX --split 949,50,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 50257
)
# Not part of a plan: how long, and how fast, to learn.
SCHEDULE_ARGS=(
    --train-iters ${TRAIN_ITERS:-20}
    --lr ${LR:-1.0e-4}
    --min-lr ${MIN_LR:-1.0e-5}
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
    --eval-iters 0
    --log-interval 1
    --log-throughput
)

torchrun --nnodes ${NNODES} --nproc-per-node 8 --node-rank ${NODE_RANK} --master-addr ${MASTER_ADDR} --master-port ${MASTER_PORT} \
    "${PRETRAIN}" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${SCHEDULE_ARGS[@]}" "$@"
