#!/usr/bin/env -S python3 -B
"""Training at scale: what the parts scale-* of bench/gpu.sh learn from, and what came of them.

    scale.py prepare NIBBLE CORPORA OUT     texts, a vocabulary of 16 k and a shape of 125 M
    scale.py report FOLDER                  a table and curves (FOLDER/scale.svg) of the logs there

OUT is carried to the machine with the card, as `scale` in the folder of the build.
"""
import glob
import json
import lzma
import os
import re
import statistics
import subprocess
import sys
import zlib

END = "<|endoftext|>"
HOLD_OUT = 100  # one document in so many
VOCAB = 16384
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": VOCAB - 26,
    "eos_token_id": VOCAB - 24, "head_dim": 64, "hidden_act": "silu", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 2304, "max_position_embeddings": 2048,
    "model_type": "qwen3", "num_attention_heads": 12, "num_hidden_layers": 16,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": VOCAB}


# ---- texts ----

def strings(value):
    """All texts of a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from strings(v)
    elif isinstance(value, list):
        for v in value:
            yield from strings(v)


def documents(path):
    """The texts of a file; small ones of one file are joined."""
    with open(path, encoding="utf-8", errors="replace") as f:
        text = f.read()
    if path.endswith(".jsonl"):
        for line in text.splitlines():
            if line.strip():
                yield "\n".join(s for s in strings(json.loads(line)) if len(s) > 1)
    elif path.endswith(".tsv"):
        for line in text.splitlines()[1:]:
            yield "\n".join(line.split("\t")[:2])
    elif path.endswith(".yml"):
        for block in text.split("- - ")[1:]:
            yield re.sub(r"^\s*- ", "", block, flags=re.M)
    elif END in text:
        yield from text.split(END)
    else:
        for i in range(0, len(text), 4000):
            yield text[i:i + 4000]


def prepare(nibble, corpora, out):
    """Writes train.jsonl.xz, held.jsonl.xz, tokenizer.json and config.json."""
    os.makedirs(out, exist_ok=True)
    parts, seen = {"train": [], "held": []}, set()
    for path in sorted(glob.glob(f"{corpora}/*/**", recursive=True)):
        if not os.path.isfile(path) or "LICENSES" in path or "predecessor" in path or (
                path.endswith(".md")):
            continue
        for text in documents(path):
            text = text.strip()
            key = zlib.crc32(text.encode())
            if len(text) < 20 or key in seen:
                continue
            seen.add(key)
            parts["held" if key % HOLD_OUT == 0 else "train"].append(text)
    for name, texts in parts.items():
        plain = "".join(json.dumps({"text": x}, ensure_ascii=False) + "\n" for x in texts).encode()
        with open(f"{out}/{name}.jsonl", "wb") as f:
            f.write(plain)
        with lzma.open(f"{out}/{name}.jsonl.xz", "wb", preset=6) as f:
            f.write(plain)
        print(f"{name}: {len(texts)} documents, {len(plain)} bytes, "
              f"{os.path.getsize(f'{out}/{name}.jsonl.xz')} packed")
    subprocess.run([nibble, "tokenizer", "train", "-q", "--vocab", str(VOCAB), "-o",
                    f"{out}/tokenizer.json", f"{out}/train.jsonl"], check=True)
    with open(f"{out}/config.json", "w", encoding="ascii") as f:
        json.dump(SHAPE, f, indent=1)
    for name in parts:
        os.remove(f"{out}/{name}.jsonl")


# ---- what came of it ----

def read_log(path):
    """Losses by step, and held-out losses by step."""
    with open(path, encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    return ([(x["step"], x["loss"]) for x in lines if "loss" in x],
            [(x["step"], x["eval"]["loss"]) for x in lines if "eval" in x])


def spread(values):
    """The mean, and half the distance from the smallest to the largest."""
    return f"{statistics.mean(values):.4f} +- {(max(values) - min(values)) / 2:.4f}"


def smooth(points, count=200):
    """At most so many means of neighbouring points."""
    size = max(1, len(points) // count)
    groups = [points[i:i + size] for i in range(0, len(points), size)]
    return [(statistics.mean(p[0] for p in g), statistics.mean(p[1] for p in g)) for g in groups]


def write_curves(path, runs):
    """An SVG with a line for each run, a colour for each setting."""
    colours = ["#000000", "#1f77b4", "#d62728", "#2ca02c", "#9467bd"]
    curves = {name: smooth(losses) for name, (losses, _) in runs.items()}
    steps = max(x for points in curves.values() for x, _ in points)
    top = max(y for points in curves.values() for x, y in points if x > steps / 50)
    low = min(y for points in curves.values() for _, y in points)
    settings = sorted({name.rsplit("-", 1)[0] for name in runs})
    with open(path, "w", encoding="ascii") as f:
        f.write('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 420" '
                'font-family="sans-serif" font-size="12">\n')
        for name, points in curves.items():
            colour = colours[settings.index(name.rsplit("-", 1)[0]) % len(colours)]
            at = " ".join(f"{50 + 730 * x / steps:.1f},"
                          f"{390 - 370 * (min(y, top) - low) / (top - low):.1f}"
                          for x, y in points)
            f.write(f'<polyline fill="none" stroke="{colour}" points="{at}"/>\n')
        for i, name in enumerate(settings):
            f.write(f'<text x="600" y="{40 + 16 * i}" fill="{colours[i % len(colours)]}">{name}'
                    '</text>\n')
        f.write(f'<text x="4" y="30">{top:.2f}</text><text x="4" y="394">{low:.2f}</text>'
                f'<text x="740" y="410">step {steps:.0f}</text>\n</svg>\n')


def report(folder):
    """Prints the table, writes the curves."""
    runs = {os.path.basename(p)[len("scale-"):-len(".jsonl")]: read_log(p)
            for p in sorted(glob.glob(f"{folder}/scale-*.jsonl"))}
    if not runs:
        sys.exit(f"scale.py: there is no {folder}/scale-*.jsonl")
    by_setting = {}
    for name, (losses, evals) in runs.items():
        last = losses[-max(1, len(losses) // 20):]
        by_setting.setdefault(name.rsplit("-", 1)[0], []).append(
            (statistics.mean(y for _, y in last), min(y for _, y in evals)))
    print("| setting | seeds | training loss, last 5 % | best held-out loss |\n|---|---|---|---|")
    for setting, values in by_setting.items():
        print(f"| {setting} | {len(values)} | {spread([a for a, _ in values])} | "
              f"{spread([b for _, b in values])} |")
    write_curves(f"{folder}/scale.svg", runs)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "prepare":
        prepare(*sys.argv[2:])
    elif len(sys.argv) == 3 and sys.argv[1] == "report":
        report(sys.argv[2])
    else:
        sys.exit(__doc__)
