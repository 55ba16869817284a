#!/bin/bash
# Builds what a GPU machine needs (nvcc and gcc, no libraries) and runs the checks that need one.
#   tests/gpu.sh [OUT [check|moe|time|host …]]   figures go to OUT/gpu.txt as well
#   RUN=0: only builds. ARCH: nvcc's -gencode, default that of the H100 and H200
set -u
cd "$(dirname "$0")/.." || exit 1
out=${1:-build/gpu}
shift
mkdir -p build/gpu "$out"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${ARCH:--gencode=arch=compute_90a,code=sm_90a}
flags="-O2 -std=c11 -D_GNU_SOURCE -ffp-contract=off -pthread -Iinclude -Isrc"
rm -f build/gpu/*.o
for f in src/base/base.c src/dev/*.c; do
    case $f in *_test.c) continue ;; esac
    gcc $flags -c "$f" -o build/gpu/"$(basename "$f" .c)".o &
done
for f in src/dev/*.cu tests/cuda_check.cu; do
    "$nvcc" -std=c++17 $arch -O3 --fmad=false -Iinclude -Isrc -c "$f" \
        -o build/gpu/"$(basename "$f" .cu)".cu.o &
done
wait
"$nvcc" $arch build/gpu/*.o -o build/gpu/cuda_check -Xcompiler -pthread || exit 1
[ "${RUN:-1}" = 0 ] && exit 0
build/gpu/cuda_check "$@" 2>&1 | tee "$out/gpu.txt"
[ "${PIPESTATUS[0]}" = 0 ] && ! grep -q '^not ok' "$out/gpu.txt"
