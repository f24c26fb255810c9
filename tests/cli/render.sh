# The chat template through the binary: what goes in and out, errors, and the texts that Jinja made
# (tests/golden/chat).
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
golden=$root/tests/golden/chat
. "$(dirname "$0")/lib.sh"

# is TEXT: standard output is exactly this, printf's escapes understood.
is() {
    printf "%b" "$1" >"$work/wanted"
    cmp "$work/wanted" "$work/out" >"$work/cmp" 2>&1 || {
        echo "FAIL $name: not the text expected: $(cat "$work/cmp")"
        failures=$((failures + 1))
    }
}

model=$work/model
mkdir "$model"
cat >"$work/one.json" <<'END'
{"messages": [{"role": "user",
               "content": "Say \"hi\"\n"}], "add_generation_prompt": true}
END
text='<|im_start|>user\nSay "hi"\n<|im_end|>\n<|im_start|>assistant\n'

# ---- one request ----

check "no template" 0 "$nibble" render -m "$model" --file "$work/one.json"
is "$text"
says err "'$model' has no chat template; plain ChatML is used"
lines err 1
check "from standard input" 0 sh -c '"$0" render -q "$1" <"$2"' "$nibble" "$model" "$work/one.json"
is "$text"
lines err 0
check "as JSON" 0 "$nibble" render -q -m "$model" --json --file "$work/one.json"
is '{"text": "<|im_start|>user\\nSay \\"hi\\"\\n<|im_end|>\\n<|im_start|>assistant\\n"}\n'
echo '{{ messages }}' >"$model/chat_template.jinja"
check "a template that is not known" 0 "$nibble" render -m "$model" --file "$work/one.json"
is "$text"
says err "warning: the chat template of '$model' is not known; plain ChatML is used"
lines err 1
: >"$work/weights.dat"
check "weights and --model-dir" 0 "$nibble" render -m "$work/weights.dat" --model-dir "$model" \
    --file "$work/one.json"
says err "'$model'"
check "a GGUF file" 0 "$nibble" render "$root/tests/golden/harmless/chat_template_code.gguf" \
    --file "$work/one.json"
is "$text"
says err "is not known"

# ---- lines ----

printf '%s\n\n \t\r\n%s' '{"messages": [{"role": "a", "content": "\u0000\u2028"}]}' \
    '{"messages": [{"role": "b", "content": ""}]}' >"$work/two.jsonl"
check "lines" 0 "$nibble" render -q -m "$model" --jsonl --file "$work/two.jsonl"
is '{"text": "<|im_start|>a\\n\\u0000\0342\0200\0250<|im_end|>\\n"}
{"text": "<|im_start|>b\\n<|im_end|>\\n"}\n'
check "no lines" 0 "$nibble" render -q -m "$model" --jsonl
lines out 0
printf '\n{"messages": []}\n{"messages": [{"role": "c", "content": ""}]}\n' >>"$work/two.jsonl"
check "a line that fails" 1 "$nibble" render -q -m "$model" --jsonl --file "$work/two.jsonl"
lines out 2
lines err 1
says err "two.jsonl, line 5: 'messages' is empty"
check "a line that is no JSON" 1 sh -c 'echo "{]" | "$0" render -q "$1" --jsonl' "$nibble" "$model"
says err "standard input, line 1: invalid JSON"
python3 -c 'print("{\"messages\": [{\"role\": \"u\", \"content\": \"" + "x" * 20000000 + "\"}]}")' \
    >"$work/long.jsonl"
check "a long line" 0 "$nibble" render -q -m "$model" --jsonl --file "$work/long.jsonl"
[ "$(wc -c <"$work/out")" -eq 20000040 ] || {
    echo "FAIL $name: $(wc -c <"$work/out") bytes"
    failures=$((failures + 1))
}

# ---- errors ----

check "no model" 2 "$nibble" render
says err "MODEL is missing"
check "a model that is not there" 1 "$nibble" render -m "$work/none"
says err "cannot open '$work/none'"
lines err 1
check "a directory that is not there" 1 "$nibble" render -m "$model" --model-dir "$work/none"
says err "'$work/none' is not a directory"
check "a file that is not there" 1 "$nibble" render -q -m "$model" --file "$work/none"
says err "cannot open '$work/none'"
check "a file that is a directory" 1 "$nibble" render -q -m "$model" --file "$work"
says err "cannot read '$work'"
check "nothing to read" 1 "$nibble" render -q -m "$model"
says err "standard input: invalid JSON at byte 0"
lines err 1
echo '{"messages": [{"role": "user", "content": "x"}], "tools": [1]}' >"$work/tools.json"
check "tools that the template lacks" 1 "$nibble" render -q -m "$model" --file "$work/tools.json"
says err "has no tools"
lines out 0
check "output that cannot be written" 1 sh -c '"$0" render -q "$1" --file "$2" >/dev/full' \
    "$nibble" "$model" "$work/one.json"
says err "cannot write to standard output"

# ---- the official templates ----

cases=$golden/cases.jsonl

# Splits the cases by model: MODEL.in holds requests, MODEL.wanted the lines they must become.
cat >"$work/split.py" <<'END'
import json
import sys

for line in open(sys.argv[1], encoding="utf-8"):
    row = json.loads(line)
    for name, value in ((".in", row["case"]), (".wanted", {"text": row["text"]})):
        with open(f"{sys.argv[2]}/{row['model']}{name}", "a", encoding="utf-8") as out:
            out.write(json.dumps(value, ensure_ascii=False) + "\n")
END
cat >"$work/compare.py" <<'END'
import json
import sys

wanted, got = ([json.loads(line) for line in open(path, encoding="utf-8")] for path in sys.argv[1:])
assert wanted == got, [i for i, pair in enumerate(zip(wanted, got)) if pair[0] != pair[1]]
END
mkdir "$work/cases"
check "splitting the cases" 0 python3 -B "$work/split.py" "$cases" "$work/cases"
count=0
for requests in "$work"/cases/*.in; do
    official=$(basename "$requests" .in)
    check "$official" 0 "$nibble" render -m "$golden/$official" --jsonl --file "$requests"
    lines err 0
    cp "$work/out" "$work/got"
    check "$official as Jinja" 0 python3 -B "$work/compare.py" "${requests%.in}.wanted" "$work/got"
    count=$((count + 1))
done
[ "$count" -ge 2 ] || {
    echo "FAIL only $count models in '$cases'"
    failures=$((failures + 1))
}
finish
