#!/bin/bash
# hoist pull against a hub that misbehaves in every way of tests/hub.py, resuming after a kill, and serve --pull.
#   tests/suite_pull.sh BUILD
hoist=$1/hoist
tmp=$(mktemp -d)
hub=
trap 'kill $hub 2>/dev/null; rm -rf "$tmp"' EXIT
unset HF_TOKEN http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
if ! python3 -c "import ctypes; ctypes.CDLL('libcurl.so.4')" 2>/dev/null; then
    echo "SKIP pull: no libcurl.so.4"
    exit 0
fi

# A repository: small files (hashed by git), one of 6 MB, one of two parts, an empty one, a folder, a space.
mkdir -p "$tmp/repo/sub"
echo '{"model_type":"none"}' > "$tmp/repo/config.json"
: > "$tmp/repo/empty.txt"
echo hidden > "$tmp/repo/.gitattributes"
head -c 6000000 /dev/urandom > "$tmp/repo/sub/a file.bin"
head -c 75000000 /dev/urandom > "$tmp/repo/model.safetensors"
mkdir "$tmp/small"
cp -r "$tmp/repo/config.json" "$tmp/repo/sub" "$tmp/repo/empty.txt" "$tmp/small"

start_hub() {    # FOLDER TROUBLE
    kill $hub 2>/dev/null
    wait $hub 2>/dev/null
    : > "$tmp/log"
    : > "$tmp/port"
    python3 tests/hub.py "$1" "$tmp/log" "$2" > "$tmp/port" 2>"$tmp/hub.err" &
    hub=$!
    for _ in $(seq 600); do [ -s "$tmp/port" ] && break; sleep 0.1; done
    export HF_ENDPOINT=http://127.0.0.1:$(cat "$tmp/port")
}

same() {         # FOLDER: is $tmp/out that folder's visible files, and nothing half done?
    (cd "$1" && find . -type f ! -name '.*' | sort | while read -r f; do cmp "$f" "$tmp/out/$f" || exit 1; done) &&
        ! find "$tmp/out" -name '*.partial*' | grep -q . && [ ! -e "$tmp/out/.hoist-pull.lock" ] && [ -s "$tmp/out/hoist-source.json" ]
}

pull() {         # NAME FOLDER TROUBLE [options]: must succeed and bring everything
    local name=$1 folder=$2
    start_hub "$folder" "$3"
    shift 3
    if timeout 120 "$hoist" pull test/model "$tmp/out" "$@" >"$tmp/said" 2>&1 && same "$folder"; then
        echo "ok pull_$name"
    else
        echo "not ok pull_$name: $(tail -n 2 "$tmp/said" | tr '\n' ' ')"
    fi
}

fails() {        # NAME FOLDER TROUBLE PATTERN [REPO]: must fail with this sentence, and leave no file with a wrong name
    rm -rf "$tmp/out"
    start_hub "$2" "$3"
    timeout 120 "$hoist" pull "${5:-test/model}" "$tmp/out" >"$tmp/said" 2>&1
    local rc=$?
    if [ $rc = 1 ] && grep -qE "$4" "$tmp/said" && [ ! -e "$tmp/out/model.safetensors" ]; then
        echo "ok pull_$1"
    else
        echo "not ok pull_$1: status $rc, said: $(tail -n 2 "$tmp/said" | tr '\n' ' ')"
    fi
}

for trouble in none drop norange long pages redirect; do
    rm -rf "$tmp/out"
    pull $trouble "$tmp/repo" $trouble
done
# The token goes to the hub and not to the host that it redirects to.
rm -rf "$tmp/out"
HF_TOKEN=secret pull token_redirect "$tmp/small" token,redirect
grep -q '^127\.0\.0\.1 .*Bearer secret' "$tmp/log" && grep -q '^localhost /cdn' "$tmp/log" && ! grep -q '^localhost .*secret' "$tmp/log" &&
    echo "ok pull_token_stays" || echo "not ok pull_token_stays: $(head -n 5 "$tmp/log")"
