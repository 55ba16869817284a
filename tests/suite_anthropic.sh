#!/bin/bash
# The Messages API with the official Anthropic client, on a free loopback port.
#   tests/suite_anthropic.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
npm_packages anthropic || exit 0
start_server "$build" models/demo-exl3 || exit 1
node tests/anthropic.mjs "$url"
