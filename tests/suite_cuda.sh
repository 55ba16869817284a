#!/bin/bash
# What of the GPU code can be tested without a GPU: that it compiles for every kind of target, and what is
# said about drivers, GPUs and locked memory. `make cuda-all` makes machine code for all of them (half an hour).
#   tests/suite_cuda.sh BUILD
export nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
    echo "SKIP cuda: no nvcc"
    exit 0
fi
export dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# To PTX, hardly optimised: seconds a file. The text is chosen by 80 (as 86), 89, 90a, and 120a (as 121a); where
# there must be none of an architecture's instructions only ptxas would refuse them.
ptx() {
    local f=$1 out=$dir/$2-$(basename "$1").ptx code
    "$nvcc" -std=c++17 --fmad=false -Iinclude -Isrc -arch=compute_$2 -Xcicc -O0 -ptx "$f" -o "$out" 2>&1 |
        grep -m 3 -E 'error|fatal'
    [ -s "$out" ] || echo "$f: nothing came"
    case $2 in 90a) code=' = 2' ;; 120a) code=' = 1' ;; *) code= ;; esac # what the host asks of the code
    [ "${f##*/}" != cuda.cu ] || grep -q "\.u32 loaded$code;" "$out" || echo "$f: says that it is for another GPU"
    case $2 in
    80) grep -m 1 -HE 'wgmma|setmaxnreg|cp\.async\.bulk|griddepcontrol|cvt[.a-z0-9]*\.e4m3' "$out" ;;
    89) grep -m 1 -HE 'wgmma|setmaxnreg|cp\.async\.bulk|griddepcontrol' "$out" ;;
    120a) grep -m 1 -HE 'wgmma|setmaxnreg' "$out" ;;
    esac
}
export -f ptx
for arch in 80 89 90a 120a; do
    programs=$([ $arch != 90a ] || ls tests/*.cu) # of `make test-gpu`
    log=$(ls src/dev/*.cu $programs | xargs -P 2 -I F bash -c "ptx F $arch")
    if [ -z "$log" ]; then echo "ok cuda_compiles_$arch"; else echo "not ok cuda_compiles_$arch: ${log:0:500}"; fi
done

# nvcc compiles all that names the runtime: it alone knows where its headers are.
fail_test() {
    for f in src/dev/cuda.cu src/dev/cuda_lane.cu tests/cuda_fail.cc; do
        "$nvcc" -std=c++17 -arch=sm_80 -O1 -Xcompiler -Wall -Iinclude -Isrc -c $f -o "$dir/$(basename $f).o" || return 1
    done
    gcc -std=c11 -D_GNU_SOURCE -O1 -Iinclude -Isrc -c src/base/base.c -o "$dir/base.o" &&
        g++ -no-pie -pthread "$dir"/*.o -Wl,--unresolved-symbols=ignore-all -o "$dir/cuda_fail" # operations: none is called
}
if log=$(fail_test 2>&1); then
    "$dir/cuda_fail"
else
    echo "not ok cuda_fail: $(echo "$log" | grep -E 'error|undefined' | head -n 5)"
fi
