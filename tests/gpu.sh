#!/bin/bash
# Builds what a GPU machine needs (nvcc and gcc, no libraries) and runs the checks that need one.
#   tests/gpu.sh [OUT]      figures go to OUT/gpu.txt as well
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/gpu}
mkdir -p build/gpu "$out"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${ARCH:--gencode=arch=compute_90a,code=sm_90a}
flags="-O2 -std=c11 -D_GNU_SOURCE -ffp-contract=off -pthread -Iinclude -Isrc"
fail=0
for f in src/base/base.c src/dev/*.c; do
    case $f in *_test.c) continue ;; esac
    gcc $flags -c "$f" -o build/gpu/"$(basename "$f" .c)".o & done
wait
for f in src/dev/*.cu tests/cuda_check.cu; do
    "$nvcc" -std=c++17 $arch -O3 --fmad=false -Iinclude -Isrc -c "$f" -o build/gpu/"$(basename "$f" .cu)".cu.o || fail=1 &
done
wait
"$nvcc" $arch build/gpu/*.o -o build/gpu/cuda_check -Xcompiler -pthread || exit 1
build/gpu/cuda_check 2>&1 | tee "$out/gpu.txt"
! grep -q '^not ok' "$out/gpu.txt"
