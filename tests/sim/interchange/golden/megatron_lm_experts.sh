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
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --kv-channels 128
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --max-position-embeddings 8192
    --position-embedding-type rope
    --padded-vocab-size 129280
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --rotary-base 10000
    --qk-layernorm
    --rope-type yarn
    --rotary-scaling-factor 40.0
    --mscale 1.0
    --mscale-all-dim 1.0
    --attention-backend flash
    --flash-attention-version 2
)
LATENT_ARGS=(
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
)
MOE_ARGS=(
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.001
    --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-expert-capacity-factor 1.5
    --moe-pad-expert-input-to-capacity
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --expert-model-parallel-size 4
    --expert-tensor-parallel-size 2
    --cp-comm-type p2p
    --pipeline-model-parallel-layout 'Et*30|t*31L'
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --seq-length 8192
    --micro-batch-size 1
    --global-batch-size 4
    --bf16
    --recompute-granularity selective
    --recompute-modules mlp moe mla_up_proj
)

# Training data: mock data unless DATA_ARGS says otherwise, for example
# DATA_ARGS=(--data-path PREFIX --split 949,50,1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 129280
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
    "${PRETRAIN}" "${MODEL_ARGS[@]}" "${LATENT_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${SCHEDULE_ARGS[@]}" "$@"
