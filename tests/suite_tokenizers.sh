#!/bin/bash
# Our token ids beside those of the Hugging Face tokenizers library.
#   tests/suite_tokenizers.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
npm_packages tokenizers || exit 0
node tests/tokenizers_npm.mjs "$build"
