# Conversations without a terminal: turns, commands, logs, replay, errors.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

fail() {
    echo "FAIL $name: $1"
    failures=$((failures + 1))
}

# chat NAME EXIT-CODE INPUT OPTIONS...: INPUT goes through printf.
chat() {
    chat_name=$1 chat_code=$2
    # shellcheck disable=SC2059 # the escapes are wanted
    printf "$3" >"$work/in"
    shift 3
    check "$chat_name" "$chat_code" sh -c 'in=$1; shift; exec "$@" <"$in"' - "$work/in" \
        "$nibble" chat -q -m "$model" "$@"
}

# log FILE CONDITION...: Python expressions that hold for the lines: r all of them, u what the user
# said, a the answers.
log() {
    python3 -B -c 'import json, sys
r = [json.loads(l) for l in open(sys.argv[1], encoding="utf-8")]
u = [m["content"] for m in r if m.get("role") == "user"]
a = [m for m in r if m.get("role") == "assistant"]
for c in sys.argv[2:]:
    assert eval(c), c + ": " + json.dumps(r)[:800]' "$@" 2>"$work/py" ||
        fail "$(tail -n 1 "$work/py")"
}

# answers FILE: the texts of a log's answers, one JSON string per line.
answers() {
    python3 -B -c 'import json, sys
for l in open(sys.argv[1], encoding="utf-8"):
    m = json.loads(l)
    if m.get("role") == "assistant":
        print(json.dumps(m["content"]))' "$1"
}

# same FILE FILE: the same answers.
same() {
    answers "$1" >"$work/a"
    answers "$2" >"$work/b"
    [ -s "$work/a" ] && cmp -s "$work/a" "$work/b" || fail "other answers: $(cat "$work/b")"
}

cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu",
 "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512,
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "eos_token_id": 602, "vocab_size": 672}
JSON
model=$work/model
check "a model" 0 "$nibble" synth -q --sigma 0.05 --config "$work/config.json" "$model"
cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$model"

# ---- turns ----

chat "turns" 0 'hello\n\nand then?\r\nlast' -n 9 --ignore-eos --log "$work/turns.jsonl"
log "$work/turns.jsonl" 'r[0]["event"] == "start" and r[0]["settings"]["seed"] == 0' \
    'r[0]["settings"]["context"] == 512' 'u == ["hello", "and then?", "last"]' \
    'a[0]["reused_tokens"] == 0' \
    'all(y["reused_tokens"] == x["prompt_tokens"] + 9 for x, y in zip(a, a[1:]))' \
    'all(m["completion_tokens"] == 9 and m["finish_reason"] == "length" for m in a)' \
    'all(m["prompt_ms"] > 0 and not m["interrupted"] and "time" in m for m in a)'
python3 -B -c 'import json, sys
for l in open(sys.argv[1], encoding="utf-8"):
    m = json.loads(l)
    if m.get("role") == "assistant":
        sys.stdout.buffer.write((m["content"] + "\n").encode())' "$work/turns.jsonl" >"$work/wanted"
cmp -s "$work/wanted" "$work/out" || fail "standard output is not the answers alone"
lines err 0
check "one turn is what generate says" 0 "$nibble" generate -q -m "$model" -p hello -n 9 --ignore-eos
cp "$work/out" "$work/one"
chat "one turn" 0 'hello\n' -n 9 --ignore-eos
cmp -s "$work/one" "$work/out" || fail "not what generate says"
chat "several lines" 0 '"""one\n\n two"""\n"""\nblock\n"""\nback\\\nslash\ntwo\\\\\n//slash\n' \
    -n 3 --log "$work/several.jsonl"
log "$work/several.jsonl" \
    'u == ["one\n\n two", "block", "back\nslash", "two\\\\", "/slash"]'
chat "bytes that are no text" 0 'a\377\000b\n' -n 3 --log "$work/bytes.jsonl"
log "$work/bytes.jsonl" 'u == ["a\ufffd\0b"]'
chat "as JSON" 0 'hello\nmore\n' -n 5 --json
cp "$work/out" "$work/json.jsonl"
log "$work/json.jsonl" 'len(r) == 2 and r[1]["role"] == "assistant"' 'r[1]["reused_tokens"] > 5'
chat "a first message" 0 'second\n' -n 3 -p first --log "$work/first.jsonl"
log "$work/first.jsonl" 'u == ["first", "second"]'
chat "nothing" 0 ''
lines out 0
chat "timing" 0 'hello\n' -n 3 --timing
says err "tok/s"

