#!/bin/bash
# Keys, TLS, unix socket and hostile bytes against servers of their own.
#   tests/suite_guard.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
command -v python3 >/dev/null || { echo "SKIP guard: no python3"; exit 0; }
python3 tests/guard.py "$build"
