#!/usr/bin/env bash
# Makes .venv in the repository, with everything that quickstart.sh and test.sh need; does nothing where that is done.
# Sourced or run; afterwards $PYTHON is the interpreter to use.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
TORCH=2.13.0

install_torch() {
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        "$PYTHON" -m pip install -q "torch==$TORCH"
    else # the CPU build from PyTorch's own index; where that is out of reach, whatever pip finds under that version
        "$PYTHON" -m pip install -q "torch==$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu \
            --retries 0 --timeout 15 2>/dev/null || "$PYTHON" -m pip install -q "torch==$TORCH"
    fi
}

set_up() {
    local base stamp want
    stamp="$ROOT/.venv/.toolr0-ready"
    want="$(cat "$ROOT/setup.py" "${BASH_SOURCE[0]}" | sha256sum) $ROOT"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return
    base="${PYTHON_BASE:-python3}"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $("$base" --version 2>&1) is too old; install Python 3.11 or newer, or set PYTHON_BASE to one" >&2
        exit 1
    }
    echo "setting up $ROOT/.venv (once; a few minutes)" >&2
    [ -x "$PYTHON" ] || "$base" -m venv "$ROOT/.venv" || {
        echo "error: python's venv module is missing; install it (on Debian: apt-get install python3-venv)" >&2
        exit 1
    }
    install_torch
    "$PYTHON" -m pip install -q -e "$ROOT[dev]"
    echo "$want" >"$stamp" # last, so that a set-up that was cut short is done again
}

set_up
