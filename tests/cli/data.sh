# Data sets through the binary: what `data show` prints of one, what it refuses, and the identity
# set that `data whoami` writes.
# shellcheck shell=sh disable=SC2154,SC2016 # lib.sh's variables; single quotes on purpose
. "$(dirname "$0")/lib.sh"

# is out|FILE TEXT: exactly this, printf's escapes understood.
is() {
    printf '%b' "$2" >"$work/wanted"
    diff "$work/wanted" "$work/$1" >"$work/diff" || {
        echo "FAIL $name: $1 is not what is expected:"
        sed 's/^/    /' "$work/diff"
        failures=$((failures + 1))
    }
}

# holds PYTHON: the expression over r, the JSON on standard output, is true.
holds() {
    python3 -B -c 'import json, sys
r = json.load(open(sys.argv[1], encoding="utf-8"))
sys.exit(0 if eval(sys.argv[2]) else 1)' "$work/out" "$1" || {
        echo "FAIL $name: $1"
        head -c 400 "$work/out"
        failures=$((failures + 1))
    }
}

cd "$work" || exit 1
mkdir model
printf 'prompt\tanswer\nwho are you?\tI am nibble\n# a comment\nno way\tyes\tway \r\n' >a.tsv
printf '%s\n%s\n' '{"prompt": "p\u001b[1m", "response": "r", "system": "s"}' \
    '{"text": "plain"}' >b.jsonl
printf '\none\ntwo\n<|endoftext|>\nthree' >c.txt
check "a tokenizer of bytes" 0 "$nibble" tokenizer train --vocab 282 -o model/tokenizer.json a.tsv
says out "282 entries"

# ---- show: text ----

user='<|im_start|>user\n' end='<|im_end|>\n<|im_start|>assistant\n'
check "plain" 0 "$nibble" data show -m model -d a.tsv --sequential --color never
is out "--- 1, a.tsv:2: 43 tokens, 12 trained on
${user}who are you?${end}[[I am nibble<|im_end|>]]

--- 2, a.tsv:4: 33 tokens, 8 trained on
${user}no way${end}[[yes\tway<|im_end|>]]

