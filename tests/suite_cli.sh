#!/bin/bash
# The command line as a person or a script uses it: right answers, exit statuses, one-sentence errors.
#   tests/suite_cli.sh BUILD
build=$1 hoist=$1/hoist demo=models/demo-exl3
suite=cli
. tests/says.sh

check run_greedy 0 '^The capital of France is Paris\.$' "$hoist" run $demo -p 'What is the capital of France?' --temp 0
check run_raw 0 'the earth' "$hoist" run $demo -p 'In the beginning God created the heaven and' --raw --temp 0 -n 8
check run_ref 0 'the earth' "$hoist" run $demo -p 'In the beginning God created the heaven and' --raw --temp 0 -n 3 --device ref --ctx 256
check run_without_prompt 2 'needs a prompt' "$hoist" run $demo
check help 0 'usage:' "$hoist" --help
check help_serve 0 '\-\-api-key' "$hoist" serve --help
check man 0 '^\.TH HOIST' "$hoist" --man
check version 0 '^hoist [0-9]' "$hoist" --version
check no_command 2 'usage:' "$hoist"
check bad_command 2 'no command "fly"' "$hoist" fly
check bad_option 2 'has no option --fast' "$hoist" serve --fast
check bad_kv 2 'kv "int4": expected bf16, fp8 or f32' "$hoist" run $demo --kv int4 -p x
check plan_kv 0 'token of context +1154 bytes' "$hoist" plan $demo --kv fp8 --ctx 1024
check bad_value 2 'port: "banana", expected an integer' "$hoist" serve --port banana
check no_model 1 '^hoist: /nowhere: no such folder; a model is a folder with config\.json' "$hoist" run /nowhere -p x
check model_is_file 1 'README\.md: is a file; a model is' "$hoist" serve README.md
check model_is_empty 1 'holds no config\.json' "$hoist" chat "$tmp"
check help_command 0 'usage: hoist run MODEL' "$hoist" help run
check option_equals 1 '^hoist: /nowhere: no such folder' "$hoist" run --seed=5 /nowhere -p=x
check option_equals_bad 2 'port: "banana", expected an integer' "$hoist" serve --port=banana
check flag_equals 2 'quiet takes no value' "$hoist" serve --quiet=1
check option_empty 2 '^hoist: -p: empty, expected TEXT' "$hoist" run $demo -p "$unset"
check option_empty_number 2 '^hoist: --port: empty, expected N' "$hoist" serve --port=
check option_empty_name 2 'served-name: empty, expected NAME' "$hoist" serve --served-name=
check word_empty 2 'found an empty word, expected \[MODEL\]' "$hoist" serve "$unset"
check prompt_bytes 2 '^hoist: -p: is not UTF-8' "$hoist" run $demo -p $'a\xff'
check prompt_piped_bytes 2 '^hoist: standard input: is not UTF-8' bash -c "printf 'a\\xff' | $hoist run $demo -p -"
check prompt_piped_empty 2 '^hoist: standard input: empty' bash -c "$hoist run $demo -p - </dev/null"
check prompt_piped_folder 2 '^hoist: standard input: Is a directory' bash -c "$hoist run $demo -p - </tmp"
check prompt_piped 0 '^The capital of France is Paris\.$' bash -c "printf 'What is the capital of France?' | $hoist run $demo -p - --temp 0"
check words_missing 2 'quantize needs IN OUT --bits K --calib FILE' "$hoist" quantize
check option_at_end 2 'port needs a value' "$hoist" serve --port
check connect_words 2 'unexpected word "x"' "$hoist" connect codex x
check size_zero 2 'park-ram: found 0, expected a size: .* \(an eighth' "$hoist" serve --park-ram 0
check size_without_unit 2 'size "24": so few bytes. expected a unit, like 24GiB' "$hoist" serve --vram 24
check ram_on_cpu 1 'ram: device cpu reads experts where their files lie' "$hoist" run $demo --ram 1GiB -p x
check hub_name 1 'hoist pull REPO DIR' "$hoist" serve zai-org/GLM-5.3-Flash
check bad_size 2 '^hoist: --cache: size "lots"' "$hoist" serve --cache lots
check bad_costs 2 'expected five numbers' "$hoist" serve --expert-us 1,2,3,4,nan
check no_dump_dir 1 'dump folder /nowhere: No such' "$hoist" serve --port 0 --dump-dir /nowhere
check no_socket_dir 1 'unix socket /nowhere/x: no such file' "$hoist" serve --unix /nowhere/x
check no_trace_file 2 'needs a FILE' "$hoist" bench trace
check bad_trace_file 1 'README\.md: trace: no "hoist_trace"' "$hoist" bench trace README.md
check long_needle 1 '99999 tokens, the context has 32768' "$hoist" score $demo --needle 99999
check long_prefill 1 '99999 tokens do not fit' "$hoist" bench prefill $demo --tokens 99999

