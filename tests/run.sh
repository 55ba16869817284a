#!/bin/bash
# Runs the test programs of a build and adds up their counts.
#   tests/run.sh BUILD [unit|ops|tiny]
# Last line: "N passed, N failed, N skipped". Exit status 1 when anything failed.
set -u
build=$1
part=${2:-all}
passed=0 failed=0 skipped=0
export CUDA_VISIBLE_DEVICES= # a GPU would be chosen where no device is named
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

count() { sed -n "s/^\[  $1  \] \([0-9]*\) test.*/\1/p" "$2" | awk '{n += $1} END {print n + 0}'; }

cmocka() {
    local name=$1 start=$SECONDS p f s
    timeout 900 "$build/test/$name" >"$log/$name" 2>&1
    local rc=$?
    p=$(count PASSED "$log/$name") f=$(count FAILED "$log/$name") s=$(count SKIPPED "$log/$name")
    [ "$rc" -ne 0 ] && [ "$f" -eq 0 ] && f=1       # crashed, hung or did not start
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    grep -h '^SKIP ' "$log/$name"
    printf '%-18s %4d passed %3d failed %3d skipped  %3d s\n' "$name" "$p" "$f" "$s" $((SECONDS - start))
    [ "$f" -gt 0 ] && { echo "--- $name (exit $rc)"; grep -vE '^\[ (RUN|      OK)' "$log/$name" | tail -n 60; }
    return 0
}

# A script prints lines "ok NAME", "not ok NAME: why", "SKIP NAME: why".
script() {
    local name=$1 start=$SECONDS p f s
    shift
    timeout 1200 "$@" >"$log/$name" 2>&1
    local rc=$?
    p=$(grep -c '^ok ' "$log/$name") f=$(grep -c '^not ok ' "$log/$name") s=$(grep -c '^SKIP ' "$log/$name")
    [ "$rc" -ne 0 ] && [ "$f" -eq 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    grep -h '^SKIP ' "$log/$name"
    printf '%-18s %4d passed %3d failed %3d skipped  %3d s\n' "$name" "$p" "$f" "$s" $((SECONDS - start))
    [ "$f" -gt 0 ] && { echo "--- $name (exit $rc)"; grep -v '^ok ' "$log/$name" | tail -n 60; }
    return 0
}

case $part in
ops)  list="canon_test fmt_test ops_test ops_args_test" ;;
tiny) list="model_test engine_test" ;;
*)    list=$(cd "$build/test" && ls -1 ./*_test | sed 's,^\./,,') ;;
esac
for t in $list; do cmocka "$t"; done

if [ "$part" = all ]; then
    for s in tests/suite_*.sh; do
        [ -e "$s" ] && script "$(basename "$s" .sh)" bash "$s" "$build"
    done
    script check tools/check.sh --tap
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
