#!/bin/bash
# Replays every corpus through its fuzz target.
#   tests/suite_fuzz.sh BUILD
build=$1
for f in fuzz/*_fuzz.c; do
    name=$(basename "$f" _fuzz.c)
    if out=$(timeout 120 "$build/test/${name}_replay" fuzz/corpus/"$name"/* 2>&1); then
        echo "ok fuzz_$name ($out)"
    else
        echo "not ok fuzz_$name: $(echo "$out" | tail -n 3)"
    fi
done
