# server.sh - for the suites: the packages they need, and a server of their own. Sourced.

# The packages of tests/package.json; false, with a SKIP line, where they cannot be had.
npm_packages() {                # NAME of the suite
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
        echo "SKIP $1: no node and npm"
        return 1
    fi
    if ! [ tests/node_modules/.package-lock.json -nt tests/package-lock.json ]; then
        exec 9>"${TMPDIR:-/tmp}/hoist-tests-npm.lock"
        flock 9
        if ! timeout 300 npm ci --prefix tests --no-audit --no-fund >/dev/null 2>&1; then
            echo "SKIP $1: npm ci --prefix tests failed (no network?)"
            return 1
        fi
        touch tests/node_modules/.package-lock.json
    fi
}

# Sets server (process), port and url; the server ends with the script.
start_server() {                # BUILD MODEL [options]
    local build=$1 log
    shift
    log=$(mktemp)
    "$build/hoist" serve "$@" --port 0 >"$log" 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server 2>/dev/null; rm -f '"$log" EXIT
    for _ in $(seq 300); do
        port=$(sed -n 's/^serving on http:.*:\([0-9]*\)$/\1/p' "$log")
        [ -n "$port" ] && break
        kill -0 $server 2>/dev/null || break
        sleep 0.1
    done
    if [ -z "$port" ]; then
        echo "not ok server: did not start: $(tail -n 3 "$log" | tr '\n' ' ')"
        return 1
    fi
    url=http://127.0.0.1:$port
}
