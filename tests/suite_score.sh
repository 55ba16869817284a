#!/bin/bash
# hoist score: the published panel protocol, divergences that others computed, the decode path,
# greedy equality, needles, plots, refusals.
#   tests/suite_score.sh BUILD
hoist=$1/hoist demo=models/demo-exl3 shared=../shared/models
suite=score limit=200
. tests/says.sh

holds() {        # NAME, JSON file, python condition on r (the report) and m (its first model)
    if python3 -c "import json,sys; r = json.load(open('$2')); m = r['models'][0]; sys.exit(not ($3))" 2>"$tmp/why"; then
        echo "ok score_$1"
    else
        echo "not ok score_$1: not $3: $(tail -n 1 "$tmp/why") $(head -c 300 "$2")"
    fi
}

# A panel made from float64 reference logits: 87 rows of 10 prompts.
panel=tests/data/panel/demo_exl3.json
check panel 0 'against_panel, 87 positions' "$hoist" score $demo --panel $panel --out "$tmp/p.json" \
    --decode --write-panel "$tmp/own.json" --plot "$tmp/p.svg"
holds panel_protocol "$tmp/p.json" "r['positions'] == 87 and r['top1_agreement'] == 1 and 0 < r['mean_kl_top20'] < 1e-6 \
    and len(r['per_prompt']) == 10 and sum(p['positions'] for p in r['per_prompt']) == 87"
holds panel_perplexity "$tmp/p.json" "2 < m['against_panel']['perplexity']['value'] < 5"
# Decode and prefill rows have the same bits on the CPU; 67 rows come from decode steps.
holds decode "$tmp/p.json" "m['decode_against_prefill']['positions'] == 67 and m['decode_against_prefill']['kl_max'] < 1e-6 \
    and m['decode_against_prefill']['top1_agreement']['value'] == 1"
# With a cache of experts (here an arena plays the GPU): the decode path again, each way of a miss forced.
check lanes 0 'decode_lane_against_prefill, 67' "$hoist" score $demo --panel $panel --decode --vram 400KB --out "$tmp/l.json"
holds lanes_forced "$tmp/l.json" "all(m[f'decode_{l}_against_prefill']['kl_max'] < 1e-6 and m[f'decode_{l}_against_prefill']['experts'][l] > 500 \
    and m[f'decode_{l}_against_prefill']['experts'][o] == 0 for l, o in (('link', 'lane'), ('lane', 'link')))"
check plot 0 'polyline|circle' cat "$tmp/p.svg"
check plot_xml 0 '^$' python3 -c "import xml.dom.minidom; xml.dom.minidom.parse('$tmp/p.svg'); print()"

# Our own panel of the same tokens scores itself to rounding (it is written with 7 decimals).
check own_panel 0 'against_panel, 87' "$hoist" score $demo --panel "$tmp/own.json" --out "$tmp/o.json"
holds own_panel_zero "$tmp/o.json" "r['top1_agreement'] == 1 and r['mean_kl_top20'] < 1e-12"

# A wrong answer in the panel is seen.
python3 - "$panel" "$tmp/bad.json" <<'P'
import json, sys
p = json.load(open(sys.argv[1]))
row = p[0]["top20_ids"][0]
row[0], row[1] = row[1], row[0]
json.dump(p, open(sys.argv[2], "w"))
P
check other_panel 0 'against_panel, 87' "$hoist" score $demo --panel "$tmp/bad.json" --out "$tmp/b.json"
holds other_panel_seen "$tmp/b.json" "abs(r['top1_agreement'] - 86 / 87) < 1e-6 and r['mean_kl_top20'] > 1e-4"

