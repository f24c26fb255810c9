# Text to ids and back through the binary: sources, forms, errors, and the ids that the tokenizers
# library gives. QWEN3_TOKENIZER may name a folder with Qwen3's tokenizer.json and cases.jsonl, lines
# of the form of those in tests/golden/tokenizer/qwen, which are then compared as well.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"
golden=$root/tests/golden/tokenizer
model=$golden/qwen

# is TEXT: standard output is exactly this, printf's escapes understood.
is() {
    printf "%b" "$1" >"$work/wanted"
    cmp "$work/wanted" "$work/out" >"$work/cmp" 2>&1 || {
        echo "FAIL $name: not the text expected: $(cat "$work/cmp")"
        sed 's/^/    /' "$work/out"
        failures=$((failures + 1))
    }
}

# from FILE ARGUMENTS...: nibble with this standard input; for check.
cat >"$work/from" <<'END'
#!/bin/sh
nibble=$1 input=$2
shift 2
exec "$nibble" "$@" <"$input"
END
chmod +x "$work/from"
from() {
    code_wanted=$1 file=$2 label=$3
    shift 3
    check "$label" "$code_wanted" "$work/from" "$nibble" "$file" "$@"
}

# ---- tokenize: one text ----

chat='<|im_start|>user\nhi<|im_end|>\n'
chat_ids='601,84,82,500,198,71,72,602,198\n'
plain_ids='27,91,72,76,62,82,83,64,81,83,91,29,84,82,500,198,71,72,27,91,72,76,62,68,501,91,29,198\n'
printf '%b' "$chat" >"$work/chat.txt"
check "--text" 0 "$nibble" tokenize -m "$model" --text 'ab ab'
cp "$work/out" "$work/ab"
lines out 1
lines err 0
check "MODEL as an argument" 0 "$nibble" tokenize "$model" --text 'ab ab'
cmp -s "$work/ab" "$work/out" || { echo "FAIL $name"; failures=$((failures + 1)); }
check "a tokenizer.json" 0 "$nibble" tokenize -m "$model/tokenizer.json" --text 'ab ab'
cmp -s "$work/ab" "$work/out" || { echo "FAIL $name"; failures=$((failures + 1)); }
: >"$work/weights.dat"
check "--model-dir" 0 "$nibble" tokenize "$work/weights.dat" --model-dir "$model" --text 'ab ab'
cmp -s "$work/ab" "$work/out" || { echo "FAIL $name"; failures=$((failures + 1)); }
check "--file" 0 "$nibble" tokenize -m "$model" --file "$work/chat.txt"
is "$chat_ids"
from 0 "$work/chat.txt" "standard input" tokenize -m "$model"
is "$chat_ids"
check "--no-special" 0 "$nibble" tokenize -m "$model" --file "$work/chat.txt" --no-special
is "$plain_ids"
check "--json" 0 "$nibble" tokenize -m "$model" --file "$work/chat.txt" --json
is '{"ids": [601, 84, 82, 500, 198, 71, 72, 602, 198]}\n'
check "no text" 0 "$nibble" tokenize -m "$model" --text ''
is '\n'
check "no text as JSON" 0 "$nibble" tokenize -m "$model" --json
is '{"ids": []}\n'
printf 'a\0b\377' >"$work/bytes"
from 0 "$work/bytes" "NUL and malformed bytes" tokenize -m "$model"
is '64,188,65,171,123,121\n'

# ---- tokenize: lines ----

printf '%s\n\n \t\r\n%s' '{"text": "<|im_end|>"}' '{"other": 1, "text": "a\u0000b"}' \
    >"$work/two.jsonl"
check "lines" 0 "$nibble" tokenize -m "$model" --jsonl --file "$work/two.jsonl"
is '{"ids": [602]}\n{"ids": [64, 188, 65]}\n'
from 0 "$work/two.jsonl" "lines of standard input" tokenize -m "$model" --jsonl --no-special
lines out 2
check "no lines" 0 "$nibble" tokenize -m "$model" --jsonl
lines out 0
for bad in '{"text": 5}:must be a string, it is a number' '{}:must be a string, it is missing' \
    '[]:must be a string, it is missing' '{"text": "a":invalid JSON at byte' \
    '{"text": "\ud800"}:a lone surrogate' '5 5:something follows'; do
    printf '{"text": "a"}\n\n%s\n{"text": "b"}\n' "${bad%%:[!\" ]*}" >"$work/bad.jsonl"
    check "bad line $bad" 1 "$nibble" tokenize -m "$model" --jsonl --file "$work/bad.jsonl"
    is '{"ids": [64]}\n'
    lines err 1
    says err "bad.jsonl, line 3: "
    says err "${bad##*:}"
done
from 1 "$work/bad.jsonl" "bad line of standard input" tokenize -m "$model" --jsonl
says err "standard input, line 3: "

# ---- tokenize: usage and errors ----

check "two sources" 2 "$nibble" tokenize -m "$model" --text a --file "$work/chat.txt"
says err "give --text or --file, not both"
lines out 0
check "text and lines" 2 "$nibble" tokenize -m "$model" --text a --jsonl
says err "give --text or --jsonl, not both"
check "no model" 2 "$nibble" tokenize --text a
says err "MODEL is missing"
check "two models" 2 "$nibble" tokenize -m "$model" "$model" --text a
check "a model that is not there" 1 "$nibble" tokenize -m "$work/none" --text a
says err "cannot open '$work/none'"
lines err 1
check "a file that is not there" 1 "$nibble" tokenize -m "$model" --file "$work/none"
says err "cannot open '$work/none'"
check "a file that is a directory" 1 "$nibble" tokenize -m "$model" --file "$work"
says err "cannot read '$work'"
mkdir "$work/empty"
check "a directory without a tokenizer" 1 "$nibble" tokenize -m "$work/empty" --text a
says err "tokenizer.json"
check "no room for the output" 1 sh -c '"$0" tokenize -m "$1" --text a >/dev/full' "$nibble" "$model"
says err "cannot write to standard output"

