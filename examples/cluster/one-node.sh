#!/usr/bin/env bash
# One machine, all of its GPUs: bash one-node.sh
# Start it again after a failure: it goes on from the last checkpoint, and begins where there is none.
set -euo pipefail

brim train config.yaml --gpus all --output-directory /shared/runs/demo --resume
