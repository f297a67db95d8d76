#!/usr/bin/env bash
# Two machines without a scheduler, the same command on both: HEAD=first-machine bash two-nodes.sh
# Both see the configuration, the data, the base model and /shared. The port is open between them.
# When a process fails on either, torchrun starts all of them again, three times at most.
set -euo pipefail

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds in which a stopped run may write its checkpoint
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else processes that are started again find the addresses of those before
torchrun --nnodes 2 --nproc-per-node gpu --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id demo \
  -m brim train config.yaml --output-directory /shared/runs/demo --resume