rm -rf "$tmp/out"
HF_TOKEN=secret pull token_pages "$tmp/small" token,pages,elsewhere
grep -q '^localhost /api' "$tmp/log" && ! grep -q '^localhost .*secret' "$tmp/log" &&
    echo "ok pull_token_stays_pages" || echo "not ok pull_token_stays_pages: $(head -n 5 "$tmp/log")"
for trouble in busy shift corrupt silent busy,drop,redirect; do
    rm -rf "$tmp/out"
    pull "${trouble//,/_}" "$tmp/small" $trouble
done
# A proxy of the environment is used: the hub's own name exists nowhere.
rm -rf "$tmp/out"
start_hub "$tmp/small" none
http_proxy=$HF_ENDPOINT HF_ENDPOINT=http://hub.invalid timeout 60 "$hoist" pull test/model "$tmp/out" >/dev/null 2>&1
same "$tmp/small" && grep -q 'http://hub\.invalid/test/model/resolve' "$tmp/log" && echo "ok pull_proxy" || echo "not ok pull_proxy: $(head -n 2 "$tmp/log")"
rm -rf "$tmp/out"
start_hub "$tmp/repo" none
timeout 60 "$hoist" pull test/model@refs/pr/1 "$tmp/out" --files '*.json,sub/*' >/dev/null 2>&1
[ -e "$tmp/out/config.json" ] && [ -e "$tmp/out/sub/a file.bin" ] && [ ! -e "$tmp/out/model.safetensors" ] &&
    echo "ok pull_files" || echo "not ok pull_files: $(ls "$tmp/out")"

