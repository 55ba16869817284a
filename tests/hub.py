#!/usr/bin/env python3
"""A model hub of two folders' worth of trouble, for tests of `hoist pull` (python3 standard library only).
   tests/hub.py FOLDER LOG TROUBLE[,TROUBLE]      prints its port; serves FOLDER as repository test/model
Troubles: drop (each connection ends after 3 MB), norange (ranges are ignored), redirect (files are on another host,
which must not see the token), busy (every third request: 429 with Retry-After: 1), long (more bytes than asked for), shift
(the wrong range, twice), corrupt (the first transfer of every file has a wrong byte), rotten (all have), short (files are
shorter than listed: 416), token (401 without it), pages (the list comes in pages), elsewhere (their next is on another host), slow (2 MB/s), gone (404), html (200
with a page instead of JSON), evil (a name that leaves the folder), twice (a file is listed again), endless (every page names itself as the next), silent (no answer at all, twice)."""
import hashlib
import http.server
import json
import os
import re
import sys
import threading
import time

root, log_path, trouble = sys.argv[1], sys.argv[2], set(sys.argv[3].split(","))
lock = threading.Lock()
count = {"requests": 0}
seen = {}


def files():
    out = []
    for base, _, names in os.walk(root):
        for n in names:
            path = os.path.join(base, n)
            data = open(path, "rb").read()
            entry = {"type": "file", "path": os.path.relpath(path, root), "size": len(data),
                     "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
            if len(data) > 100000:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            out.append(entry)
    if "evil" in trouble:
        out.append({"type": "file", "path": "sub/../../evil", "size": 1, "oid": "0" * 40})
    if "twice" in trouble:
        out.append(out[0])
    return sorted(out, key=lambda e: e["path"])


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def note(self, line):
        with lock, open(log_path, "a") as f:
            f.write(line + "\n")

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for k, v in headers.items():
            self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def times(self, what):
        with lock:
            seen[what] = seen.get(what, 0) + 1
            return seen[what]

    def do_GET(self):
        auth = self.headers.get("Authorization", "-")
        host = self.headers.get("Host", "").split(":")[0]
        self.note(f"{host} {self.path} {self.headers.get('Range', '-')} {auth}")
        n = self.times("requests")
        self.path = self.path.removeprefix("http://hub.invalid")      # asked as a proxy
        if "silent" in trouble and n <= 2:
            self.close_connection = True
            return
        if "busy" in trouble and n % 3 == 0:
            return self.reply(429, b"slow down", Retry_After="1")
        if "token" in trouble and auth != "Bearer secret" and host == "127.0.0.1":
            return self.reply(401, b"who are you?")
        if m := re.match(r"/api/models/test/model/revision/(.*)", self.path):
            if m[1] not in ("main", "refs%2Fpr%2F1"):
                return self.reply(404, b"{}")
            if "html" in trouble:
                return self.reply(200, b"<html>captive portal</html>")
            return self.reply(200, json.dumps({"sha": "c0ffee" * 6 + "abcd"}).encode())
        if m := re.match(r"/api/models/test/model/tree/c0ffee\w*\?recursive=true(&page=(\d+))?", self.path):
            if "endless" in trouble:
                return self.reply(200, b"[]", Link=f'<http://{self.headers["Host"]}{self.path}>; rel="next"')
            all_files = files()
            if "pages" not in trouble:
                return self.reply(200, json.dumps(all_files + [{"type": "directory", "path": "sub"}]).encode())
            i = int(m[2] or 0)
            host = f"localhost:{self.server.server_port}" if "elsewhere" in trouble else self.headers["Host"]
            link = f'<http://{host}/api/models/test/model/tree/{"c0ffee" * 6}abcd?recursive=true&page={i + 1}>; rel="next"'
            return self.reply(200, json.dumps(all_files[i:i + 1]).encode(), **({"Link": link} if i + 1 < len(all_files) else {}))
        if m := re.match(r"/test/model/resolve/c0ffee\w*/(.*)", self.path):
            if "gone" in trouble:
                return self.reply(404)
            if "redirect" in trouble:
                return self.reply(302, Location=f"http://localhost:{self.server.server_port}/cdn/{m[1]}?signature=x")
            return self.send_file(m[1])
        if m := re.match(r"/cdn/(.*)\?", self.path):
            return self.send_file(m[1])
        self.reply(404, b"{}")

    def send_file(self, name):
        data = open(os.path.join(root, re.sub("%20", " ", name)), "rb").read()
        if "rotten" in trouble or ("corrupt" in trouble and self.times("c" + name + self.headers.get("Range", "")) == 1):
            data = data[:-1] + bytes([data[-1] ^ 1])
        if "short" in trouble:
            data = data[: len(data) // 2]
        size, start, end = len(data), 0, len(data) - 1
        m = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        ranged = bool(m) and "norange" not in trouble
        if ranged:
            start, end = int(m[1]), min(int(m[2]), size - 1)
            if start >= size:
                return self.reply(416, Content_Range=f"bytes */{size}")
            if "shift" in trouble and self.times("shift") <= 2:
                start = max(0, start - 7) if start > 0 else 7
        if "long" in trouble:
            end = size - 1
        body = data[start:end + 1]
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        step = 65536
        for at in range(0, len(body), step):
            if "drop" in trouble and at >= 3000000:
                self.close_connection = True
                return
            try:
                self.wfile.write(body[at:at + step])
            except OSError:
                self.close_connection = True
                return
            if "slow" in trouble:
                time.sleep(step / 2e6)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
