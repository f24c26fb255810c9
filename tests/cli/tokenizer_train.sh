# A tokenizer learnt from files: what is written, that it is always the same, and errors.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"

# same FILE FILE: byte for byte.
same() {
    cmp "$1" "$2" >"$work/cmp" 2>&1 || {
        echo "FAIL $name: $(cat "$work/cmp")"
        failures=$((failures + 1))
    }
}

printf 'the cat sat on the mat<|endoftext|>the hat of the cat' >"$work/a.txt"
printf 'who sat?\tthe cat sat\n# a comment\n' >"$work/b.tsv"
printf '%s\n' '{"text": "the mat, the hat"}' \
    '{"messages": [{"role": "user", "content": "that cat"}, {"role": "assistant", "content": "sat"}]}' \
    >"$work/c.jsonl"
mkdir "$work/one" "$work/two" "$work/three" "$work/four"

# ---- what is written ----

check "all kinds of files" 0 "$nibble" tokenizer train --vocab 290 -o "$work/one/tokenizer.json" \
    "$work/a.txt" "$work/b.tsv" "$work/c.jsonl"
says out "wrote $work/one/tokenizer.json: 290 entries"
lines out 1
check "another order of files" 0 "$nibble" tokenizer train "$work/c.jsonl" -o \
    "$work/two/tokenizer.json" "$work/b.tsv" --vocab=290 "$work/a.txt"
same "$work/one/tokenizer.json" "$work/two/tokenizer.json"
same "$work/one/tokenizer_config.json" "$work/two/tokenizer_config.json"
check "once more, on one thread" 0 "$nibble" tokenizer train --threads 1 --vocab 290 -q \
    -o "$work/two/tokenizer.json" "$work/a.txt" "$work/b.tsv" "$work/c.jsonl"
same "$work/one/tokenizer.json" "$work/two/tokenizer.json"
lines out 0
lines err 0

# The merges, counted by hand: "at" is in every cat, sat, mat and hat (15); then "th" (8) before
# "he" (7) and so on.
cat >"$work/check.py" <<'END'
import json
import sys

with open(sys.argv[1] + "/tokenizer.json", encoding="utf-8") as f:
    t = json.load(f)
with open(sys.argv[1] + "/tokenizer_config.json", encoding="utf-8") as f:
    config = json.load(f)
model, vocab = t["model"], t["model"]["vocab"]
assert model["type"] == "BPE" and t["normalizer"] == {"type": "NFC"}, t["normalizer"]
assert sorted(vocab.values()) == list(range(264)), sorted(vocab.values())[-5:]
assert model["merges"][0] == ["a", "t"], model["merges"]
assert len(model["merges"]) == 8, model["merges"]
assert all(a + b in vocab for a, b in model["merges"])
added = {a["content"]: a for a in t["added_tokens"]}
assert len(added) == 26 and added["<|endoftext|>"]["id"] == 264, added
assert added["<|im_end|>"]["special"] and not added["<think>"]["special"]
assert added["</think>"]["id"] == 289
assert not any("endoftext" in text or "im_" in text for text in vocab)
assert config["eos_token"] == "<|im_end|>" and config["pad_token"] == "<|endoftext|>", config
assert "<|im_start|>" in config["chat_template"]
END
check "the contents" 0 python3 -B "$work/check.py" "$work/one"
check "the ids" 0 "$nibble" tokenize -m "$work/one" --text 'at<|im_end|>'
[ "$(cat "$work/out")" = 256,266 ] || {
    echo "FAIL $name: $(cat "$work/out")"
    failures=$((failures + 1))
}

check "--json" 0 "$nibble" tokenizer train --json --vocab 285 -o "$work/three/t.json" "$work/a.txt"
cp "$work/out" "$work/report"
check "--json is JSON" 0 python3 -c 'import json, sys
assert json.load(open(sys.argv[1])) == {"out": sys.argv[2], "entries": 285}' \
    "$work/report" "$work/three/t.json"
printf '{"mine": true}' >"$work/three/tokenizer_config.json"
cp "$work/three/tokenizer_config.json" "$work/settings"
check "settings that are there" 0 "$nibble" tokenizer train --vocab 285 -o "$work/three/t.json" \
    "$work/a.txt"
same "$work/settings" "$work/three/tokenizer_config.json"
check "few pairs" 0 "$nibble" tokenizer train -o "$work/four/t.json" "$work/a.txt"
says err "warning: the texts give only"
check "many pairs seen once" 0 "$nibble" tokenizer train -q --min-count 1 --vocab 320 \
    -o "$work/four/t.json" "$work/a.txt" "$work/b.tsv"
check "none seen so often" 0 "$nibble" tokenizer train --min-count 1000 -o "$work/four/t.json" \
    "$work/a.txt"
says out ": 282 entries"
: >"$work/empty.txt"
check "an empty text" 1 "$nibble" tokenizer train -o "$work/four/t.json" "$work/empty.txt"
says err "there is no text to learn from"

# ---- usage and errors ----

check "no -o" 2 "$nibble" tokenizer train "$work/a.txt"
says err "-o FILE is missing"
check "no files" 2 "$nibble" tokenizer train -o "$work/four/x.json"
says err "FILES... is missing"
check "no word" 2 "$nibble" tokenizer
says err "train is missing"
check "another word" 2 "$nibble" tokenizer make "$work/a.txt" -o "$work/four/x.json"
says err "there is no 'make'; there is 'train'"
for size in 281 4194304 0 -1 1.5 many; do
    check "--vocab $size" 2 "$nibble" tokenizer train --vocab "$size" -o "$work/four/x.json" \
        "$work/a.txt"
    says err "--vocab takes a whole number"
done
check "--min-count 0" 2 "$nibble" tokenizer train --min-count 0 -o "$work/four/x.json" "$work/a.txt"
check "a file that is not there" 1 "$nibble" tokenizer train -o "$work/four/x.json" "$work/a.txt" \
    "$work/none.txt"
says err "cannot open '$work/none.txt'"
printf x >"$work/notes.xyz"
check "an ending that is not known" 1 "$nibble" tokenizer train -o "$work/four/x.json" \
    "$work/notes.xyz"
says err "notes.xyz"
says err ".jsonl"
printf '{"text": "a"}\n{"text"\n' >"$work/bad.jsonl"
check "a bad line" 1 "$nibble" tokenizer train -o "$work/four/x.json" "$work/bad.jsonl"
says err "bad.jsonl"
says err "2"
check "no such directory" 1 "$nibble" tokenizer train -o "$work/nowhere/x.json" "$work/a.txt"
says err "cannot write '$work/nowhere/x.json'"
[ ! -e "$work/four/x.json" ] || {
    echo "FAIL a tokenizer was written all the same"
    failures=$((failures + 1))
}

# Any name will do, or is refused before anything is written.
name="a name without .json"
if ! "$nibble" tokenizer train -q -o "$work/four/plain" "$work/a.txt" 2>"$work/err" &&
    { [ -e "$work/four/plain" ] || ! grep -qF .json "$work/err"; }; then
    echo "FAIL $name: written, and then: $(cat "$work/err")"
    failures=$((failures + 1))
fi
printf '{"text": "a"}\n' >"$work/own.json"
cp "$work/own.json" "$work/own.jsonl"
ln -s own.jsonl "$work/link.json"
check "its own text" 1 "$nibble" tokenizer train -o "$work/link.json" "$work/own.jsonl"
says err "would replace a text it is made from"
check "a name that is no .json" 2 "$nibble" tokenizer train -o "$work/plain" "$work/own.jsonl"

finish
