# Two models side by side: equal ones, different ones, scores against logits, the page, bad prompts.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu",
 "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256,
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "eos_token_id": 602, "vocab_size": 672}
JSON
for seed in 1 2; do
    check "model $seed" 0 "$nibble" synth -q --sigma 0.05 --seed $seed \
        --config "$work/config.json" "$work/m$seed"
    cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$work/m$seed"
done
a=$work/m1 b=$work/m2

# Prompts with an expected answer that is markup, with and without one, with a character of two
# bytes; and conversations as data sets have them.
python3 -B - "$work" <<'PY'
import json
import sys

work = sys.argv[1]
with open(work + "/p.tsv", "w", encoding="utf-8") as f:
    f.write("prompt\tresponse\n# a remark\nwhat is <b>bold</b> & \"quoted\"?\ta <i>tag</i> & 'more'\n"
            "the caf\u00e9?\n\n1 + 1\t2\n")
with open(work + "/p.txt", "w", encoding="utf-8") as f:
    f.write("# no remark here\nsecond\tline\n")
with open(work + "/p.jsonl", "w", encoding="utf-8") as f:
    for line in (
        {"prompt": "one"},
        {"prompt": "two", "response": "three", "system": "be brief"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"},
                      {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
                      {"role": "assistant", "content": "d e f"}]},
        {"messages": [{"role": "user", "content": "open"}]},
    ):
        f.write(json.dumps(line) + "\n")
PY

# holds EXPRESSION: Python, of the kept JSON as r.
holds() {
    python3 -B -c 'import json, math, sys
r = json.load(open(sys.argv[1]))
rows, totals = r["rows"], r["totals"]
if not eval(sys.argv[2]):
    sys.exit("not so: " + sys.argv[2] + "\n" + json.dumps(r, indent=1)[:3000])' \
        "$work/out" "$1" >"$work/why" 2>&1 || {
        echo "FAIL $name: $(cat "$work/why")"
        failures=$((failures + 1))
    }
}

# ---- equal models ----

check "equal models" 0 "$nibble" eval ab -q -a "$a" -b "$a" --prompts "$work/p.tsv" -n 12 --json
lines err 0
holds 'len(rows) == 3 and r["same_vocabulary"]'
holds 'all(x["identical"] and x["f1"] == 1 and x["prefix"] == 1 and x["kl"] == 0 for x in rows)'
holds 'all(s["under_a"] == s["under_b"] for x in rows for s in x["scores"].values())'
holds '[x["expected"] for x in rows] == ["a <i>tag</i> & '"'more'"'", None, "2"]'
holds 'totals["identical"] == 3 and totals["kl"] == 0 and totals["f1"] == 1'
holds 'totals["expected"] == 2 and totals["prompts"] == 3'
holds 'rows[1]["scores"]["expected"]["under_a"] is None and rows[1]["a"]["match"] is None'
holds 'rows[0]["place"].endswith("p.tsv:3") and rows[2]["place"].endswith("p.tsv:6")'

check "their answers" 0 "$nibble" eval ab -q -a "$a" -b "$a" --prompts "$work/p.tsv" -n 12 --answers
says out "(the same)"
says out "3 of 3 answers identical"
check "answers of different ones" 0 sh -c '"$@" >"$0" && [ "$(wc -L <"$0")" -le 100 ] && cat "$0"' \
    "$work/answers" "$nibble" eval ab -q -a "$a" -b "$b" --prompts "$work/p.txt" -n 12 --answers
says out "# no remark here"
says out "  $a"
says out "second line"

# ---- different ones, against logits of another command ----

set -- -a "$a" -b "$b" -n 12
check "different models" 0 "$nibble" eval ab -q "$@" --prompts "$work/p.tsv" --json
holds 'not any(x["identical"] for x in rows) and totals["kl"] > 0.01 and totals["f1"] < 1'
holds 'all(x["scores"]["a"]["under_a"]["nll"] < x["scores"]["a"]["under_b"]["nll"] for x in rows)'
cp "$work/out" "$work/both.json"
check "one at a time" 0 "$nibble" eval ab -q "$@" --prompts "$work/p.tsv" --json --one-at-a-time
holds 'totals["kl"] is None'
cat >"$work/same.py" <<'PY'
import json
import sys

