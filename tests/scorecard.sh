#!/bin/bash
# Which features of which dialect pass: runs the suites that drive the server with clients and
# writes docs/scorecard.md from their lines. Run by `make scorecard`.
#   tests/scorecard.sh [BUILD]
build=${1:-build}
cd "$(dirname "$0")/.." || exit 1
skip=' builds cli fuzz sanitize tokenizers '      # not about the API
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for s in tests/suite_*.sh; do
    name=${s#tests/suite_}
    [[ $skip = *" ${name%.sh} "* ]] || timeout 1200 bash "$s" "$build" >>"$log" 2>&1
done
awk '
    BEGIN {
        title["openai"] = "OpenAI: chat and raw completions (npm `openai`)"
        title["responses"] = "OpenAI: Responses (npm `openai`)"
        title["anthropic"] = "Anthropic: Messages (npm `@anthropic-ai/sdk`)"
        title["ollama"] = "Ollama (npm `ollama`)"
        title["sglang"] = "SGLang, and bench tools as they speak"
        title["openapi"] = "Every answer and chunk against `docs/openapi.json` (npm `ajv`)"
        title["http"] = "Raw HTTP"
        title["guard"] = "Keys, TLS, unix socket, hostile bytes"
        title["connect"] = "Configurations for clients"
        print "# Scorecard\n\nWritten by `make scorecard`: what the suites in `tests/` say about the API, run against"
        print "the demo model. A feature is the name of a test; the suites say what it means.\n"
    }
    /^(ok|not ok|SKIP) / {
        word = $1 == "ok" ? "passes" : $1 == "SKIP" ? "skipped" : "**fails**"
        sub(/^(ok|not ok|SKIP) /, "")
        sub(/:.*/, "")
        if (index($0, "/") == 0) next
        group = substr($0, 1, index($0, "/") - 1); name = substr($0, index($0, "/") + 1)
        if (!(group in n)) order[++groups] = group
        n[group]++; pass[group] += word == "passes"; total++; passed += word == "passes"
        rows[group] = rows[group] "| " name " | " word " |\n"
    }
    END {
        print "| dialect | features | pass |\n|---|---|---|"
        for (i = 1; i <= groups; i++) {
            g = order[i]
            printf "| %s | %d | %d |\n", (g in title) ? title[g] : g, n[g], pass[g]
        }
        printf "| **all** | %d | %d |\n", total, passed
        for (i = 1; i <= groups; i++) {
            g = order[i]
            printf "\n## %s\n\n| feature | |\n|---|---|\n%s", (g in title) ? title[g] : g, rows[g]
        }
    }' "$log" >docs/scorecard.md
sed -n '/^| dialect/,/^| \*\*all/p' docs/scorecard.md
! grep -q '^not ok ' "$log"
