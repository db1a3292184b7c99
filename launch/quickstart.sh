#!/usr/bin/env bash
# Self-play on the embedded model, on whatever is there. Options go to launch/selfplay.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
OUT="runs/nano-$(date +%Y%m%d-%H%M%S)"
GPUS="$({ command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null || true; } | wc -l)"
cd "$ROOT"
if [ "$GPUS" -gt 0 ]; then
    exec "$ROOT/.venv/bin/torchrun" --nproc_per_node="$GPUS" launch/selfplay.py --preset nano --out "$OUT" "$@"
fi
exec "$PYTHON" launch/selfplay.py --preset nano --out "$OUT" "$@"
