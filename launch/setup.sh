#!/usr/bin/env bash
# Makes .venv in the repository, with everything that quickstart.sh and test.sh need; does nothing where that is done.
# Sourced or run; afterwards $PYTHON is the interpreter to use. PYTHON_BASE names the Python to make it with.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
STAMP="$ROOT/.venv/.toolr0-ready"
TORCH=2.13.0

fail() {
    echo "error: $*" >&2
    exit 1
}

is_new() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_base() { # prints the first Python that is new enough
    local name names=(python3 python3.14 python3.13 python3.12 python3.11)
    [ -z "${PYTHON_BASE:-}" ] || names=("$PYTHON_BASE")
    for name in "${names[@]}"; do
        if is_new "$name"; then
            echo "$name"
            return
        fi
    done
    fail "${names[0]} is $("${names[0]}" --version 2>/dev/null || echo missing); install Python 3.11 or newer, or set" \
        "PYTHON_BASE to one"
}

make_venv() { # repairs one whose making was cut short, too
    local base
    base="$(find_base)"
    if ! { [ -x "$PYTHON" ] && "$PYTHON" -m pip --version >/dev/null 2>&1; }; then
        "$base" -m venv "$ROOT/.venv" >&2 ||
            fail "$base cannot make a virtual environment; install its venv module (on Debian: apt-get install python3-venv)"
    fi
    is_new "$PYTHON" || fail "$ROOT/.venv holds $("$PYTHON" --version 2>&1); delete that folder and try again"
}

install_torch() {
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        "$PYTHON" -m pip install -q "torch==$TORCH"
    else # the CPU build from PyTorch's own index; where that is out of reach, whatever pip finds under that version
        "$PYTHON" -m pip install -q "torch==$TORCH+cpu" --index-url https://download.pytorch.org/whl/cpu \
            --retries 0 --timeout 15 2>/dev/null || "$PYTHON" -m pip install -q "torch==$TORCH"
    fi
}

is_ready() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$1" ]; }

set_up() {
    local want
    want="$(cd "$ROOT" && find setup.py launch/setup.sh csrc/ -type f | sort | xargs cat | sha256sum) $ROOT"
    is_ready "$want" && return
    if command -v flock >/dev/null; then flock 9; fi # until the function ends: one set-up at a time
    is_ready "$want" && return
    echo "setting up $ROOT/.venv (once; a few minutes)" >&2
    rm -f "$STAMP"
    make_venv
    install_torch || fail "pip could not install torch $TORCH (see above); the same command tries again"
    "$PYTHON" -m pip install -q -e "$ROOT[dev]" || fail "pip could not install all packages (see above); the same command tries again"
    echo "$want" >"$STAMP" # last, so that a set-up that was cut short is done again
} 9<"$ROOT"

set_up