x, y = (json.load(open(path)) for path in sys.argv[1:])
for r in (x, y):
    for row in r["rows"] + [r["totals"]]:
        del row["kl"]
assert x == y, (x, y)
PY
cp "$work/out" "$work/turn.json"
check "the same but for KL" 0 python3 -B "$work/same.py" "$work/both.json" "$work/turn.json"

# compare.py WORK NIBBLE A B RESULT: scores and KL from logits of 'debug hf'; answers from
# 'generate'.
cat >"$work/compare.py" <<'PY'
import array
import json
import math
import struct
import subprocess
import sys

work, nibble, a, b, result = sys.argv[1:6]
models = {"a": a, "b": b}


def run(*args, text=None):
    return subprocess.run([nibble, *args], check=True, capture_output=True, input=text).stdout


def tokenize(model, text):
    if not text:
        return []
    with open(work + "/text", "wb") as f:
        f.write(text)
    return [int(i) for i in run("tokenize", "-m", model, "--file", work + "/text").split(b",")]


def logits(model, ids):
    raw = array.array("i", ids).tobytes()
    spot = {"dtype": "I32", "shape": [1, len(ids)], "data_offsets": [0, len(raw)]}
    labels = dict(spot, data_offsets=[len(raw), 2 * len(raw)])
    header = json.dumps({"input_ids": spot, "labels": labels}).encode()
    with open(work + "/in.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + raw + raw)
    run("debug", "hf", "-q", "-m", model, "--in", work + "/in.safetensors",
        "--out", work + "/out.safetensors")
    with open(work + "/out.safetensors", "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    t = json.loads(data[8 : 8 + size])["logits"]
    start, end = (8 + size + i for i in t["data_offsets"])
    x, V = array.array("f", data[start:end]), t["shape"][2]
    return [x[i : i + V] for i in range(0, len(x), V)]


def log_probs(row):
    top = max(row)
    total = math.log(math.fsum(math.exp(v - top) for v in row)) + top
    return [v - total for v in row]


def near(x, y):
    assert abs(x - y) <= 1e-6 * abs(y), (x, y)


with open(result, encoding="utf-8") as f:
    r = json.load(f)
for row in r["rows"]:
    request = {"messages": [{"role": "user", "content": row["prompt"]}],
               "add_generation_prompt": True}
    answers = {}
    for name, model in models.items():
        g = json.loads(run("generate", "-q", "-m", model, "-p", row["prompt"], "-n", "12",
                           "--temp", "0", "--json"))
        assert g["text"] == row[name]["text"] and len(g["ids"]) == row[name]["tokens"], (g, row)
        answers[name] = g
    for text in ("a", "b") + (("expected",) if row["expected"] else ()):
        p = {}
        for name, model in models.items():
            request["enable_thinking"] = text != "expected"
            prompt = run("render", "-q", "-m", model, text=json.dumps(request).encode())
            head = tokenize(model, prompt)
            end = "<|im_end|>" if len(tokenize(model, b"<|im_end|>")) == 1 else ""
            if text == "expected":
                tail = tokenize(model, (row["expected"] + end).encode())
            elif name == text or r["same_vocabulary"]:
                tail = answers[text]["ids"]
            else:
                end = end if answers[text]["finish_reason"] == "stop" else ""
                tail = tokenize(model, (answers[text]["text"] + end).encode())
            if not tail:
                assert row["scores"][text]["under_" + name] is None, row
                continue
            p[name] = [log_probs(x) for x in logits(model, head + tail)[len(head) - 1 : -1]]
            nll = -math.fsum(x[t] for x, t in zip(p[name], tail)) / len(tail)
            score = row["scores"][text]["under_" + name]
            assert score["tokens"] == len(tail), (score, tail)
            near(score["nll"], nll)
            near(score["ppl"], math.exp(nll))
        if text == "a" and r["same_vocabulary"]:
            kl = math.fsum(math.exp(u) * (u - v) for x, y in zip(p["a"], p["b"])
                           for u, v in zip(x, y)) / len(tail)
            assert abs(row["kl"] - kl) <= 1e-5 * kl, (row["kl"], kl)
for text in ("a", "b", "expected"):
    for under in ("under_a", "under_b"):
        scores = [row["scores"][text][under] for row in r["rows"] if row["scores"][text][under]]
        tokens = sum(s["tokens"] for s in scores)
        total = r["totals"]["scores"][text][under]
        assert total["tokens"] == tokens
        near(total["nll"], sum(s["nll"] * s["tokens"] for s in scores) / tokens)
PY
check "scores against logits" 0 python3 -B "$work/compare.py" "$work" "$nibble" "$a" "$b" \
    "$work/both.json"

mkdir "$work/m3"
cp "$b/config.json" "$b/model.safetensors" "$work/m3"
cp "$root/tests/golden/tokenizer/gpt2/tokenizer.json" "$work/m3"
check "another tokenizer" 0 "$nibble" eval ab -q -a "$a" -b "$work/m3" -n 12 \
    --prompts "$work/p.tsv" --json
holds 'not r["same_vocabulary"] and totals["kl"] is None'
cp "$work/out" "$work/other.json"
check "its scores against logits" 0 python3 -B "$work/compare.py" "$work" "$nibble" "$a" \
    "$work/m3" "$work/other.json"
check "another tokenizer, one at a time" 0 "$nibble" eval ab -q -a "$a" -b "$work/m3" -n 12 \
    --prompts "$work/p.tsv" --json --one-at-a-time
cp "$work/out" "$work/turn.json"
check "the same" 0 python3 -B "$work/same.py" "$work/other.json" "$work/turn.json"

# With the template that thinks, an expected answer follows an empty thought.
for seed in 4 5; do
    cp -r "$work/m$((seed - 3))" "$work/m$seed"
    cp "$root/tests/golden/chat/Qwen3-0.6B/tokenizer_config.json" "$work/m$seed"
done
check "thoughts" 0 "$nibble" eval ab -q -a "$work/m4" -b "$work/m5" -n 12 \
    --prompts "$work/p.tsv" --json
cp "$work/out" "$work/thinking.json"
check "thoughts against logits" 0 python3 -B "$work/compare.py" "$work" "$nibble" \
    "$work/m4" "$work/m5" "$work/thinking.json"

# ---- words ----

# With this prompt as expected answer of its own continuation the F1 is known: raw greedy answers.
check "an answer" 0 "$nibble" generate -q -m "$a" --raw -p "cats" -n 6 --temp 0 --json
python3 -B - "$work" <<'PY'
import json
import sys

text = json.load(open(sys.argv[1] + "/out"))["text"]
with open(sys.argv[1] + "/known.jsonl", "w", encoding="utf-8") as f:
    for expected in (text, "  " + text + "\n", "zzzz"):
        f.write(json.dumps({"prompt": "cats", "response": expected}) + "\n")
PY
check "known answers" 0 "$nibble" eval ab -q -a "$a" -b "$b" --raw -n 6 \
    --prompts "$work/known.jsonl" --json
holds '[x["a"]["match"] for x in rows] == [True, True, False]'
holds '[x["a"]["f1"] for x in rows] == [1, 1, 0] and totals["match_a"] == 2'
holds 'totals["match_b"] == 0 and abs(totals["expected_f1_a"] - 2 / 3) < 1e-12'

# ---- kinds of prompts ----

check "lines" 0 "$nibble" eval ab -q "$@" --prompts "$work/p.txt" --json --system "be brief"
holds '[x["prompt"] for x in rows] == ["# no remark here", "second\tline"]'
holds 'totals["expected"] == 0 and totals["scores"]["expected"]["under_a"] is None'
check "conversations" 0 "$nibble" eval ab -q "$@" --prompts "$work/p.jsonl" --json --no-think
holds '[x["prompt"] for x in rows] == ["one", "two", "c", "open"]'
holds '[x["expected"] for x in rows] == [None, "three", "d e f", None]'
check "sampled" 0 "$nibble" eval ab -q -a "$a" -b "$a" -n 12 --temp 1 --seed 5 \
    --prompts "$work/p.txt" --json
holds 'totals["identical"] == 2'

# ---- text and page ----

check "as text, and a page" 0 "$nibble" eval ab -q "$@" --prompts "$work/p.tsv" \
    -o "$work/report.html"
says out "0 of 3 answers identical"
says out "expected answers: A gives 0 of 2"
says out "KL(A || B) on A's answers"
lines out 12
cat >"$work/page.py" <<'PY'
import html.parser
import json
import sys
import xml.etree.ElementTree

page = open(sys.argv[1], encoding="utf-8").read()
xml.etree.ElementTree.fromstring(page.split("\n", 1)[1])


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


reader = Reader()
reader.feed(page)
reader.close()
assert not reader.open, reader.open
for tag in ("<b>", "<i>", "<script", "http:", "src="):
    assert tag not in page.replace("http://www.w3.org/1999/xhtml", ""), tag
for row in json.load(open(sys.argv[2]))["rows"]:
    assert row["prompt"] in reader.text and (row["expected"] or row["prompt"]) in reader.text
PY
check "the page" 0 python3 -B "$work/page.py" "$work/report.html" "$work/both.json"

# ---- errors ----

bad() { # NAME ENDING TEXT MESSAGE
    printf '%b' "$3" >"$work/bad.$2"
    check "$1" 1 "$nibble" eval ab -q -a "$a" -b "$b" --prompts "$work/bad.$2"
    says err "$4"
    lines err 1
    lines out 0
}
bad "no prompts" txt '\n\n' "bad.txt' has no prompts"
bad "not UTF-8" txt 'good\n\377\n' "bad.txt:2: the line is not well-formed UTF-8"
bad "a NUL" txt 'x\000y\n' "bad.txt:1: a NUL character"
bad "an empty answer" tsv 'a\tb\nc\t\n' "bad.tsv:2: the answer is empty"
bad "no JSON" jsonl '{"prompt": "a"}\n\n{"prompt": \n' "bad.jsonl:3: "
bad "no object" jsonl '[1]\n' "bad.jsonl:1: the line is an array and not an object"
bad "no prompt" jsonl '{"text": "a"}\n' "bad.jsonl:1: there is neither 'messages' nor 'prompt'"
bad "a number" jsonl '{"prompt": 7}\n' "bad.jsonl:1: 'prompt' must be a string"
bad "an unknown role" jsonl '{"messages": [{"role": "x", "content": "y"}]}\n' "message 1"
bad "no question" jsonl '{"messages": [{"role": "assistant", "content": "y"}]}\n' "no message of the"
bad "no messages" jsonl '{"messages": []}\n' "bad.jsonl:1: there is no message of the user"
bad "a NUL in JSON" jsonl '{"prompt": "a\\u0000b"}\n' "bad.jsonl:1: a NUL character"
python3 -B -c 'print("cats " * 400)' >"$work/long.txt"
check "a prompt too long" 1 "$nibble" eval ab -q "$@" --prompts "$work/long.txt"
says err "long.txt:1: the prompt has"
check "messages and --raw" 1 "$nibble" eval ab -q "$@" --raw --prompts "$work/p.jsonl"
says err "p.jsonl:2: 2 messages make no text"
check "no such prompts" 1 "$nibble" eval ab -q "$@" --prompts "$work/nowhere"
says err "nowhere"
check "no directory for the page" 1 "$nibble" eval ab -q "$@" --prompts "$work/p.txt" \
    -o "$work/nowhere/x.html"
says err "there is no directory"
check "no first model" 2 "$nibble" eval ab -b "$b" --prompts "$work/p.txt"
says err "-a MODEL is missing"
check "no prompts given" 2 "$nibble" eval ab -a "$a" -b "$b"
says err "--prompts FILE is missing"
check "-m" 2 "$nibble" eval ab "$@" -m "$a" --prompts "$work/p.txt"
says err "not -m"
check "an option of ppl" 2 "$nibble" eval ab "$@" --prompts "$work/p.txt" --stride 4
says err "--stride is not for 'ab'"
check "an option of ab" 2 "$nibble" eval ppl -m "$a" --text "$work/p.txt" --raw
says err "--raw is not for 'ppl'"
python3 -B -c 'for i in range(20000): print("prompt", i)' >"$work/many.txt"
check "interrupted" 130 timeout -s INT --preserve-status 2 "$nibble" eval ab -q "$@" \
    --prompts "$work/many.txt" -o "$work/late.html"
lines out 0
[ ! -e "$work/late.html" ] || {
    echo "FAIL $name: there is a page"
    failures=$((failures + 1))
}
finish
