#!/usr/bin/env bash
# Self-play on the embedded model, on whatever is there. Options go to launch/selfplay.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
OUT="runs/nano-$(date +%Y%m%d-%H%M%S)"
GPUS="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" # those that CUDA_VISIBLE_DEVICES leaves, and that work
cd "$ROOT"
if [ "$GPUS" -gt 0 ]; then
    exec "$PYTHON" -m torch.distributed.run --nproc_per_node="$GPUS" launch/selfplay.py --preset nano --out "$OUT" "$@"
fi
exec "$PYTHON" launch/selfplay.py --preset nano --out "$OUT" "$@"
