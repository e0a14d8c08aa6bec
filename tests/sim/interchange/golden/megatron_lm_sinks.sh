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
    --num-layers 24
    --hidden-size 2880
    --ffn-hidden-size 2880
    --num-attention-heads 64
    --kv-channels 64
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --max-position-embeddings 8192
    --position-embedding-type yarn
    --padded-vocab-size 201088
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --group-query-attention
    --num-query-groups 8
    --untie-embeddings-and-output-weights
    --rotary-base 150000
    --window-size 127,0
    --window-attn-skip-freq '([1]*1+[0]*1)*12'
    --softmax-type learnable
    --rotary-scaling-factor 32.0
    --yarn-original-max-position-embeddings 4096
    --yarn-beta-fast 32.0
    --yarn-beta-slow 1.0
    --no-yarn-correction-range-round-to-int
    --mscale 1.0
    --mscale-all-dim 0.0
)
MOE_ARGS=(
    --num-experts 32
    --moe-router-topk 4
    --moe-ffn-hidden-size 2880
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --quick-geglu
    --activation-func-clamp-value 7.0
    --glu-linear-offset 1.0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 4
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --seq-length 8192
    --micro-batch-size 1
    --global-batch-size 16
    --bf16
)

# Training data: mock data unless DATA_ARGS says otherwise, for example
# DATA_ARGS=(--data-path PREFIX --split 949,50,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 201088
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
    "${PRETRAIN}" "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${SCHEDULE_ARGS[@]}" "$@"
