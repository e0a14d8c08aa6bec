#!/bin/bash
# Written by memo.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
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
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --kv-channels 128
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --max-position-embeddings 131072
    --position-embedding-type rope
    --padded-vocab-size 128256
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8.0
    --attention-backend flash
    --flash-attention-version 2
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --cp-comm-type p2p
    --pipeline-model-parallel-layout 'Et*15|t*17L'
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS=(
    --seq-length 131072
    --micro-batch-size 1
    --global-batch-size 4
    --bf16
    --use-precision-aware-optimizer
    --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 8
)

# Training data: mock data unless DATA_ARGS says otherwise, for example
# DATA_ARGS=(--data-path PREFIX --split 949,50,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 128256
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
