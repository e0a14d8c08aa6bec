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
    -m trl.scripts.sft --config sft.yaml --model_name_or_path "${MODEL}" "$@"
