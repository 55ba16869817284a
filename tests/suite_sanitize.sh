#!/bin/bash
# The unit tests under address+undefined, those with threads under thread too. Skipped when this run is
# itself a sanitizer build.
#   tests/suite_sanitize.sh BUILD
case $1 in *-address* | *-thread*) exit 0 ;; esac
unset MAKEFLAGS MFLAGS MAKELEVEL
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# At -O1 a build takes less than half of what -O2 takes; no test here needs the command line, or the
# encoder, which only that uses.
src=$(printf '%s ' src/{base,text,dev,model,engine,serve}/*.c |
      sed -E 's/[^ ]*(_test|dev\/(enc_[a-z0-9_]*|exl3_[a-z]*|dense))\.c //g')

# NAME, or NAME:PATTERN for some of its tests; what takes long comes first.
threads=(park_test engine_test:test_cancel server_test generate_test 'health_test:test_b*' health_test:test_stall
         base_test)
address=('engine_test:test_c*' 'engine_test:test_s?o*' park_test store_test:test_deadline store_test:test_trouble
         grammar_test token_test calls_test reply_test
         'health_test:test_b*' 'health_test:test_c*' generate_test server_test json_test 'grammars_test:test_s*'
         fmt_test jinja_test base_test engine_test:test_grammar weights_test health_test:test_lost health_test:test_record sched_test
         grammar_tools_test ops_args_test)

build() {        # SAN, folder, tests…
    local san=$1 dir=$2 log
    shift 2
    log=$(make -s -j2 SAN="$san" OPT='-O1 -g1' SRC="$src" $(printf "build/$dir/test/%s\n" "${@%%:*}" | sort -u) 2>&1) ||
        echo "not ok build_$dir: $(echo "$log" | grep -E 'error|undefined' | head -n 5)"
}

run() {          # folder, test
    local dir=$1 t=$2 pattern= log
    [ "$t" != "${t%%:*}" ] && pattern=${t#*:}
    if log=$(timeout 600 "build/$dir/test/${t%%:*}" $pattern 2>&1); then
        echo "ok ${t}_$dir"
    else
        echo "not ok ${t}_$dir: $(echo "$log" | grep -E 'ERROR|runtime error|WARNING: Thread|FAILED|#[0-4] ' | head -n 12)"
    fi
}
export -f run

build thread gcc-thread "${threads[@]}" http_test
build address,undefined gcc-address-undefined "${address[@]}" http_test
# One for each of two CPUs, and beside them those that mostly wait.
for dir in gcc-thread gcc-address-undefined; do run $dir http_test; done &
{ printf 'gcc-address-undefined %s\n' "${address[@]}"; printf 'gcc-thread %s\n' "${threads[@]}"; } |
    xargs -P 2 -L 1 bash -c 'run "$@"' run
wait
