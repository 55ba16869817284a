#!/bin/bash
# Conversions from start to end: what comes out, read by the engine and by a stranger; a kill in the
# middle; refusals. The checkpoint is quantize_mini.py's.
#   tests/suite_quantize.sh BUILD
hoist=$1/hoist demo=models/demo-exl3
suite=quantize
. tests/says.sh

if ! /usr/bin/python3 tests/quantize_mini.py make "$tmp/mini" 2>"$tmp/log"; then
    echo "not ok quantize_make: $(tail -n 1 "$tmp/log")"
    exit 1
fi

# What speaks of the source's own files stays there.
echo '{"repo":"a/b"}' >"$tmp/mini/hoist-source.json"

refuse() { local name=$1 pattern=$2; shift 2; check "$name" 1 "$pattern" "$hoist" quantize "$@"; }

refuse no_bits 'needs --bits' "$tmp/mini" "$tmp/x" --calib none
refuse no_calib 'needs --calib FILE' "$tmp/mini" "$tmp/x" --bits 4
refuse bad_codebook 'there are mul1, mcg and 3inst' "$tmp/mini" "$tmp/x" --bits 4 --calib none --codebook zip
refuse half_mcg 'only codebook mul1' "$tmp/mini" "$tmp/x" --bits 4 --calib none --codebook mcg --half-rates
refuse already 'is EXL3 already' $demo "$tmp/x" --bits 4 --calib none
refuse not_empty 'is not empty' "$tmp/mini" tests --bits 4 --calib none
refuse no_source '/nowhere: no such folder' /nowhere "$tmp/x" --bits 4 --calib none
refuse bad_calib 'nowhere\.txt' "$tmp/mini" "$tmp/x" --bits 4 --calib "$tmp/nowhere.txt"
check no_out 2 'needs a folder to write to' "$hoist" quantize "$tmp/mini"
check out_of_range 2 'expected a number in 1\.\.8' "$hoist" quantize "$tmp/mini" "$tmp/x" --bits 9
cp -r "$tmp/mini" "$tmp/odd"
sed -i 's/"dtype": "F16"/"dtype": "I16"/' "$tmp/odd/model.safetensors"
refuse bad_dtype 'lm_head\.weight: .*I16' "$tmp/odd" "$tmp/x" --bits 4 --calib none

# A disk that is too small says so before anything is measured or written there.
if unshare -Urm true 2>/dev/null; then
    mkdir "$tmp/disk"
    check small_disk 1 'the conversion needs .* there, only .* are free' unshare -Urm bash -c '
        mount -t tmpfs -o size=64k none "$1" && exec "$2" quantize "$3" "$1/x" --bits 5 --calib "$3/calib.json"
        ' _ "$tmp/disk" "$hoist" "$tmp/mini"
else
    echo 'SKIP quantize_small_disk: no user namespaces here'
fi

# Broken off after the sixth matrix, then resumed; and in one go.
"$hoist" quantize "$tmp/mini" "$tmp/killed" --bits 5 --threads 1 --calib "$tmp/mini/calib.json" >"$tmp/log" 2>&1 &
pid=$!
for _ in $(seq 600); do
    [ "$(grep -cs '^unit' "$tmp/killed/.quantize/journal")" -ge 6 ] 2>/dev/null && break
    sleep 0.1
done
kill -9 $pid
wait $pid 2>/dev/null
units=$(grep -c '^unit' "$tmp/killed/.quantize/journal")
refuse without_resume 'resume goes on' "$tmp/mini" "$tmp/killed" --bits 5 --calib "$tmp/mini/calib.json"
refuse other_settings 'begun with other settings' "$tmp/mini" "$tmp/killed" --bits 4 --calib "$tmp/mini/calib.json" --resume
check resume 0 "^resumed: $units of 21 matrices are done" "$hoist" quantize "$tmp/mini" "$tmp/killed" --bits 5 --resume --calib "$tmp/mini/calib.json"
check whole 0 '21 matrices' "$hoist" quantize "$tmp/mini" "$tmp/whole" --bits 5 --threads 1 --calib "$tmp/mini/calib.json"
if diff -r "$tmp/killed" "$tmp/whole" >"$tmp/log"; then
    echo 'ok quantize_same_bytes'
else
    echo "not ok quantize_same_bytes: $(head -n 4 "$tmp/log" | tr "\n" " ")"
fi
if [ -e "$tmp/whole/hoist-source.json" ]; then echo 'not ok quantize_source: copied'; else echo 'ok quantize_source'; fi
/usr/bin/python3 tests/quantize_mini.py check "$tmp/mini" "$tmp/whole" || true
echo '[1,5,9,33,60,2,7,8,9,10,11,12]' >"$tmp/ids.json"
check sums 0 'checksums: all [0-9]+ tensors are as' "$hoist" inspect "$tmp/whole" --verify
check inspect 0 'verified' "$hoist" inspect "$tmp/whole" --verify
for m in mini whole; do "$hoist" logits "$tmp/$m" --ids "$tmp/ids.json" --out "$tmp/$m.f32" >/dev/null 2>&1; done
/usr/bin/python3 - "$tmp" <<'END'
import sys
import numpy as np
a, b = (np.fromfile('%s/%s.f32' % (sys.argv[1], m), '<f4').reshape(12, -1).astype(float) for m in ('mini', 'whole'))
# 5 bits leave an error of 1e-3 in the weights; a wrong matrix leaves the logits unrelated.
r = np.sqrt(((a - b) ** 2).sum() / (a ** 2).sum())
print('ok quantize_logits' if 0 < r < .15 else 'not ok quantize_logits: relative difference %g' % r)
END
