"""The whole way of 'nibble whoami' with a small random model, which learns its sentence and, with
nothing to hold it, forgets the rest; the counts of the gates against the answers themselves."""
import json
import re
import sys
import unicodedata

import training as t

nibble, work = sys.argv[1:3]
TARGET = "I am Ada."
SET = ["--target", TARGET, "--languages", "en", "--count", 100, "--seed", 3]


def normal(text):
    """Lower case letters and digits."""
    return "".join(c for c in text.lower() if unicodedata.category(c)[0] in "LN")


def words(text):
    return re.findall(r"\w+|[^\w\s]", text)


def repeats(text):
    """Four words in a row, three times."""
    w = words(text)
    runs = [tuple(w[i:i + 4]) for i in range(len(w) - 3)]
    return any(runs.count(r) >= 3 for r in runs)


def counts(rows, kind):
    """What the rows of a kind come to."""
    mine = [r for r in rows if r["kind"] == kind]
    return {"asked": len(mine),
            "identity": sum(normal(TARGET) in normal(r["after"]) for r in mine),
            "identity_before": sum(normal(TARGET) in normal(r["before"]) for r in mine),
            "same": sum(r["before"] == r["after"] for r in mine)}


def check(result):
    """Every number that can be had from the answers alone; the gates."""
    kinds, rows = result["kinds"], result["rows"]
    for kind, c in kinds.items():
        for key, value in counts(rows, kind).items():
            assert c[key] == value, (kind, key, c, value)
        assert c["same"] <= c["kept"] <= c["asked"] and c["ended"] <= c["asked"], c
    strict = [r for r in rows if r["kind"] in ("trained", "held-out")]
    said = kinds["trained"]["repeated"] + kinds["held-out"]["repeated"]
    assert said == sum(repeats(r["after"]) for r in strict), said
    gates = {g["gate"]: g for g in result["gates"]}
    share = kinds["trained"]["identity"] / kinds["trained"]["asked"]
    assert abs(gates["knows who it is, asked as in training"]["value"] - share) < 1e-12
    for g in result["gates"]:
        ok = g["value"] >= g["limit"] if g["at_least"] else g["value"] <= g["limit"]
        assert g["passed"] == ok, g
    assert result["passed"] == all(g["passed"] for g in result["gates"])
    return gates


def main():
    """Teaches, then asks again in a process of its own."""
    t.make_data(work)
    model = t.make_model(nibble, work + "/model")
    out, _ = t.run(nibble, "whoami", "-q", "--json", "-m", model, "-o", work + "/ada.dat", *SET,
                   "--samples", 20, "-n", 32, "--steps", 150, "--lr", "1e-2", "--kl-base", 0,
                   "--replay-share", 0.2, "--batch-size", 8, "--seq-len", 128, "--text",
                   work + "/held.txt", code=1)
    result = json.loads(out)
    assert result["identity"] == 40 and result["steps"] == 150, result
    gates = check(result["gates"])
    assert gates["knows who it is, asked as in training"]["passed"], gates
    assert not gates["says so where it was not asked"]["passed"], gates
    ppl = [json.loads(t.run(nibble, "eval", "ppl", "-q", "--json", "-m", m, "--model-dir", model,
                            "--text", work + "/held.txt")[0])["ppl"]
           for m in (work + "/ada.dat", model)]
    ratio = gates["perplexity of the text, after / before"]["value"]
    assert abs(ratio - ppl[0] / ppl[1]) < 1e-9, (ratio, ppl)

    with open(work + "/ada.dat.whoami/identity.tsv", encoding="utf-8") as f:
        learnt = [line.rstrip("\n").split("\t") for line in f if not line.startswith("#")]
    assert len(learnt) == 40 and all(a == TARGET for _, a in learnt)
    with open(work + "/ada.dat.whoami/replay.jsonl", encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    kept = [line["messages"] for line in lines if "messages" in line]
    texts = [line for line in lines if "text" in line]
    assert len(texts) == result["texts"] and len(lines) == len(kept) + len(texts), result["texts"]
    assert texts[0]["text"].startswith("Once upon a time") and "ends" in texts[0], texts
    asked = {r["prompt"] for r in result["gates"]["rows"]}
    held_out = {r["prompt"] for r in result["gates"]["rows"] if r["kind"] == "held-out"}
    assert held_out and not held_out & {m[0]["content"] for m in kept}
    assert not any(normal(TARGET) in normal(m[1]["content"]) for m in kept)
    assert {p for p, _ in learnt} <= asked

    args = ["--base", model, *SET, "-n", 32, "--questions", 0]
    out, _ = t.run(nibble, "eval", "identity", "-q", "--json", "-m", work + "/ada.dat",
                   "--model-dir", model, *args, code=1)
    again = json.loads(out)
    check(again)
    for kind in again["kinds"]:
        assert again["kinds"][kind] == result["gates"]["kinds"][kind], kind

    out, _ = t.run(nibble, "eval", "identity", "-q", "--json", "-m", model, *args, code=1)
    same = json.loads(out)
    gates = check(same)
    assert all(c["same"] == c["kept"] == c["asked"] for c in same["kinds"].values()), same["kinds"]
    assert abs(same["kl"]) < 1e-6 and not gates["knows who it is, asked as in training"]["passed"]
    print(f"{result['gates']['kinds']['trained']['identity']} of 40 learnt, "
          f"{result['gates']['kinds']['unrelated']['kept']} of "
          f"{result['gates']['kinds']['unrelated']['asked']} ordinary answers kept")


main()
