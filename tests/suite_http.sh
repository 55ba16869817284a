#!/bin/bash
# Raw HTTP against build/hoist with the demo model: what no client library lets one do.
#   tests/suite_http.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
command -v python3 >/dev/null || { echo "SKIP http: no python3"; exit 0; }
start_server "$build" models/demo-exl3 --api-key secret || exit 1
python3 tests/raw_http.py "$port" "$server"
status=$?

# Where few open files are allowed, whoever comes too many hears why.
ulimit -n 200
start_server "$build" models/demo-exl3 || exit 1
python3 - "$port" <<'E' || status=1
import socket, sys
ask = b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n'
clients = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10) for _ in range(130)]
for c in clients:
    try:
        c.sendall(ask)
    except OSError:
        pass   # refused already: the answer is there to be read
def read(c):
    try:
        return c.recv(4096)[9:12]
    except OSError:
        return b''
got = [read(c) for c in clients]
want = [b'200'] * 100 + [b'503'] * 30
print('ok few_files' if got == want else f'not ok few_files: {got}')
sys.exit(got != want)
E
kill -HUP $server
if wait $server; then echo "ok hangup"; else echo "not ok hangup: exit status $?"; status=1; fi
exit $status
