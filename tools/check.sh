#!/bin/bash
# Rules of the tree that a compiler does not see: who may include whom, file and function sizes,
# banned functions, formatting, the layout table in docs/ARCHITECTURE.md, the size of the tree.
#   tools/check.sh [--tap]     --tap: also a line "ok NAME" per rule, for tests/run.sh
cd "$(dirname "$0")/.." || exit 1
tap=${1:-}
bad=0
files=$(git ls-files --cached --others --exclude-standard 'src/*.[ch]' 'src/*.cu' 'include/*.h')
code=$(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')

report() {          # NAME, findings
    if [ -n "$2" ]; then
        printf '%s\n' "$2" | head -n 20
        [ "$tap" = --tap ] && echo "not ok $1: see above"
        bad=1
    elif [ "$tap" = --tap ]; then
        echo "ok $1"
    fi
}

# An include goes down only; hoist.h is open to all, text and dev never see each other.
report layers "$(awk '
    BEGIN {
        may["base"] = "base"; may["text"] = "text base"; may["dev"] = "dev base"
        may["model"] = "model dev base"; may["engine"] = "engine model dev text base"
        may["serve"] = "serve text base"; may["cli"] = "cli serve text base"
    }
    /^#include "/ {
        split(FILENAME, at, "/"); layer = at[2]
        file = $2; gsub(/"/, "", file)
        if (split(file, to, "/") < 2 || FILENAME ~ /_test\.c$/) next
        ok = index(" " may[layer] " ", " " to[1] " ") > 0
        if (layer == "cli" && (FILENAME ~ /(tools|bench_trace|quantize[a-z_]*)\.[ch]$/) && (to[1] == "model" || to[1] == "dev")) ok = 1
        if (!ok) print FILENAME ": " layer " may not include " file
    }' $(echo "$files" | grep '^src/'))"

report file_size "$(echo "$code" | xargs wc -l | awk '$2 != "total" && $1 > 2000 {print $2 ": " $1 " lines, at most 2000"}')"

report function_size "$(echo "$code" | grep '\.c' | grep -v '_test\.c$' | xargs awk '
    FNR == 1 {open = 0} /^\{/ {start = FNR; open = 1}
    /^\}/ {if (open && FNR - start > 100) print FILENAME ":" start ": " FNR - start " lines, at most 100"; open = 0}')"

report banned "$(echo "$files" | grep -v -e '_test\.c$' | xargs grep -nE '\b(strcpy|strcat|sprintf|gets|atoi|atol|strtok|alloca)\s*\(' )$(
    echo "$files" | grep -v -e '_test\.c$' -e '^src/cli/pull\.c$' | xargs grep -nE '\bgetenv\s*\(')$(
    echo "$files" | grep -v -e '^src/base/' -e '^src/cli/' -e '_test\.c$' | xargs grep -nE '(^|[^>.[:alnum:]_])(malloc|calloc|realloc|free|exit|abort)[[:space:]]*\(')"

report printing "$(echo "$files" | grep -v -e '^src/cli/' -e '_test\.c$' | xargs grep -nE '\b(printf|puts|fprintf|putchar)\s*\(')"

report markers "$(echo "$code" | xargs grep -nE '\b(TODO|FIXME|XXX|HACK)\b' | grep -vE 'TODO\(#[0-9]+\)')"

# Every file under src stands in the layout table, and the table names no other.
table=$(sed -n 's/^| `\(\(src\|include\)\/[^`]*\)`.*/\1/p' docs/ARCHITECTURE.md 2>/dev/null | sort -u)
have=$(echo "$files" | grep -v '_test\.c$' | sort -u)
report layout "$(diff <(echo "$table") <(echo "$have") | sed -n 's/^< /docs\/ARCHITECTURE.md names a file that is not there: /p; s/^> /not in the table of docs\/ARCHITECTURE.md: /p')"

# … and says about how long they are.
report lengths "$(sed -n 's/^| `\(\(src\|include\)\/[^`]*\)` |.* | \([0-9]*\) |$/\1 \3/p' docs/ARCHITECTURE.md 2>/dev/null |
    while read -r f n; do
        have=$(wc -l <"$f" 2>/dev/null) && [ $((have - n)) -le 20 ] && [ $((n - have)) -le 20 ] ||
            echo "docs/ARCHITECTURE.md: $f has $have lines, the table says $n"
    done)"

# a_b.c is covered by a_b_test.c or a_test.c, or a line of tests/COVERAGE says by what.
report tests "$(for f in $(echo "$have" | grep '\.c$'); do
    [ -f "${f%.c}_test.c" ] || [ -f "${f%_*}_test.c" ] || awk -v f="$f" '
        BEGIN {base = f; sub(/.*\//, "", base)}
        $0 ~ "^" base "[ \t]" {found = 1}
        END {if (!found) print f ": no " base "-test beside it and no line in tests/COVERAGE"}' tests/COVERAGE
done
awk '/^[a-z0-9_]+\.c[ \t]/ {print $1}' tests/COVERAGE | while read -r f; do
    grep -q "/$f\$" <<<"$have" || echo "tests/COVERAGE names a file that is not there: $f"
done)"

mb=$(git ls-files --cached --others --exclude-standard -z | xargs -0 du -cb 2>/dev/null | awk 'END {print int($1 / 1000000)}')
[ "${mb:-0}" -ge 55 ] && report tree_size "the tree holds $mb MB, at most 55 can travel" || report tree_size ""

if command -v clang-format >/dev/null 2>&1; then
    report format "$(echo "$code" | xargs clang-format --dry-run 2>&1 | sed -n 's/: warning: code should be clang-formatted.*/: not formatted (make format)/p' | awk -F: '!seen[$1]++')"
fi
exit $bad