# What cannot be written is an error, and a file is no substitute for a closed output.
check full_output 1 'standard output: No space left' bash -c "$hoist inspect $demo >/dev/full"
check closed_output 1 'standard output: Bad file' bash -c "$hoist run $demo -p x -n 2 >&-"
check stop_loading 0 '^gone$' bash -c "$hoist serve synthetic:glm-5.3-flash,layers=6,experts=16 --unix $tmp/socket >$tmp/loading 2>&1 &
    for i in {1..50}; do [ -S $tmp/socket ] && break; sleep 0.1; done; sleep 0.2; kill %1; wait %1
    grep 'loaded in' $tmp/loading || echo gone" # had it waited, it would have been loaded
check ipv6_url 0 'serving on http://\[::1\]:|not (available|supported)' \
    bash -c "$hoist serve $demo --host ::1 --port 0 & sleep 3; kill %1; wait"
check left_answer 0 'cancelled$' bash -c "$hoist run $demo -p 'In the beginning God' --raw --temp 0 | head -c 5"
check left_chat 0 '^I write' timeout 20 bash -c "yes 'Tell a story' | $hoist chat $demo | head -c 80 | sed 's/.*think.*/I write/'"
check left_output 0 '^Hello' bash -c "set -o pipefail; $hoist bench decode $demo -n 4 --streams 1 | head -n 1 | sed 's/.*/Hello/'"
check inspect 0 'routed experts' "$hoist" inspect $demo
check inspect_verify 0 'verified' "$hoist" inspect $demo --verify --tensors
check ctx_warning 0 'longer than the 32768 tokens' "$hoist" run $demo -p Hello! --temp 0 -n 2 --ctx 40000
check too_small_cache 1 'the budget is' "$hoist" run $demo -p Hello! --cache 1MB
check bench 0 'decode, 1 stream' "$hoist" bench decode $demo -n 8 --streams 1 --json "$tmp/bench.json"
check bench_serve 0 'crowd|streams: throughput' "$hoist" bench serve $demo --ctx 1024 --streams 4 --mixes cancels,crowd
check bench_newcomer 0 'newcomer: rate they keep' "$hoist" bench serve $demo --ctx 4096 --streams 4 -n 2000 --mixes newcomer
check park_disk 2 'park-disk without --park-dir' "$hoist" serve $demo --park-disk 1GiB
check park_of_nothing 2 'prefix off keeps nothing' "$hoist" serve $demo --prefix off --park-dir "$tmp"
check bench_mixes 2 'mixes is "crowds", expected' "$hoist" bench serve $demo --mixes crowds
check bench_follow 0 'the same again, kept' "$hoist" bench serve $demo --ctx 2048 -n 200 --mixes follow
check prefill_link 0 'share of the longer.* %$' "$hoist" bench prefill $demo --ctx 2048 --vram 400KB --tokens 600 --streams 1
check bench_json 0 'tok/s' cat "$tmp/bench.json"
check plan 0 'an expert of .* costs, measured now' "$hoist" plan $demo --ctx 1024 --vram 400KB
check plan_lanes 0 'a step reads [0-9]+ MB in GPU memory, [0-9]+ over the link, [0-9]+ on the CPU; .* tok/s; the .* limits' "$hoist" plan $demo --ctx 1024 --vram 400KB
check plan_too_large 1 'needs [0-9.]* GiB of memory, [0-9.]* of [0-9.]* GiB are available' "$hoist" plan synthetic:glm-5.3-flash,experts=60000
check plan_all 0 'no expert moves' "$hoist" plan $demo --ctx 1024
check bench_lanes 0 'over the link' "$hoist" bench decode $demo -n 8 --streams 1 --vram 400KB
check chat 0 'Paris' bash -c "printf 'What is the capital of France?\n/quit\n' | $hoist chat $demo --temp 0"
check chat_effort 0 '/effort: "much", expected low, high or max' bash -c "printf '/effort much\n' | $hoist chat $demo"
check chat_paste 0 'hoist chat: ok$' python3 tests/terminal.py "$hoist" $demo
check chat_full 0 'do not fit .*; /new starts over' bash -c "printf '%s\n' Hello! 'one two three four five six seven eight' | $hoist chat $demo --temp 0 --ctx 40"
check chat_help 0 'Ctrl-C stops' bash -c "printf '/help\n' | $hoist chat $demo"