# ---- commands ----

chat "commands" 0 "one\n/system be brief\n/system\n/save $work/saved.jsonl\ntwo\n/reset\n/stats
/load $work/saved.jsonl\nthree\n/save $work/saved.jsonl\n/system \"\"\n/system\n/help\n/quit\nnever\n" \
    -n 6 --log "$work/commands.jsonl"
says err "be brief"
says err "there is no system message"
says err "context: "
says err "/save    FILE"
log "$work/commands.jsonl" 'u == ["one", "two", "three"]' \
    '[m.get("event", m.get("role")) for m in r] == ["start", "user", "assistant", "system", "user",
      "assistant", "reset", "load", "user", "assistant", "system"]' \
    'abs(a[2]["prompt_tokens"] - a[1]["prompt_tokens"]) < 5' \
    'len(r[7]["messages"]) == 3 and r[7]["messages"][0]["content"] == "be brief"'
log "$work/saved.jsonl" 'len(r) == 1' \
    '[m["role"] for m in r[0]["messages"]] == ["system"] + ["user", "assistant"] * 2' \
    'r[0]["messages"][3]["content"] == "three"'
check "a saved conversation is a data set" 0 "$nibble" data show -q -m "$model" -d "$work/saved.jsonl"
check "and a request" 0 sh -c '"$0" render -q -m "$1" <"$2"' "$nibble" "$model" "$work/saved.jsonl"
says out "be brief"
chat "an empty conversation" 0 "/save $work/empty.jsonl\none\n/load $work/empty.jsonl\n/stats\ntwo\n" \
    -n 3 --log "$work/emptied.jsonl"
says err "0 messages"
log "$work/empty.jsonl" 'r == [{"messages": []}]'
log "$work/emptied.jsonl" 'u == ["one", "two"]' 'a[0]["prompt_tokens"] == a[1]["prompt_tokens"]'
check "replay of an empty conversation" 0 "$nibble" chat -q -m "$model" --replay "$work/empty.jsonl"
lines out 0
chat "a name that is taken" 1 "one\n/save $work/config.json\n" -n 3
says err "is there already"
chat "no such command" 1 '/sav\nnever\n'
says err "unknown command '/sav' (did you mean '/save'?)"
lines err 1
chat "too much" 1 '/reset now\n'
chat "no name" 1 '/load\n'
says err "/load needs the name of a file"
chat "no such file" 1 "/load $work/none\n"
says err "'$work/none'"
chat "no end" 1 '"""open\nstill\n'
says err "standard input ends inside of a message"

# ---- logs and replay ----

for log in turns several commands bytes; do
    case $log in
    turns) n="-n 9 --ignore-eos" ;;
    commands) n="-n 6" ;;
    *) n="-n 3" ;;
    esac
    rm -f "$work/again.jsonl"
    # shellcheck disable=SC2086 # several words
    check "replay of $log" 0 "$nibble" chat -q -m "$model" $n --replay "$work/$log.jsonl" \
        --log "$work/again.jsonl"
    same "$work/$log.jsonl" "$work/again.jsonl"
    cp "$work/again.jsonl" "$work/thrice.in"
    rm -f "$work/thrice.jsonl"
    # shellcheck disable=SC2086 # several words
    check "replay of the replay of $log" 0 "$nibble" chat -q -m "$model" $n \
        --replay "$work/thrice.in" --log "$work/thrice.jsonl"
    same "$work/$log.jsonl" "$work/thrice.jsonl"
done
check "the prompts are shown" 0 "$nibble" chat -q -m "$model" -n 3 --replay "$work/turns.jsonl"
says out ">>> and then?"
cat "$work/turns.jsonl" "$work/turns.jsonl" >"$work/twice.jsonl"
rm -f "$work/again.jsonl"
check "two runs in a log" 0 "$nibble" chat -q -m "$model" -n 9 --ignore-eos \
    --replay "$work/twice.jsonl" --log "$work/again.jsonl"
