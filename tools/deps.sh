#!/bin/sh
# Installs what is missing to build and run Hoist on Debian 12 (or a relative of it); with the word
# "test", also what its tests need. As root or with sudo; says nothing when nothing is missing.
set -eu

need=""
want() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed' || need="$need $1"; }

command -v gcc >/dev/null 2>&1 || need="$need gcc"
command -v make >/dev/null 2>&1 || need="$need make"
if command -v dpkg-query >/dev/null 2>&1; then
    for p in libc6-dev libuv1-dev node-llhttp libjson-c-dev libpcre2-dev libutf8proc-dev libssl-dev libxxhash-dev libcurl4; do
        want "$p"
    done
    if [ "${1:-}" = test ]; then
        for p in libcmocka-dev libcurl4-openssl-dev python3 python3-jsonschema clang libclang-rt-14-dev gcc-aarch64-linux-gnu; do
            want "$p"
        done
        # Clients from npm drive the server; any node from 18 on will do.
        command -v node >/dev/null 2>&1 || need="$need nodejs npm"
    fi
else
    echo "deps: no dpkg here; install the libraries named in docs/ARCHITECTURE.md (Dependencies) yourself" >&2
    exit 0
fi
[ -z "$need" ] && exit 0

if [ "$(id -u)" = 0 ]; then
    sudo=""
elif command -v sudo >/dev/null 2>&1; then
    sudo="sudo"
else
    echo "deps: missing packages:$need; install them as root: apt-get install$need" >&2
    exit 1
fi
echo "deps: installing$need"
log=$(mktemp)
if ! { $sudo apt-get update -qq && \
       $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $need; } >"$log" 2>&1; then
    echo "deps: apt-get could not install$need; its last words:" >&2
    tail -n 5 "$log" >&2
    rm -f "$log"
    exit 1
fi
rm -f "$log"
