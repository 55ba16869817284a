#!/bin/bash
# What a user is told of routed experts that do not fit the GPU (here an arena stands for its memory): in an
# answer's timings, in /stats, in /metrics.
#   tests/suite_experts.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
command -v python3 >/dev/null || { echo "SKIP experts: no python3"; exit 0; }
. tests/server.sh
start_server "$build" models/demo-exl3 --vram 400KB --ctx 2048 --no-canary || exit 1
python3 - "$url" <<'EOF'
import json, re, sys, time, urllib.request

url, lanes, bad = sys.argv[1], ("here", "link", "lane", "ahead"), 0

def get(path, body=None):
    data = json.dumps(body).encode() if body else None
    return urllib.request.urlopen(urllib.request.Request(url + path, data, {"Content-Type": "application/json"})).read()

def check(name, ok, what):
    global bad
    bad += not ok
    print(f"ok experts_{name}" if ok else f"not ok experts_{name}: {what}")

for _ in range(300):        # loaded?
    try:
        get("/health")
        break
    except urllib.error.HTTPError:
        time.sleep(0.1)
uses = []
for text in ("Hello", "What is the capital of France?"):
    r = json.loads(get("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 30}))
    uses.append(r["timings"].get("experts", {}))
check("timings", all(sum(u.get(l, 0) for l in lanes) > 0 for u in uses), uses)
check("hit_rate", all(abs(u["hit_rate"] - u["here"] / sum(u[l] for l in lanes)) < 1e-3 for u in uses), uses)
time.sleep(0.3)             # the last step may be counted just now
stats = json.loads(get("/stats"))["experts"]
# A step may be on its way when an answer ends: it is nobody's.
for l in lanes:
    mine = sum(u[l] for u in uses)
    check(f"stats_{l}", mine <= stats[l] <= mine + 2 * 80, (mine, stats))
metrics = get("/metrics").decode()
value = lambda name: int(re.search(rf"^hoist_experts_{name}_total (\d+)$", metrics, re.M).group(1))
check("metrics", all(value(l) == stats[l] for l in lanes), stats)
check("bytes", value("link_bytes") == stats["link_bytes"] == stats["link"] * stats["bytes"] and
      value("lane_bytes") == stats["lane_bytes"] and value("push_bytes") == stats["push_bytes"] and
      value("evicted") == stats["evicted"] and value("wait_us") == stats["wait_us"], stats)
sys.exit(bad != 0)
EOF