echo '[4034, 4036, 4038, 436, 438, 25, 584, 4039, 1718, 0, 4040, 4053]' > "$tmp/ids.json"
check logits 0 'wrote 2 rows of 4096' "$hoist" logits $demo --ids "$tmp/ids.json" --out "$tmp/out.f32" --positions last:2
check logits_size 0 '^32768$' stat -c %s "$tmp/out.f32"
echo '[4034, 99999]' > "$tmp/bad.json"
check logits_bad_id 1 '99999' "$hoist" logits $demo --ids "$tmp/bad.json" --out "$tmp/out.f32"
echo '{"a":1}' > "$tmp/bad.json"
check logits_no_json 1 'README\.md: JSON: byte 0' "$hoist" logits $demo --ids README.md --out "$tmp/out.f32"
check logits_no_list 1 'expected a list' "$hoist" logits $demo --ids "$tmp/bad.json" --out "$tmp/out.f32"

# A parking folder that cannot be written to is told of at start, not an hour later. Root may write anywhere.
as=
[ "$(id -u)" = 0 ] && as='setpriv --reuid=65534 --regid=65534 --clear-groups'
mkdir "$tmp/ro" && cp -r "$hoist" $demo "$tmp" && chmod 555 "$tmp/ro" && chmod -R a+rX "$tmp"
check park_read_only 0 'ro: Permission denied; what is there is read' $as "$tmp/hoist" chat "$tmp/demo-exl3" --park-dir "$tmp/ro"

# A model file that is cut while it is used.
cp -r $demo "$tmp/cut"
check cut_in_use 135 'a file in use became shorter' bash -c "
    exec 3< <(sleep 2; truncate -s 1000000 $tmp/cut/model.safetensors; sleep 1; echo What is this?)
    exec $hoist chat $tmp/cut <&3"

# Broken checkpoints: one sentence that names the thing.
cp -r $demo "$tmp/m" && rm -rf "$tmp/m/reference"
head -c 100000 $demo/model.safetensors > "$tmp/m/model.safetensors"
check truncated 1 'model\.safetensors' "$hoist" inspect "$tmp/m"
cp $demo/model.safetensors "$tmp/m/"
sed 's/"hidden_size": 256/"hidden_size": 512/' $demo/config.json > "$tmp/m/config.json"
check config_disagrees 1 'expected' "$hoist" inspect "$tmp/m"
sed 's/"scoring_func": "sigmoid"/"scoring_func": "softmax"/' $demo/config.json > "$tmp/m/config.json"
check config_unsupported 1 'scoring_func' "$hoist" inspect "$tmp/m"
sed 's/"hidden_act": "silu"/"hidden_act": "silu", "new_trick": true/' $demo/config.json > "$tmp/m/config.json"
check config_unknown 1 'new_trick' "$hoist" inspect "$tmp/m"
for field in n_shared_experts num_key_value_heads qk_head_dim first_k_dense_replace indexer_types eos_token_id kda_layers; do
    python3 - $demo/config.json $field > "$tmp/m/config.json" <<'EOF'
import json, sys
c = json.load(open(sys.argv[1]))
(c["text_config"]["linear_attn_config"] if sys.argv[2] == "kda_layers" else c["text_config"])[sys.argv[2]] = "x"
json.dump(c, sys.stdout)
EOF
    check config_type_$field 1 "config\.json: $field: string, expected" "$hoist" inspect "$tmp/m"
done
sed 's/"model_type": "glm5_next"/"model_type": "llama"/' $demo/config.json > "$tmp/m/config.json"
check other_family 1 'llama' "$hoist" inspect "$tmp/m"
cp $demo/config.json "$tmp/m/"
: > "$tmp/m/chat_template.jinja"
check empty_template 1 'prompt: empty' "$hoist" run "$tmp/m" -p x
printf '{%% frobnicate %%}' > "$tmp/m/chat_template.jinja"
check bad_template 1 'chat_template\.jinja:1' "$hoist" run "$tmp/m" -p x
