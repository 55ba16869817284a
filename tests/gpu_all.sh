#!/bin/bash
# make test-gpu: every test that needs a GPU. Last line: "N passed, N failed, N skipped", of programs.
#   tests/gpu_all.sh BUILD
build=$1 passed=0 failed=0 skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
try() {          # NAME COMMAND…
    local name=$1 start=$SECONDS word=ok
    shift
    timeout 900 "$@" >"$log" 2>&1 && ! grep -q '^not ok' "$log" || word='not ok'
    echo "$word gpu_$name  $((SECONDS - start)) s"
    if [ "$word" = ok ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        grep -vE '^(ok |\[ (RUN|      OK))' "$log" | tail -n 40
    fi
}

# Kernels by themselves, against double and the CPU's bits.
RUN=0 try builds tests/gpu.sh build/gpu
try decode build/gpu/cuda_check check moe
try rows build/gpu/cuda_gemm check experts few
try prefill build/gpu/cuda_prefill check
try encode build/gpu/cuda_encode check
try ops "$build/test/ops_test" --gpu
# The code for GPUs before Hopper, by the same programs.
here=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
if [ "$here" -ge 90 ]; then
    RUN=0 ARCH="-gencode arch=compute_80,code=sm_$here" try builds_80 tests/gpu.sh build/gpu-80
    try decode_80 build/gpu-80/cuda_check check moe
    try rows_80 build/gpu-80/cuda_gemm check experts
    try prefill_80 build/gpu-80/cuda_prefill check
fi
# Through the model and the engine: wherever an expert ran, the same answer.
try model "$build/test/model_test" cuda
try graph "$build/test/graph_test" cuda
try graph_real "$build/test/graph_test" cuda synthetic:glm-5.3-flash,layers=8,experts=16
try store "$build/test/store_test" --gpu
try lend "$build/test/lend_test" --gpu
try lost "$build/test/health_test" test_lost cuda
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
    try memcheck "$sanitizer" --error-exitcode 1 build/gpu/cuda_prefill small
    try memcheck_ops "$sanitizer" --error-exitcode 1 "$build/test/ops_test" --gpu
    try memcheck_few "$sanitizer" --error-exitcode 1 build/gpu/cuda_gemm few 4096x24576
    # Not matmul and moe, whose copies on Hopper end the tool; kda_chunk and mla_attend take it too long.
    for op in embed rmsnorm layernorm head_matmul swiglu hc_mix hc_merge hc_mean conv_short kda_gate kda_step kda_out \
        latent_append index_append index_score topk router plan combine sample; do
        try "race_$op" bash -o pipefail -c '"$0" --tool racecheck --racecheck-report all "$1" --gpu "table $2" |
            tee /dev/stderr | grep " 0 hazards displayed"' "$sanitizer" "$build/test/ops_test" "$op"
    done
else
    echo "SKIP memcheck: no compute-sanitizer"
    skipped=1
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
