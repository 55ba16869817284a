#!/bin/bash
# hoist bench: one JSON that says what was measured, on what; protocols; comparing two results.
#   tests/suite_bench.sh BUILD
hoist=$1/hoist demo=models/demo-exl3
suite=bench limit=150
. tests/says.sh

holds() {        # NAME, JSON file, python condition on r, f (figures), p (protocol)
    python3 -c "
import json, hashlib, sys
r = json.load(open('$2')); f = r['figures']; p = r['protocol']
sys.exit(not ($3))" 2>"$tmp/why" && echo "ok bench_$1" || echo "not ok bench_$1: not $3: $(tail -n 1 "$tmp/why")"
}

check decode 0 'decode, 1 stream' "$hoist" bench decode $demo -n 8 --streams 2 --json "$tmp/a.json"
holds json "$tmp/a.json" "len(f['decode, 2 streams']['all']) == 5 and f['decode, 2 streams']['min'] <= f['decode, 2 streams']['median'] <= f['decode, 2 streams']['max']"
holds speculation "$tmp/a.json" "p['speculative'] is False and p['text'] == 'random ids'"
holds machine "$tmp/a.json" "r['machine']['cpus'] >= 1 and r['machine']['memory_bytes'] > 1e8 and r['machine']['cpu'] and 'gpu' in r and r['machine']['load']"
holds build "$tmp/a.json" "r['build']['binary_sha256'] == hashlib.sha256(open('$hoist', 'rb').read()).hexdigest()"
holds ceilings "$tmp/a.json" "all(0.1 < r['ceilings'][c]['min'] <= r['ceilings'][c]['median'] <= r['ceilings'][c]['max'] < 5000 for c in ('memory_read', 'memory_copy'))"
check compare_self 0 'no difference shown' "$hoist" bench compare "$tmp/a.json" "$tmp/a.json"
python3 - "$tmp" <<'P'
import json, sys
r = json.load(open(sys.argv[1] + "/a.json"))
f = r["figures"]["decode, 1 stream"]
f["all"] = [100, 101, 102, 103, 104]
json.dump(r, open(sys.argv[1] + "/b.json", "w"))
f["all"] = [200, 202, 204, 206, 208]
r["machine"]["cpu"] = "another"
json.dump(r, open(sys.argv[1] + "/c.json", "w"))
P
check compare 0 'different processors' "$hoist" bench compare "$tmp/b.json" "$tmp/c.json" --json "$tmp/d.json"
python3 -c "
import json, sys
d = json.load(open('$tmp/d.json'))['ratios_b_over_a']['decode, 1 stream']
sys.exit(not (abs(d['ratio'] - 2) < 1e-5 and 1.9 < d['lo'] < 2 < d['hi'] < 2.1))" && echo "ok bench_compare_ratio" || echo "not ok bench_compare_ratio: $(cat "$tmp/d.json")"

check structured 0 'decode ' "$hoist" bench $demo --protocol structured -n 24 --json "$tmp/s.json"
holds structured_json "$tmp/s.json" "p['name'] == 'structured' and p['text'] == 'natural' and len(p['prompts_sha256']) == 1 and len(f['decode']['all']) == 5 and p['ends']['all'] == 5"
check greedy 0 'decode C4, together' "$hoist" bench $demo --protocol greedy-decode -n 24 --json "$tmp/g.json"
holds greedy_prompts "$tmp/g.json" "len(p['prompts_sha256']) == 14 and len(set(p['prompts_sha256'])) == 14 and len(f['decode C1, each']['all']) == 2"
check evenness 0 'share by half time' "$hoist" bench $demo --protocol evenness --json "$tmp/e.json"
holds evenness_json "$tmp/e.json" "0 <= f['share by half time']['median'] <= 1 and p['pass'] in (True, False)"
check prefill_ctx 1 'needs a context of 8256' "$hoist" bench $demo --protocol random-prefill --ctx 2048
check decode_32k_ctx 1 'needs a context of' "$hoist" bench $demo --protocol decode-32k --ctx 2048

# What routers pick, recorded and replayed; and picks drawn by the measured shares: of a fixed
# cache as good as can be, CLOCK has nearly all hits, and LRU far fewer (README of the format: trace.h).
check trace_write 0 'decode, 2 streams' "$hoist" bench decode $demo -n 30 --streams 2 --vram 400KB --trace "$tmp/t"
check rows 0 'decode, 4 streams: step' "$hoist" bench decode $demo -n 30 --streams 4 --vram 400KB --json "$tmp/l.json"
# Rate and steps are of one stretch of time, in which all streams decode.
holds rows_step "$tmp/l.json" "all(0.85 < f[f'decode, {n} streams']['all'][-1] * f[f'decode, {n} streams: step']['median'] / 1e3 / n < 1.15 for n in (2, 4))"
holds rows_bound "$tmp/l.json" "not any('bound' in name for name in f)"
check trace 0 '[0-9]+ decode steps, [0-9]+ picks' "$hoist" bench trace "$tmp/t" --slots 8,24,40 --json "$tmp/t.json"
holds trace_json "$tmp/t.json" "all(f[f'{n} slots: hits, optimum']['median'] >= f[f'{n} slots: hits, {o}']['median'] for n in (8, 24, 40) for o in ('CLOCK', 'LRU', 'fixed set'))"
if /usr/bin/python3 tests/make_trace.py "$tmp/drawn" 1500 2>/dev/null; then
    check trace_drawn 0 '336.0 distinct' "$hoist" bench trace "$tmp/drawn" --slots 1376 --json "$tmp/drawn.json"
    holds trace_clock "$tmp/drawn.json" "35 < f['1376 slots: hits, CLOCK']['median'] < 41 and f['1376 slots: hits, LRU']['median'] < 27 \
        and f['1376 slots: hits, optimum']['median'] < 60 and f['1376 slots: hits, fixed set']['median'] - f['1376 slots: hits, CLOCK']['median'] < 3"
else
    echo "SKIP bench_trace_drawn: no numpy"
fi
check trace_slots 1 'expected up to 16 sizes' "$hoist" bench trace "$tmp/t" --slots 0
check trace_other 1 'no "hoist_trace":1' "$hoist" bench trace README.md
check trace_no_store 1 'give --vram less' "$hoist" bench decode $demo -n 2 --streams 1 --trace "$tmp/n"
check no_protocol 1 'expected random-prefill' "$hoist" bench $demo --protocol banana
check compare_one 2 'needs two files' "$hoist" bench compare "$tmp/a.json"
echo '{}' > "$tmp/x.json"
check compare_other 1 'no result of hoist bench' "$hoist" bench compare "$tmp/a.json" "$tmp/x.json"
