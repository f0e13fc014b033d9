#!/usr/bin/env bash
# Run all tests: bash scripts/test.sh [--all] [pytest arguments]. --all walks the full products too and writes
# docs/verified.md. Uses the active environment, or makes .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
use_environment dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest "$@"
