#!/bin/bash
# Raw HTTP against build/hoist with the demo model: what no client library lets one do.
#   tests/suite_http.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
command -v python3 >/dev/null || { echo "SKIP http: no python3"; exit 0; }
start_server "$build" models/demo-exl3 --api-key secret || exit 1
python3 tests/raw_http.py "$port" "$server"
