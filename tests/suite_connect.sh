#!/bin/bash
# What `hoist connect` prints and writes.
#   tests/suite_connect.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
command -v python3 >/dev/null || { echo "SKIP connect: no python3"; exit 0; }
npm_packages connect || true
start_server "$build" models/demo-exl3 || exit 1
python3 tests/connect.py "$build" "$url"
