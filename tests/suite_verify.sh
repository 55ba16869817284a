#!/bin/bash
# hoist inspect --verify: a flipped bit anywhere is found and its tensor named; broken rules of EXL3 are
# found in matrices that the model does not use, too.
#   tests/suite_verify.sh BUILD
hoist=$1/hoist demo=models/demo-exl3
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/m"
cp $demo/*.json $demo/*.safetensors "$tmp/m/"
rm -f "$tmp/m/hoist-checksums.json"

said() {         # NAME, expected status, pattern [options]
    local name=$1 status=$2 pattern=$3 got rc
    shift 3
    got=$("$hoist" inspect "$tmp/m" --verify "$@" 2>&1)
    rc=$?
    [ $rc = "$status" ] && grep -qF -- "$pattern" <<<"$got" && echo "ok verify_$name" ||
        echo "not ok verify_$name: status $rc, said: $(tail -n 3 <<<"$got" | tr '\n' ' ')"
}

said first 0 'none were there; made of'
said second 0 'are as hoist-checksums.json says'
said seed 0 '(--seed 7)' --seed 7

# 24 random bits of the data; the tensor comes from a reader of our own of the file's header.
python3 - "$tmp" <<'P' >"$tmp/flips"
import json, random, sys
random.seed(5)
for name in ["model.safetensors"] * 16 + ["mtp.safetensors"] * 8:
    data = open(f"{sys.argv[1]}/m/{name}", "rb").read()
    head = int.from_bytes(data[:8], "little")
    bit = random.randrange((8 + head) * 8, len(data) * 8)
    byte = bit // 8 - 8 - head
    tensor = next(k for k, v in json.loads(data[8:8 + head]).items()
                  if k != "__metadata__" and v["data_offsets"][0] <= byte < v["data_offsets"][1])
    print(name, bit // 8, data[bit // 8] ^ (1 << bit % 8), data[bit // 8], tensor)
P
found=0
put() { printf "\\x$(printf %x "$3")" | dd of="$tmp/m/$1" bs=1 seek="$2" conv=notrunc 2>/dev/null; }
while read -r file at bad good tensor; do
    put "$file" "$at" "$bad"
    got=$("$hoist" inspect "$tmp/m" --verify 2>&1)
    [ $? = 1 ] && grep -qF "$tensor" <<<"$got" && found=$((found + 1)) || echo "not found: $file $at $tensor: $(tail -n 1 <<<"$got")"
    put "$file" "$at" "$good"
done <"$tmp/flips"
[ $found = 24 ] && echo "ok verify_flips" || echo "not ok verify_flips: $found of 24 found"
said restored 0 'verified'

# Rules, without checksums to help: the header of the MTP block's file is edited, at the same length.
edit() {         # FROM TO
    cp $demo/mtp.safetensors "$tmp/m/"
    rm -f "$tmp/m/hoist-checksums.json"
    python3 - "$tmp/m/mtp.safetensors" "$1" "$2" <<'P'
import sys
path, old, new = sys.argv[1], sys.argv[2].encode(), sys.argv[3].encode()
data = open(path, "rb").read()
assert len(old) == len(new) and old in data, (old, new)
open(path, "wb").write(data.replace(old, new, 1))
P
}
first=$(python3 -c "
import json
d = open('$demo/mtp.safetensors', 'rb').read()
h = json.loads(d[8:8 + int.from_bytes(d[:8], 'little')])
print(next(k for k in h if k.endswith('.trellis'))[:-8])")
edit "$first.trellis" "$first.trelliz"
said rule_orphan 1 'no trellis beside it'
edit "$first.suh" "$first.sux"
said rule_suh 1 "$first.suh is missing"
edit "$first.mul1" "$first.mcg1"
said rule_codebook 0 'verified'           # no marker means 3INST: allowed by the format
edit '"I16"' '"F16"'
said rule_dtype 1 'expected'
cp $demo/mtp.safetensors "$tmp/m/"
python3 - "$tmp/m/mtp.safetensors" "$first" <<'P'
import json, sys
path, key = sys.argv[1:]
data = bytearray(open(path, "rb").read())
head = int.from_bytes(data[:8], "little")
at = json.loads(bytes(data[8:8 + head]))[key + ".mul1"]["data_offsets"][0] + 8 + head
data[at] ^= 4
open(path, "wb").write(data)
P
rm -f "$tmp/m/hoist-checksums.json"
said rule_multiplier 1 'multiplier 0x'
cp $demo/mtp.safetensors "$tmp/m/"

# A folder that cannot be written to is no fault.
if [ "$(id -u)" != 0 ]; then
    rm -f "$tmp/m/hoist-checksums.json"
    chmod a-w "$tmp/m"
    said read_only 0 'none could be kept'
    chmod u+w "$tmp/m"
fi

# The same while serving: the first pass makes the checksums; a damaged file is named by /health.
. tests/server.sh
rm -f "$tmp/m/hoist-checksums.json"
cp $demo/tokenizer.json $demo/chat_template.jinja "$tmp/m/"
start_server "$1" "$tmp/m" --verify-memory --ctx 2048
trap 'kill $server 2>/dev/null; rm -rf "$tmp"' EXIT
for _ in $(seq 100); do [ -f "$tmp/m/hoist-checksums.json" ] && break; sleep 0.1; done
cmp -s "$tmp/m/hoist-checksums.json" $demo/hoist-checksums.json && echo "ok verify_serve_sums" || echo "not ok verify_serve_sums"
[ "$(curl -s -o /dev/null -w '%{http_code}' "$url/health")" = 200 ] && echo "ok verify_serve_healthy" || echo "not ok verify_serve_healthy"
kill $server
wait $server
read -r file at bad good tensor < <(grep ^model.safetensors "$tmp/flips")
put "$file" "$at" "$bad"
start_server "$1" "$tmp/m" --verify-memory --ctx 2048 --vram 400KB
trap 'kill $server 2>/dev/null; rm -rf "$tmp"' EXIT
for _ in $(seq 100); do
    status=$(curl -s -o "$tmp/health" -w '%{http_code}' "$url/health")
    [ "$status" = 503 ] && break
    sleep 0.1
done
[ "$status" = 503 ] && grep -qF "\"reason\":\"memory\",\"message\":\"weights in memory: $tensor: " "$tmp/health" && echo "ok verify_serve_fault" ||
    echo "not ok verify_serve_fault: $status $(cat "$tmp/health")"
