#!/bin/bash
# Written by memo.
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")}"
export PYTHONPATH="${PWD}${PYTHONPATH:+:${PYTHONPATH}}"
# On each of several nodes: NODE_RANK=0, 1, ... and MASTER_ADDR, the first node's name or address.
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

# The model's tokenizer (and weights), as torchtitan's scripts/download_hf_assets.py fetches them.
ASSETS=${ASSETS:-./assets}

torchrun --nnodes ${NNODES} --nproc-per-node 8 --node-rank ${NODE_RANK} --master-addr ${MASTER_ADDR} --master-port ${MASTER_PORT} \
    -m torchtitan.train --module memo_plan --config memo_plan --hf_assets_path "${ASSETS}" "$@"
