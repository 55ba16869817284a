#!/bin/bash
# Builds that have no test of their own: clang with all warnings, dev for aarch64, the portable program.
#   tests/suite_builds.sh BUILD
unset MAKEFLAGS MFLAGS MAKELEVEL
try() {          # NAME COMMAND…
    local name=$1 log
    shift
    if log=$("$@" 2>&1); then
        echo "ok $name"
    else
        echo "not ok $name: $(echo "$log" | grep -E 'error|warning|undefined' | head -n 5)"
    fi
}

aarch64() {
    for f in src/base/base.c src/dev/*.c; do
        case $f in *_test.c) continue ;; esac
        aarch64-linux-gnu-gcc -std=c11 -D_GNU_SOURCE -O1 -ffp-contract=off -Wall -Wextra -Werror -Iinclude -Isrc \
            -c "$f" -o /dev/null || return 1
    done
}

if command -v clang >/dev/null; then
    try build_clang make -s -j2 CC=clang
else
    echo "SKIP build_clang: no clang"
fi
if command -v aarch64-linux-gnu-gcc >/dev/null; then
    try build_aarch64 aarch64
else
    echo "SKIP build_aarch64: no aarch64-linux-gnu-gcc"
fi
try no_tls gcc -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -Iinclude -Isrc -isystem /usr/share/include/llhttp \
    -c src/serve/http_tls.c -o /dev/null
try build_portable make -s build/hoist-portable
foreign=$(ldd build/hoist-portable 2>/dev/null | awk '{print $1}' |
          grep -vE '^(linux-vdso|libc\.so|libm\.so|libpthread|libdl|librt|/lib64/ld-linux)')
if [ -z "$foreign" ]; then echo "ok portable_needs_glibc_only"; else echo "not ok portable_needs_glibc_only: $foreign"; fi
