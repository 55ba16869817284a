#!/bin/bash
# The AI SDK and LangChain, on a free loopback port.
#   tests/suite_ai_sdk.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
npm_packages ai_sdk || exit 0
start_server "$build" models/demo-exl3 || exit 1
node tests/ai_sdk.mjs "$url"
