#!/bin/bash
# SGLang- and Ollama-shaped clients against build/hoist with the demo model; every answer of
# recorded exchanges against docs/openapi.json.
#   tests/suite_dialects.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
start_server "$build" models/demo-exl3 || exit 1
rc=0
if command -v python3 >/dev/null; then
    python3 tests/sglang.py "$url" || rc=1
else
    echo "SKIP sglang: no python3"
fi
if npm_packages dialects; then
    node tests/ollama.mjs "$url" || rc=1
    node tests/openapi.mjs "$url" || rc=1
fi
exit $rc
