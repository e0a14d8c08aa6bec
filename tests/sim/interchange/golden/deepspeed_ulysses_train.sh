#!/bin/bash
# Written by memo.
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")}"
# On each of several nodes: NODE_RANK=0, 1, ... and MASTER_ADDR, the first node's name or address.
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

# Weights: a folder or a name on the hub, of the shape in config.json.
MODEL=${MODEL:-Qwen/Qwen3-8B-Base}

torchrun --nnodes ${NNODES} --nproc-per-node 8 --node-rank ${NODE_RANK} --master-addr ${MASTER_ADDR} --master-port ${MASTER_PORT} \
    train.py --deepspeed ds_config.json --model_name_or_path "${MODEL}" --dtype bfloat16 --attn_implementation flash_attention_2 --max_length 131072 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --gradient_checkpointing True --gradient_checkpointing_kwargs '{"use_reentrant": false, "offload": true}' --bf16 True --fp16 False --torch_compile False --full_determinism False --sequence_parallel_size 4 --output_dir output "$@"