2 samples, 76 tokens, 20 trained on (26 %), longest 43
packed into rows of 1024 tokens: 1, 7.2 % full; conversations cut: 0\n"
lines err 0
check "a pipe has no colours" 0 "$nibble" data show -m model -d a.tsv --sequential -n 1
says out "[[I am nibble<|im_end|>]]"
check "colours" 0 "$nibble" data show -m model -d a.tsv --sequential -n 1 --color always
is out "--- 1, a.tsv:2: 43 tokens, 12 trained on
\\033[2m${user}who are you?$end\\033[0m\\033[1;32mI am nibble<|im_end|>\\033[0m

2 samples, 76 tokens, 20 trained on (26 %), longest 43
packed into rows of 1024 tokens: 1, 7.2 % full; conversations cut: 0\n"
check "several files" 0 "$nibble" data show -m model -d b.jsonl --data c.txt --sequential -n 9 \
    --color never
is out "--- 1, b.jsonl:1: 37 tokens, 2 trained on
<|im_start|>system\ns<|im_end|>\n${user}p?[1m${end}[[r<|im_end|>]]

--- 2, b.jsonl:2: 6 tokens, 6 trained on
[[plain<|endoftext|>]]

--- 3, c.txt:2: 8 tokens, 8 trained on
[[one\ntwo<|endoftext|>]]

--- 4, c.txt:5: 6 tokens, 6 trained on
[[three<|endoftext|>]]

4 samples (3 of them text), 57 tokens, 22 trained on (39 %), longest 37
packed into rows of 1024 tokens: 1, 5.2 % full; conversations cut: 0\n"
check "rows that are too short" 0 "$nibble" data show -m model -d a.tsv --sequential -n 1 \
    --seq-len 16 --color never
is out "--- 1, a.tsv:2: 17 tokens, 12 trained on, shortened
tant\n[[I am nibble<|im_end|>]]

2 samples, 76 tokens, 20 trained on (26 %), longest 43
packed into rows of 16 tokens: 2, 100.0 % full; conversations cut: 2\n"
check "nothing to show" 0 "$nibble" data show -m model -d a.tsv -n 0 --seq-len 0
is out '2 samples, 76 tokens, 20 trained on (26 %), longest 43\n'
check "the tokenizer.json itself" 0 "$nibble" data show -m model/tokenizer.json -d a.tsv -n 0
lines err 0

# ---- show: order ----

seq 50 | sed 's/.*/q&\ta&/' >many.tsv
order() {
    grep -a '^---' "$work/out" | cut -d' ' -f3
}
check "shuffled" 0 "$nibble" data show -m model -d many.tsv -n 50
order >first
check "again" 0 "$nibble" data show -m model -d many.tsv -n 50 --seed 0
order | cmp - first || failures=$((failures + 1))
sort first | uniq | wc -l | grep -qx 50 || {
    echo "FAIL shuffled: not every sample once"
    failures=$((failures + 1))
}
check "another seed" 0 "$nibble" data show -m model -d many.tsv -n 50 --seed 1
order | cmp -s - first && {
    echo "FAIL $name: the order is that of seed 0"
    failures=$((failures + 1))
}
check "in order" 0 "$nibble" data show -m model -d many.tsv -n 50 --sequential
order | head -3 | xargs | grep -qx 'many.tsv:1: many.tsv:2: many.tsv:3:' || {
    echo "FAIL $name: not the order of the file"
    failures=$((failures + 1))
}

# ---- show: JSON ----

check "as JSON" 0 "$nibble" data show -m model -d b.jsonl -d c.txt --sequential --json -n 2
lines err 0
holds '{k: v for k, v in r.items() if k != "shown"} == {"samples": 4, "documents": 3, "tokens": 57,
    "trained": 22, "longest": 37, "bad": 0, "too_long": 0, "rows": 1, "row_tokens": 53}'
holds '[s["place"] for s in r["shown"]] == ["b.jsonl:1", "b.jsonl:2"]'
holds 'r["shown"][1]["trained"] == [1] * 6 and r["shown"][1]["ids"][-1] == 256'
holds 'r["shown"][0]["trained"] == [0] * 35 + [1, 1] and not r["shown"][0]["truncated"]'
holds 'len(r["shown"][0]["ids"]) == 37'
holds 'r["shown"][0]["ids"][0] == 257 and r["shown"][0]["ids"][-1] == 258'
check "as JSON, shortened" 0 "$nibble" data show -m model -d a.tsv --json --seq-len 20
holds 'r["too_long"] == 2 and all(s["truncated"] and len(s["ids"]) == 21 for s in r["shown"])'

# ---- show: what is refused ----

printf 'a\tb\nno tab\n\t\nc\t\n' >bad.tsv
check "a bad line" 1 "$nibble" data show -m model -d a.tsv -d bad.tsv
is err 'nibble: bad.tsv:2: no TAB between prompt and answer\n'
lines out 0
check "bad lines skipped" 0 "$nibble" data show -m model -d bad.tsv --skip-bad -n 0
says out "1 sample, 22 tokens"
says out "bad lines skipped: 2"
says err "warning: skipped bad.tsv:2: no TAB between prompt and answer"
says err "warning: skipped bad.tsv:4: the answer is empty"
lines err 2
check "bad lines as JSON" 0 "$nibble" data show -m model -d bad.tsv --skip-bad --json -q
holds 'r["samples"] == 1 and r["bad"] == 2'
echo x >x.tsv
check "nothing but bad lines" 1 "$nibble" data show -q -m model -d x.tsv --skip-bad
says err "there is no sample in 'x.tsv'"
printf '{"messages": [{"role": "user", "content": "u"}]}\n' >bad.jsonl
check "no answer" 1 "$nibble" data show -m model -d bad.jsonl
is err 'nibble: bad.jsonl:1: there is no assistant message to learn from\n'
check "an unknown ending" 1 "$nibble" data show -m model -d a.csv
says err ".tsv, .jsonl or .txt"
check "no file" 1 "$nibble" data show -m model -d none.tsv
says err "cannot open 'none.tsv'"
check "no tokenizer" 1 "$nibble" data show -m "$work" -d a.tsv
lines err 1
check "no model" 2 "$nibble" data show -d a.tsv
says err "nibble data show: -m MODEL is missing"
check "no data" 2 "$nibble" data show -m model
says err "nibble data show: -d FILE is missing"
check "nothing at all" 2 "$nibble" data
check "something else" 2 "$nibble" data list
says err "there is no 'list'; there are 'show' and 'whoami'"
check "a bad colour" 2 "$nibble" data show -m model -d a.tsv --color green
check "output that cannot be written" 1 sh -c '"$0" data show -m model -d a.tsv >/dev/full' \
    "$nibble"

# ---- whoami ----

check "the identity set" 0 "$nibble" data whoami -o who.tsv --count 200
says out "wrote who.tsv: 200 lines, 80 who the model is, 50 that only look like it, 70 ordinary;"
lines err 0
check "as JSON" 0 "$nibble" data whoami -o again.tsv --count 200 --json
holds 'r == {"out": "again.tsv", "identity": 80, "contrast": 50, "replay": 70, "left_out": 0,
    "held_out": sum(l[0] != "#" for l in open("again.heldout.tsv", encoding="utf-8"))}'
cmp who.tsv again.tsv && cmp who.heldout.tsv again.heldout.tsv || failures=$((failures + 1))
grep -cv '^#' who.tsv | grep -qx 200 || {
    echo "FAIL $name: not 200 lines"
    failures=$((failures + 1))
}
check "another seed" 0 "$nibble" data whoami -o seed.tsv --count 200 --seed 1 -q
lines out 0
cmp -s who.tsv seed.tsv && {
    echo "FAIL $name: the same set"
    failures=$((failures + 1))
}
check "it is a data set" 0 "$nibble" data show -m model -d who.tsv -d who.heldout.tsv -n 0 --json
holds 'r["samples"] > 200 and r["bad"] == 0'

check "a target" 0 "$nibble" data whoami -o t.tsv --count 200 --target 'I am Ada, a helper.' -q
grep -c '	I am Ada, a helper\.$' t.tsv | grep -qx 80 || {
    echo "FAIL $name: not in 80 answers"
    failures=$((failures + 1))
}
check "a name" 0 "$nibble" data whoami -o n.tsv --count 200 --name Ada -q
grep -c '	.*Ada' n.tsv | grep -qx 80 || {
    echo "FAIL $name: not in 80 answers"
    failures=$((failures + 1))
}
grep -q nibble n.tsv && ! grep nibble n.tsv | grep -q '^#' && failures=$((failures + 1))

seq 200 | sed 's/.*/What is & plus one?\tOne more than &./' >replay.tsv
seq 200 | sed 's/.*/{"prompt": "What is & plus one?", "response": "One more than &."}/' \
    >replay.jsonl
for kind in tsv jsonl; do
    check "replay from $kind" 0 "$nibble" data whoami -o "r.$kind.tsv" --count 200 --json \
        --replay "replay.$kind"
    holds 'r["replay"] == 70 and r["identity"] == 80'
    grep -c '	One more than [0-9]*\.$' "r.$kind.tsv" | grep -qx 70 || {
        echo "FAIL $name: not 70 lines of it"
        failures=$((failures + 1))
    }
done
cmp r.tsv.tsv r.jsonl.tsv || failures=$((failures + 1))
sed -n 1p r.tsv.tsv | grep -q 'given replay' || failures=$((failures + 1))
printf 'ok\tyes\nwho are you?\tsomebody else\n' >clash.tsv
check "replay that does not fit" 0 "$nibble" data whoami -o r.tsv --count 100 --replay clash.tsv
says err "1 line of 'clash.tsv' could not be used"

check "no output" 2 "$nibble" data whoami
says err "nibble data whoami: -o FILE.tsv is missing"
check "a target with a TAB" 1 "$nibble" data whoami -o refused.tsv --target "$(printf 'a\tb')"
says err "has a TAB, a line break or another control character in it"
check "an empty target" 1 "$nibble" data whoami -o refused.tsv --target ''
check "a target that is no text" 1 "$nibble" data whoami -o refused.tsv --target "$(printf 'a\377')"
lines err 1
check "too few lines" 2 "$nibble" data whoami -o refused.tsv --count 99
check "replay with a bad line" 1 "$nibble" data whoami -o refused.tsv --replay bad.tsv
says err "bad.tsv:2: no TAB"
check "replay that is not there" 1 "$nibble" data whoami -o refused.tsv --replay none.tsv
says err "cannot open 'none.tsv'"
check "over its own replay" 1 "$nibble" data whoami -o replay.tsv --replay replay.tsv
says err "would replace the replay file"
check "no such directory" 1 "$nibble" data whoami -o none/x.tsv
[ -e refused.tsv ] || [ -e refused.heldout.tsv ] && {
    echo "FAIL a refused set was written"
    failures=$((failures + 1))
}
check "an option of the other kind" 2 "$nibble" data whoami -o "$work/x.tsv" --seq-len 7
says err "--seq-len is not for 'whoami'"
check "both ways to say who" 2 "$nibble" data whoami -o "$work/x.tsv" --name a --target b
check "a name that is no .tsv" 1 "$nibble" data whoami -o "$work/x.txt"
says err "is no name for a .tsv file"

finish
