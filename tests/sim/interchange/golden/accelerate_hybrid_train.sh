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

accelerate launch --config_file accelerate.yaml --num_machines ${NNODES} --num_processes 8 --machine_rank ${NODE_RANK} --main_process_ip ${MASTER_ADDR} --main_process_port ${MASTER_PORT} \
    train.py --model_name_or_path "${MODEL}" --dtype float32 --attn_implementation sdpa --max_length 32768 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing True --gradient_checkpointing_kwargs '{"use_reentrant": false}' --bf16 True --fp16 False --optim adamw_torch_fused --torch_compile False --full_determinism False --output_dir output "$@"
