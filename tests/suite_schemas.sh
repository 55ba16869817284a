#!/bin/bash
# JSON schemas, as documents and as arguments of calls, against ajv.
#   tests/suite_schemas.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
npm_packages schemas || exit 0
node tests/schemas.mjs "$build/test/grammar_driver"
