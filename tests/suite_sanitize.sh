#!/bin/bash
# The unit tests under address+undefined, those with threads under thread too. Skipped when this run is
# itself a sanitizer build.
#   tests/suite_sanitize.sh BUILD
case $1 in *-address* | *-thread*) exit 0 ;; esac
unset MAKEFLAGS MFLAGS MAKELEVEL
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

# At -O1 a build takes less than half of what -O2 takes; no test here needs the command line.
src=$(printf '%s ' src/{base,text,dev,model,engine,serve}/*.c | sed 's/[^ ]*_test\.c //g')

run() {          # SAN, folder, tests…: NAME, or NAME:PATTERN for some of its tests
    local san=$1 dir=$2 log t
    shift 2
    if ! log=$(make -s -j2 SAN="$san" OPT='-O1 -g1' SRC="$src" $(printf "build/$dir/test/%s " "${@%%:*}") 2>&1); then
        echo "not ok build_$dir: $(echo "$log" | grep -E 'error|undefined' | head -n 5)"
        return
    fi
    for t in "$@"; do
        local pattern=
        [ "$t" != "${t%%:*}" ] && pattern=${t#*:}
        if log=$(timeout 600 "build/$dir/test/${t%%:*}" $pattern 2>&1); then
            echo "ok ${t}_$dir"
        else
            echo "not ok ${t}_$dir: $(echo "$log" | grep -E 'ERROR|runtime error|WARNING: Thread|FAILED|#[0-4] ' | head -n 12)"
        fi
    done
}

run address,undefined gcc-address-undefined base_test json_test token_test jinja_test reply_test weights_test \
    http_test server_test generate_test ops_args_test fmt_test grammar_test grammar_tools_test calls_test \
    'grammars_test:test_s*' sched_test 'health_test:test_b*' 'health_test:test_c*' health_test:test_lost health_test:test_record \
    'engine_test:test_c*' 'engine_test:test_s?o*' engine_test:test_grammar
run thread gcc-thread base_test http_test server_test generate_test engine_test:test_cancel health_test:test_stall 'health_test:test_b*'