# Two settings of one model: bits are the same on every instruction set; double differs a little
# (a routing near-tie can flip one row: so the bounds are on the 99th percentile and the top token).
head -c 600 README.md > "$tmp/short.txt"
check settings 0 'against_reference' "$hoist" score $demo --with isa=scalar --text "$tmp/short.txt" --window 64 --out "$tmp/s.json" --greedy 6
check settings_greedy 0 'greedy: 4 of 4 answers equal$' "$hoist" score $demo --with isa=scalar --text "$tmp/short.txt" --window 64 --greedy 6
holds settings_reference "$tmp/s.json" "r['reference_alone']['perplexity'] == m['against_reference']['perplexity'] and r['reference_alone']['kl_mean']['value'] is None"
holds settings_equal "$tmp/s.json" "m['against_reference']['kl_max'] == 0 and all(g['equal'] for g in m['greedy']) and len(m['greedy']) == 4"
check reference_device 0 'against_reference' "$hoist" score $demo --with device=ref --text "$tmp/short.txt" --window 64 --out "$tmp/r.json"
holds reference_device_near "$tmp/r.json" "0 < m['against_reference']['kl_p99']['value'] < 1e-4 and m['against_reference']['top1_agreement']['value'] > 0.97 and m['against_reference']['interval']['units'] >= 2"
# FP8 latents: far less than the 1e-3 that the weights of this demo cost, but not nothing.
check fp8 0 'against_panel, 87' "$hoist" score $demo --kv fp8 --panel "$panel" --out "$tmp/f.json"
holds fp8_near "$tmp/f.json" "2e-7 < r['mean_kl_top20'] < 3e-5 and r['top1_agreement'] == 1"
check lead 0 'alone' "$hoist" score $demo --text "$tmp/short.txt" --lead '[gMASK]<sop>' --window 64
check needle 0 'needle, 100 tokens: [0-5] of 5' "$hoist" score $demo --needle 100 --out "$tmp/n.json"
holds needle_rows "$tmp/n.json" "len(m['needle']) == 5 and all(n['prompt_tokens'] > 60 for n in m['needle'])"

# Divergence of the quantised demo from the BF16 one, as its float64 reference computed it.
if [ -d $shared/demo ]; then
    python3 - "$tmp/all.json" >"$tmp/want" <<'P'
import json, sys
prompts = json.load(open("models/demo-exl3/reference/prompts.json"))
json.dump([{"prompt_len": 1, "tokens": p["ids"], "top20_ids": [[0]], "top20_lp": [[0.0]]} for p in prompts], open(sys.argv[1], "w"))
n = sum(len(p["ids"]) for p in prompts)
print(sum(p["mean_kl_from_bf16"] * len(p["ids"]) for p in prompts) / n, sum(p["argmax_same_as_bf16"] * len(p["ids"]) for p in prompts) / n, n)
P
    read -r kl same n <"$tmp/want"
    check against 0 "against_reference, $n" "$hoist" score $demo --against $shared/demo --panel "$tmp/all.json" --out "$tmp/a.json"
    holds against_reference_kl "$tmp/a.json" "abs(m['against_reference']['kl_mean']['value'] / $kl - 1) < 0.02 \
        and abs(m['against_reference']['top1_agreement']['value'] - $same) < 0.002"
    check models 0 'demo-exl3-mixed' "$hoist" score $demo $shared/demo-exl3-mixed --against $shared/demo --panel $panel \
        --out "$tmp/m.json" --plot "$tmp/m.svg"
    holds models_two "$tmp/m.json" "len(r['models']) == 2 and r['models'][1]['against_reference']['kl_mean']['value'] > m['against_reference']['kl_mean']['value']"
    check models_plot 0 'by size' cat "$tmp/m.svg"
else
    echo "SKIP score_against: ../shared not beside the checkout"
fi
if [ -f ../shared/spec/data/ref_panel/panel_excerpt.json ]; then      # parses; its ids are another model's
    check excerpt 1 'prompt\[0\]: id 154822, expected 0\.\.4095' "$hoist" score $demo --panel ../shared/spec/data/ref_panel/panel_excerpt.json
else
    echo "SKIP score_excerpt: ../shared not beside the checkout"
fi

check nothing_to_score 2 'needs --panel' "$hoist" score $demo
check greedy_alone 2 'needs a reference' "$hoist" score $demo --panel $panel --greedy 4
check plot_alone 2 'it needs --panel' "$hoist" score $demo --text "$tmp/short.txt" --plot "$tmp/x.svg"
check out_nowhere 1 'nowhere/x.json: No such file' "$hoist" score $demo --panel $panel --out /nowhere/x.json
check bad_with 1 'expected kv=' "$hoist" score $demo --panel $panel --with speed=11
check no_file 1 '/nowhere' "$hoist" score $demo --panel /nowhere
echo '[{"prompt_len":3,"tokens":[1,2]}]' > "$tmp/x.json"
check bad_panel 1 'prompt_len 3 of 2 tokens' "$hoist" score $demo --panel "$tmp/x.json"
check bad_needle 1 'expected lengths' "$hoist" score $demo --needle banana
