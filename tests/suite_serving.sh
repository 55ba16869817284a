#!/bin/bash
# A server with the demo model under many clients: progress, introspection, metrics, the record and
# its replay, 64 streams beside 2,000 idle connections.
#   tests/suite_serving.sh [BUILD] [SECONDS]      SECONDS: of the soak (10); `make soak` runs it for long
build=${1:-build} seconds=${2:-10}
cd "$(dirname "$0")/.." || exit 1
. tests/server.sh
command -v python3 >/dev/null || { echo "SKIP serving: no python3"; exit 0; }
[ "$(ulimit -Hn)" = unlimited ] || [ "$(ulimit -Hn)" -ge 4500 ] || { echo "SKIP serving: few open files allowed"; exit 0; }
ulimit -Sn 4500
demo=models/demo-exl3
tmp=$(mktemp -d)
start_server "$build" $demo --streams 64 --ctx 4096 --park-ram 16MB --record "$tmp/record" --quiet || exit 1
python3 tests/serving.py "$port" "$seconds" "$tmp/record" || status=1
kill $server
wait $server || { echo "not ok serving_drain: exit status $?"; status=1; }

# Lines of the record run again: a sampled answer, the same with another answer written down.
check() {        # NAME, expected status, pattern, command…
    local name=$1 want=$2 pattern=$3 got rc
    shift 3
    got=$(timeout 60 "$@" 2>&1 </dev/null)
    rc=$?
    if [ $rc = "$want" ] && grep -qE "$pattern" <<<"$got"; then echo "ok serving_$name"; else
        echo "not ok serving_$name: status $rc, said: $(head -c 300 <<<"$got")"
        status=1
    fi
}
check replay 0 '^equal: 50 tokens, length' "$build/hoist" run $demo --ctx 4096 --replay "$tmp/record:5"
check replay_last 0 '^equal: ' "$build/hoist" run $demo --ctx 4096 --replay "$tmp/record"
# Of what was answered under load, one of each kind.
for line in $(python3 - "$tmp/record" <<'E'
import json, sys
kinds = {}
for i, line in enumerate(open(sys.argv[1]), 1):
    r = json.loads(line)
    if len(r['answer']) > 8:
        kinds[r['grammar_kind'], r['grammar_lazy'], r['think_max'] > 0, len(r['bias']) > 0,
              r['thinking_ended'], r['finish'] == 'cancel'] = i
print(*kinds.values())
E
); do
    check replay_under_load_$((++kind)) 0 '^equal: ' "$build/hoist" run $demo --ctx 4096 --replay "$tmp/record:$line"
done
sed -n 5p "$tmp/record" | python3 -c 'import json, sys
r = json.load(sys.stdin)
r["answer"][7] = 1
print(json.dumps(r))' >"$tmp/other"
check replay_different 1 '^different: token 7 of the answer is [0-9]+, was 1' "$build/hoist" run $demo --ctx 4096 --replay "$tmp/other"
sed -n 5p "$tmp/record" | sed 's/"finish":"length"/"finish":"eos"/' >"$tmp/ended"
check replay_other_end 1 '^different: ends after 50 tokens \(length\), was 50 \(eos\)' "$build/hoist" run $demo --ctx 4096 --replay "$tmp/ended"
check replay_no_line 1 'no line 99999' "$build/hoist" run $demo --replay "$tmp/record:99999"
echo "{}" >"$tmp/none"
check replay_no_record 1 "no record" "$build/hoist" run $demo --replay "$tmp/none"
# What was written when the server is killed is there when it comes again.
asked() {       # prints how many tokens of the prompt were kept
    python3 - "$port" <<'E'
import json, sys, urllib.request
words = ' '.join(f'stone {i} by the river' for i in range(150))
body = {'messages': [{'role': 'user', 'content': words}], 'max_tokens': 3, 'temperature': 0}
request = urllib.request.Request(f'http://127.0.0.1:{sys.argv[1]}/v1/chat/completions', json.dumps(body).encode(),
                                 {'Content-Type': 'application/json'})
print(json.load(urllib.request.urlopen(request))['usage']['prompt_tokens_details']['cached_tokens'])
E
}
start_server "$build" $demo --ctx 4096 --park-dir "$tmp/park" --quiet || exit 1
before=$(asked)
for _ in $(seq 100); do
    [ "$(find "$tmp/park" -name '*.park' 2>/dev/null | wc -l)" -ge 3 ] && break
    sleep 0.2
done
kill -9 $server
wait $server 2>/dev/null
start_server "$build" $demo --ctx 4096 --park-dir "$tmp/park" --quiet || exit 1
after=$(asked)
if [ "$before" = 0 ] && [ "$after" -gt 500 ]; then echo "ok serving_killed"; else
    echo "not ok serving_killed: $before tokens kept before, $after after"
    status=1
fi
rm -rf "$tmp"
exit ${status:-0}
