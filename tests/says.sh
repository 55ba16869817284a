# says.sh - for the suites: a folder of their own, and what a command must say. Sourced.
#   suite: what names begin with; limit: seconds a command may take (60)

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

check() {        # NAME, expected status, pattern in what it printed, command…
    local name=${suite}_$1 status=$2 pattern=$3 got rc
    shift 3
    got=$(timeout "${limit:-60}" "$@" 2>&1 </dev/null)
    rc=$?
    if [ "$rc" = "$status" ] && grep -qE "$pattern" <<<"$got"; then
        echo "ok $name"
    else
        echo "not ok $name: status $rc (expected $status), said: $(head -c 300 <<<"$got")"
    fi
}