# ---- detokenize ----

for ids in '64,220,65' '64 220 65' '[64, 220, 65]' ' 64 ,
220	65 ' '[64,220,65]
'; do
    check "ids '$ids'" 0 "$nibble" detokenize -m "$model" --ids "$ids"
    is 'a b'
    lines err 0
    printf '%s' "$ids" >"$work/ids"
    from 0 "$work/ids" "ids '$ids' of standard input" detokenize "$model"
    is 'a b'
done
check "no ids" 0 "$nibble" detokenize -m "$model" --ids ''
is ''
check "ids as JSON" 0 "$nibble" detokenize -m "$model" --ids 64,198,601 --json
is '{"text": "a\\n<|im_start|>"}\n'
check "half a character" 0 "$nibble" detokenize -m "$model" --ids 64,160
is 'a\0344'
check "half a character as JSON" 0 "$nibble" detokenize -m "$model" --ids 64,160 --json
is '{"text": "a\0357\0277\0275"}\n'
check "NUL" 0 "$nibble" detokenize -m "$model" --ids 64,188,65
is 'a\0b'
check "unknown ids" 0 "$nibble" detokenize -m "$model" --ids 64,647,65,2147483647
is 'ab'
says err "outside the vocabulary were skipped: 2"
lines err 1
check "unknown ids, quietly" 0 "$nibble" detokenize -q -m "$model" --ids 64,647
is 'a'
lines err 0
for bad in x 64x -5 +5 1.5 0x10 2147483648 99999999999999999999 '"64"'; do
    check "bad id $bad" 1 "$nibble" detokenize -m "$model" --ids "64,$bad"
    says err "'$bad' is not a token id"
    lines err 1
    lines out 0
done
printf '64,65\0garbage' >"$work/ids"
from 1 "$work/ids" "NUL among ids" detokenize -m "$model"
printf '{"ids": [64, 198]}\n\n{"ids": []}\n{"ids": [65, 9999]}\n' >"$work/ids.jsonl"
from 0 "$work/ids.jsonl" "ids in lines" detokenize -m "$model" --jsonl
is '{"text": "a\\n"}\n{"text": ""}\n{"text": "b"}\n'
says err "outside the vocabulary were skipped: 1"
for bad in '{"ids": [1, -1]}:element 1 of' '{"ids": [1.0]}:element 0 of' \
    '{"ids": ["1"]}:element 0 of' '{"ids": 5}:must be an array, it is a number' \
    '{"ids": [1]:invalid JSON'; do
    printf '{"ids": [64]}\n%s\n' "${bad%:*}" >"$work/bad.jsonl"
    from 1 "$work/bad.jsonl" "bad line $bad" detokenize -m "$model" --jsonl
    is '{"text": "a"}\n'
    says err "standard input, line 2: "
    says err "${bad##*:}"
done
check "two sources of ids" 2 "$nibble" detokenize -m "$model" --ids 1 --jsonl
says err "give --ids or --jsonl, not both"
check "no tokenizer to go back" 1 "$nibble" detokenize -m "$work/none" --ids 1

# ---- the library's ids ----

cat >"$work/compare.py" <<'END'
"""compare.py NIBBLE MODEL CASES: both ways, all cases of a file."""
import json
import subprocess
import sys

nibble, model, path = sys.argv[1:]
with open(path, encoding="utf-8") as f:
    rows = [row for row in map(json.loads, f) if "text" in row]


def run(command, lines):
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    done = subprocess.run([nibble, command, "-m", model, "--jsonl"], input=data, check=True,
                          stdout=subprocess.PIPE)
    return [json.loads(line) for line in done.stdout.splitlines()]


bad = []
for row, got in zip(rows, run("tokenize", [{"text": row["text"]} for row in rows])):
    if got["ids"] != row["ids"]:
        bad.append((row["text"], got["ids"], row["ids"]))
for row, got in zip(rows, run("detokenize", [{"ids": row["ids"]} for row in rows])):
    if got["text"] != row.get("decoded", row["text"]):
        bad.append((row["ids"], got["text"], row.get("decoded", row["text"])))
print(len(rows))
assert not bad, f"{len(bad)} differ: " + "; ".join(ascii(b) for b in bad[:3])
END
for each in qwen gpt2 llama3; do
    check "cases of $each" 0 python3 -B "$work/compare.py" "$nibble" "$golden/$each" \
        "$golden/$each/cases.jsonl"
done
# A line is answered before the next one comes.
mkfifo "$work/ask" "$work/answer"
"$nibble" tokenize -m "$golden/qwen" --jsonl <"$work/ask" >"$work/answer" &
exec 7>"$work/ask" 8<"$work/answer"
echo '{"text": "a"}' >&7
read -r first <&8
exec 7>&- 8<&-
wait
case "$first" in
'{"ids": ['*) ;;
*)
    echo "FAIL an answer while the input is open: '$first'"
    failures=$((failures + 1))
    ;;
esac

official=${QWEN3_TOKENIZER:-}
if [ -n "$official" ]; then
    check "the official cases" 0 python3 -B "$work/compare.py" "$nibble" "$official" \
        "$official/cases.jsonl"
    [ "$(cat "$work/out")" -ge 439 ] || {
        echo "FAIL only $(cat "$work/out") cases in '$official/cases.jsonl'"
        failures=$((failures + 1))
    }
else
    echo "SKIP Qwen3's whole tokenizer: QWEN3_TOKENIZER names no folder with it"
fi
finish
