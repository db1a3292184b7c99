#!/usr/bin/env bash
# Self-play on the embedded model, on whatever is there. Options go to launch/selfplay.py; --resume auto goes on with the
# newest run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
OUT="runs/nano-$(date +%Y%m%d-%H%M%S)"
if [[ " $* " == *" --resume "* || " $* " == *" --resume=auto "* ]]; then
    newest="$(find runs -maxdepth 1 -name 'nano-[0-9]*' 2>/dev/null | sort | tail -n 1)" # their names are their dates
    OUT="${newest:-$OUT}"
fi
GPUS="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" # those that CUDA_VISIBLE_DEVICES leaves, and that work
if [ "$GPUS" -gt 0 ]; then
    exec "$PYTHON" -m torch.distributed.run --nproc_per_node="$GPUS" launch/selfplay.py --preset nano --out "$OUT" "$@"
fi
exec "$PYTHON" launch/selfplay.py --preset nano --out "$OUT" "$@"
