#!/bin/bash
# The Responses API with the official OpenAI client, on a free loopback port.
#   tests/suite_responses.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
npm_packages responses || exit 0
start_server "$build" models/demo-exl3 || exit 1
node tests/responses.mjs "$url"
