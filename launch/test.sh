#!/usr/bin/env bash
# Sets up and runs the tests; options go to pytest, such as -m "not slow".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
