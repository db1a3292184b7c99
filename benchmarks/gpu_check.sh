#!/usr/bin/env bash
# Checks and times the kernels on one NVIDIA GPU, in a few minutes: bash benchmarks/gpu_check.sh kernels [OUT_DIR]
# Random weights, nothing downloaded. Writes kernels.json, kernels.png and environment.txt to OUT_DIR (default: gpu_check).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
WHAT="${1:-}"
OUT="${2:-gpu_check}"
PYTHON="${PYTHON:-python}"
[ "$WHAT" = kernels ] || { echo "error: ${WHAT:-nothing} cannot be checked; type: bash benchmarks/gpu_check.sh kernels" >&2; exit 1; }
command -v nvidia-smi >/dev/null || { echo "error: no nvidia-smi here; this script needs a machine with an NVIDIA GPU" >&2; exit 1; }
mkdir -p "$OUT"
export PYTHONPATH=".:kernels"
{
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv
    "$PYTHON" -c 'import platform, torch, triton; print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)'
    git rev-parse HEAD 2>/dev/null || true
} | tee "$OUT/environment.txt"
"$PYTHON" benchmarks/kernels.py --device cuda --memory --json "$OUT/kernels.json" --plot "$OUT/kernels.png"
