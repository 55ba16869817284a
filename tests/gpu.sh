#!/bin/bash
# Builds what a GPU machine needs (nvcc and gcc, no libraries) and runs the checks that need one:
# build/gpu/cuda_check (decode), cuda_gemm (products with many rows), cuda_prefill (the rest of
# prefill), cuda_encode (making EXL3 matrices).
#   tests/gpu.sh [DIR [check|moe|time|host …]]   DIR instead of build/gpu; figures go to DIR/gpu.txt as well;
#            the words are cuda_check's, the others run their own with the same name, if they have one
#   RUN=0: only builds. ARCH: nvcc's -gencode, default that of the H100 and H200
set -u
cd "$(dirname "$0")/.." || exit 1
dir=${1:-build/gpu}
shift
mkdir -p "$dir"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${ARCH:--gencode=arch=compute_90a,code=sm_90a}
flags="-O2 -std=c11 -D_GNU_SOURCE -ffp-contract=off -pthread -Iinclude -Isrc -DHX_CUDA"
rm -f "$dir"/*.o
for f in src/base/base.c src/dev/*.c; do
    case $f in *_test.c) continue ;; esac
    gcc $flags -c "$f" -o "$dir/$(basename "$f" .c).o" &
done
programs="cuda_check cuda_gemm cuda_prefill cuda_encode"
for f in src/dev/*.cu tests/cuda_*.cu; do
    case $f in tests/*) o=main ;; *) o=cu ;; esac
    "$nvcc" -std=c++17 $arch -O3 --fmad=false -Iinclude -Isrc -c "$f" \
        -o "$dir/$(basename "$f" .cu).$o.o" &
done
wait
for p in $programs; do
    "$nvcc" $arch $dir/$p.main.o $(ls $dir/*.o | grep -v '\.main\.o') \
        -o $dir/$p -Xcompiler -pthread || exit 1
done
[ "${RUN:-1}" = 0 ] && exit 0
bad=0
for p in $programs; do
    $dir/$p "$@" || bad=1
done > >(tee "$dir/gpu.txt") 2>&1
wait $!
[ "$bad" = 0 ] && ! grep -q '^not ok' "$dir/gpu.txt"
