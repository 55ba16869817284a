#!/bin/bash
# The official OpenAI client against build/hoist with the demo model, on a free loopback port.
#   tests/suite_openai.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
npm_packages openai || exit 0
start_server "$build" models/demo-exl3 || exit 1
node tests/openai.mjs "$url/v1"