same "$work/twice.jsonl" "$work/again.jsonl"
rm -f "$work/again.jsonl"
check "another seed" 0 "$nibble" chat -q -m "$model" -n 9 --ignore-eos --seed 7 \
    --replay "$work/turns.jsonl" --log "$work/again.jsonl"
answers "$work/turns.jsonl" >"$work/a"
answers "$work/again.jsonl" >"$work/b"
cmp -s "$work/a" "$work/b" && fail "the seed makes no difference"
rm -f "$work/again.jsonl"
check "replay of a saved conversation" 0 "$nibble" chat -q -m "$model" -n 6 \
    --replay "$work/saved.jsonl" --log "$work/again.jsonl"
log "$work/again.jsonl" 'u == ["one", "three"]' 'r[1]["content"] == "be brief"'
python3 -B -c 'import json, sys
for l in open(sys.argv[1], encoding="utf-8"):
    m = json.loads(l)
    if m.get("role") == "assistant":
        m["interrupted"], m["completion_tokens"] = True, 4
    print(json.dumps(m))' "$work/turns.jsonl" >"$work/cut.jsonl"
rm -f "$work/again.jsonl"
check "an interrupted answer is as long again" 0 "$nibble" chat -q -m "$model" --ignore-eos \
    --replay "$work/cut.jsonl" --log "$work/again.jsonl"
log "$work/again.jsonl" '[m["completion_tokens"] for m in a] == [4, 4, 4]'
printf 'cut off' >"$work/old.jsonl"
chat "a log that is there" 0 'hello\n' -n 3 --log "$work/old.jsonl"
[ "$(head -n 1 "$work/old.jsonl")" = "cut off" ] || fail "the old line is gone"
[ "$(wc -l <"$work/old.jsonl")" -eq 4 ] || fail "$(cat "$work/old.jsonl")"

# ---- errors ----

printf '{"role": "user", "content": "hello"}\n{"role": "user"}\n' >"$work/bad.jsonl"
check "a bad replay" 1 "$nibble" chat -q -m "$model" --replay "$work/bad.jsonl"
says err "'$work/bad.jsonl', line 2: 'content' is missing"
lines err 1
lines out 0
for text in '' '{' '[]' '{"role":"tool","content":""}' '{"event":"fire"}' '{"messages":[7]}'; do
    printf '%s\n' "$text" >"$work/bad.jsonl"
    check "replay of '$text'" 1 "$nibble" chat -q -m "$model" --replay "$work/bad.jsonl"
    lines err 1
    lines out 0
done
check "replay of nothing" 1 "$nibble" chat -q -m "$model" --replay "$work/none.jsonl"
check "replay of a directory" 1 "$nibble" chat -q -m "$model" --replay "$work"
chat "the context is full" 1 'hello\n%0300d\n' --ctx 100 -n 5
says err "more than the context of 100; /reset forgets it, --ctx N makes room for more"
lines err 1
chat "an answer to the end of the context" 0 'hello\n' --ctx 60 --ignore-eos --log "$work/full.jsonl"
log "$work/full.jsonl" 'a[0]["finish_reason"] == "context"'
chat "a log that cannot be" 1 'hello\n' --log "$work/none/log.jsonl"
says err "'$work/none/log.jsonl'"
chat "a log that cannot be written" 1 'hello\n' -n 3 --log /dev/full
chat "a seed out of range" 2 '' --seed -1
check "no model" 2 "$nibble" chat
says err "-m MODEL is missing"
check "two sources" 2 "$nibble" chat -m "$model" -p hello --replay "$work/turns.jsonl"
check "no such model" 1 "$nibble" chat -m "$work/none"
lines err 1
check "output that cannot be written" 1 sh -c 'echo hello | "$0" chat -q -m "$1" -n 8 >/dev/full' \
    "$nibble" "$model"
mkdir "$work/mute"
cp "$model/config.json" "$model/model.safetensors" "$work/mute"
check "no tokenizer" 1 "$nibble" chat -q -m "$work/mute"
says err "has no tokenizer"
check "interrupted" 130 sh -c 'mkfifo "$2/pipe"; "$0" chat -q -m "$1" <"$2/pipe" & exec 3>"$2/pipe"
sleep 0.5; kill -INT $!; wait $!' "$nibble" "$model" "$work"
finish