# Killed at any moment, it goes on: no byte of a noted megabyte is fetched twice.
rm -rf "$tmp/out"
start_hub "$tmp/repo" slow
"$hoist" pull test/model "$tmp/out" >/dev/null 2>&1 &
run=$!
sleep 4
kill -9 $run
wait $run 2>/dev/null
had=$(du -k --apparent-size "$tmp/out"/*.partial.map 2>/dev/null | wc -l)
pull resume "$tmp/repo" none
python3 - "$tmp/log" $had <<'P'
import re, sys
got = 0
for line in open(sys.argv[1]):
    m = re.search(r"model\.safetensors bytes=(\d+)-(\d+)", line)
    got += int(m[2]) - int(m[1]) + 1 if m else 0
ok = int(sys.argv[2]) >= 1 and 4e7 < got < 75e6 - 4e6
print("ok pull_resume_saves" if ok else f"not ok pull_resume_saves: fetched {got} of 75000000 again, {sys.argv[2]} maps")
P
# Complete: nothing is fetched, hashes are checked; a damaged and a missing file come anew.
pull again "$tmp/repo" none
grep -q resolve "$tmp/log" && echo "not ok pull_again_idle: $(grep -m 1 resolve "$tmp/log")" || echo "ok pull_again_idle"
printf x | dd of="$tmp/out/model.safetensors" bs=1 seek=70000000 conv=notrunc 2>/dev/null
rm "$tmp/out/config.json"
pull repair "$tmp/repo" none

fails rotten "$tmp/small" rotten 'hash [0-9a-f]+, expected [0-9a-f]+, twice'
fails short "$tmp/small" short 'fewer bytes than its list says|tries without progress'
fails gone "$tmp/small" gone '404'
fails no_token "$tmp/small" token 'HF_TOKEN'
fails html "$tmp/small" html 'is no JSON'
fails evil "$tmp/small" evil 'not safe to write'
fails twice "$tmp/small" twice 'the hub lists .* twice'
fails endless "$tmp/small" endless 'over 1000 pages'
fails revision "$tmp/small" none 'no such model, revision' test/model@nowhere
fails name "$tmp/small" none 'expected OWNER/NAME' 'https://x/y/z'
"$hoist" pull test/model "$tmp/out" --files "$(printf '%02048d' 0)" 2>&1 | grep -q -e '--files: over 2047' &&
    echo "ok pull_long_files" || echo "not ok pull_long_files"
[ ! -e "$tmp/evil" ] && echo "ok pull_evil_outside" || echo "not ok pull_evil_outside"

# A disk without room: refused before the first byte.
if mkdir "$tmp/tiny" && mount -t tmpfs -o size=100m tmpfs "$tmp/tiny" 2>/dev/null; then
    start_hub "$tmp/repo" none
    "$hoist" pull test/model "$tmp/tiny/out" >"$tmp/said" 2>&1
    rc=$?
    umount "$tmp/tiny"
    [ $rc = 1 ] && grep -q 'the disk has' "$tmp/said" && ! grep -q resolve "$tmp/log" &&
        echo "ok pull_disk" || echo "not ok pull_disk: $rc $(tail -n 1 "$tmp/said")"
else
    echo "SKIP pull_disk: no mount here"
fi

# serve --pull: 503 with progress, then the model; a second start fetches nothing.
mkdir "$tmp/demo"
for f in config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json chat_template.jinja; do
    cp models/demo-exl3/$f "$tmp/demo/"
done
serve() {        # waits for the model; sets loading (a 503 with progress was seen) and up
    "$hoist" serve "$tmp/served" --pull test/model --port 0 >"$tmp/serve.log" 2>&1 &
    server=$!
    loading=no up=no
    for _ in $(seq 400); do
        port=${port:-$(ss -ltnpH 2>/dev/null | sed -n "s/.*127\.0\.0\.1:\([0-9]*\) .*pid=$server,.*/\1/p")}
        code=$(curl -s -o "$tmp/health" -w '%{http_code}' "http://127.0.0.1:${port:-1}/health")
        [ "$code" = 503 ] && grep -q '"progress":0\.[0-9]*[1-9]' "$tmp/health" && loading=yes
        [ "$code" = 200 ] && up=yes && break
        sleep 0.1
    done
    kill $server
    wait $server
    rc=$?
    unset port
}
if command -v ss >/dev/null && command -v curl >/dev/null; then
    start_hub "$tmp/demo" slow
    serve
    [ $loading = yes ] && [ $up = yes ] && [ $rc = 0 ] && echo "ok pull_serve" ||
        echo "not ok pull_serve: 503 seen $loading, up $up, status $rc: $(tail -n 2 "$tmp/serve.log" | tr '\n' ' ')"
    start_hub "$tmp/demo" none
    serve
    [ $up = yes ] && [ ! -s "$tmp/log" ] && grep -q 'nothing is downloaded' "$tmp/serve.log" && echo "ok pull_serve_again" ||
        echo "not ok pull_serve_again: up $up, $(wc -l < "$tmp/log") requests"
    # A folder with other things in it is not filled; a hub that has no such model ends the program.
    mkdir "$tmp/other"
    echo mine > "$tmp/other/notes.txt"
    got=$(timeout 20 "$hoist" serve "$tmp/other" --pull test/model --port 0 2>&1)
    rc=$?
    [ $rc = 1 ] && grep -q 'holds other files and no model' <<<"$got" && [ "$(ls "$tmp/other")" = notes.txt ] &&
        echo "ok pull_serve_other" || echo "not ok pull_serve_other: $rc $got"
    got=$(timeout 20 "$hoist" serve "$tmp/none" --pull test/model@nowhere --port 0 2>&1)
    rc=$?
    [ $rc = 1 ] && grep -q 'no such model, revision' <<<"$got" && echo "ok pull_serve_no_model" || echo "not ok pull_serve_no_model: $rc $got"
    # SIGTERM ends a download.
    rm -rf "$tmp/served"
    start_hub "$tmp/demo" slow
    "$hoist" serve "$tmp/served" --pull test/model --port 0 >"$tmp/serve.log" 2>&1 &
    server=$!
    sleep 2
    kill $server
    for _ in $(seq 50); do kill -0 $server 2>/dev/null || break; sleep 0.1; done
    kill -9 $server 2>/dev/null && echo "not ok pull_serve_stop: still there after 5 s" || echo "ok pull_serve_stop"
else
    echo "SKIP pull_serve: no ss or curl"
fi
