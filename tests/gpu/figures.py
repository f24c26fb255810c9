"""figures.py - parts of run.py that measure: speed beside its ceiling, memory beside its plan."""
import json
import os
import shutil
import statistics
import time

import training as t
from card import ROOT, Failure, log_lines

# docs/SPEED.md, section 6: one H200, 4B shapes, tokens per second; the slower end of what was seen.
BASELINE = {"decode, 16 tokens": 1106, "decode, 4,096 tokens": 913, "8 sequences": 6085,
            "64 sequences": 25132, "a prompt of 4,096 tokens": 54047}
MIB = 1 << 20


# ---- inference ----

def inference(card):
    """Decoding and prompts against figures of before, or against another binary in the same run."""
    base = os.environ.get("BASELINE")
    cases = [("decode, 16 tokens", ("decode", "-n", card.pick(64, 2))),
             ("decode, 4,096 tokens", ("decode", "--depth", card.pick(4096, 20))),
             ("8 sequences", ("decode", "--parallel", card.pick(8, 2))),
             ("64 sequences", ("decode", "--parallel", card.pick(64, 3))),
             ("a prompt of 4,096 tokens", ("prefill", "-n", card.pick(4096, 70)))]
    for name, options in card.pick(cases, cases[:1] + cases[-1:]):
        def speed(program, options=options):
            values = [json.loads(card.run(
                program, "bench", *options, "-q", "--json", "--synthetic", card.pick("4b", "tiny"),
                "--device", card.device)) for _ in range(card.pick(3, 1))]
            return (statistics.median(v["tokens_per_s"] for v in values),
                    statistics.median(v["share"] for v in values))

        is_, share = speed(card.nibble)
        want = speed(base)[0] if base else BASELINE[name]
        card.judge(is_ >= 0.98 * want or card.small,
                   f"{name}: {is_:,.0f} tok/s, {share:.2f} of the ceiling; before "
                   f"{want:,.0f}{'' if base else ' (docs/SPEED.md)'}, {is_ / want:.3f} of that")


# ---- training ----

def bench_train(card, size, *options):
    """A measured training step."""
    return card.json("bench train", "-q", "--synthetic", card.pick(size, "tiny"), *options)


def train(card):
    """4B: 8 rows of 2,048 tokens, and one of 24."""
    four = ("--precision", "nvfp4", "--master-dtype", "bf16", "--optimizer-state-mode", "int8")
    r = bench_train(card, "4b", *four, "--batch-size", card.pick(8, 2), "--seq-len",
                    card.pick(2048, 32), "--steps", card.pick(5, 1))
    card.judge(r["tokens_per_s"] >= 15000 or card.small,
               f"4B, 8 x 2,048: {r['tokens_per_s']:,.0f} tok/s; at least 15,000; "
               f"{r['tflops']:.0f} of {r['peak_tflops']:.0f} TFLOP/s that cuBLASLt reaches in the "
               f"same run ({r['share']:.2f}); {r['step_ms']:.0f} ms a step")
    r = bench_train(card, "4b", *four, "--batch-size", 1, "--seq-len", 24, "--steps",
                    card.pick(20, 1))
    card.judge(r["step_ms"] <= 150 or card.small,
               f"4B, 1 x 24: {r['step_ms']:.0f} ms a step; at most 150")
    for name, options in (("4B, 8 x 2,048, fused step", four + ("--fused-step",)),
                          ("4B, 8 x 2,048, block recompute", four + ("--recompute", "block")),
                          ("4B, 8 x 2,048, copies of weights in bf16",
                           four + ("--weight-store", "bf16")),
                          ("4B, 8 x 2,048, f32 states", four[:4] + ("--optimizer-state-mode",
                                                                    "f32"))):
        def figure(options=options):
            r = bench_train(card, "4b", *options, "--batch-size", card.pick(8, 2), "--seq-len",
                            card.pick(2048, 32), "--steps", card.pick(3, 1))
            return f"{r['tokens_per_s']:,.0f} tok/s, {r['share']:.2f} of the ceiling"
        card.attempt(name, figure)


# ---- memory ----

def guarded(card, name, limit_gb, size, steps, *options):
    """Trains under guard. Returns the log's lines, the memory's course, and the result."""
    log = card.path(name + ".jsonl")
    args = [card.nibble, "guard", "--limit-gb", limit_gb, "--poll-secs", "0.2", "--", card.nibble,
            "train", "--json", "--synthetic", size, "--steps", steps, "--log", log, "--device",
            card.device, *options]
    out, series = card.watch(*args)
    lines = [x for x in log_lines(log) if "loss" in x]
    if len(lines) != steps:
        raise Failure(f"{len(lines)} steps, not {steps}")
    return lines, series, json.loads(out)


def course(card, name, lines, series, limit_mib, least_speed):
    """Judges memory and speed of a run. The first step began when memory reached its plateau."""
    peak = max(mib for _, mib in series)
    second = lines[1]["seconds"] if len(lines) > 1 else 0
    rest = [mib for at, mib in series if series[-1][0] - at < lines[-1]["seconds"] - second]
    moved = max(rest) - min(rest[:-10] or rest) if rest else 0
    speed = statistics.median(x["tokens_per_s"] for x in lines[len(lines) // 2:])
    card.judge(peak <= limit_mib, f"{name}: {peak} MiB at most; {limit_mib:.0f} allowed")
    card.judge(moved == 0, f"{name}: memory moves by {moved} MiB after the first step")
    card.judge(speed >= least_speed or card.small,
               f"{name}: {speed:,.0f} tok/s; at least {least_speed:,.0f}")


def fit16(card):
    """4B with one row of 2,048 tokens on a card sold as 16 GB."""
    size, row = card.pick(("4b", ("--seq-len", 2048, "--batch-size", 1)),
                          ("tiny", ("--seq-len", 32, "--batch-size", 1)))
    said = card.do("plan", "--synthetic", size, *row, "--fit", 16)
    card.info("plan --fit 16: " + said.strip().splitlines()[-1])
    lines, series, _ = guarded(card, "fit16", card.pick(15.5, 64), size, card.pick(500, 3), *row,
                               "--fit", 16)
    course(card, "4B, 1 x 2,048, --fit 16", lines, series, 15.5 * 1024, 6000)


def large(card):
    """8B in 31 GiB, 32B on the whole card, and a long row."""
    row = ("--seq-len", card.pick(2048, 32), "--batch-size", 1)
    long = ("--seq-len", card.pick(32768, 64), "--batch-size", 1, "--recompute", "block")
    for name, size, steps, options, limit in (
            ("8B, --fit 31.5", "8b", 20, row + ("--fit", "31.5"), 31),
            ("4B, 1 x 32,768, block recompute", "4b", 3, long, 139),
            ("32B, --fit 140", "32b", 20, row + ("--fit", "140"), 139.5)):
        def one(name=name, size=size, steps=steps, options=options, limit=limit):
            size, steps = card.pick((size, steps), ("tiny", 3))
            lines, series, result = guarded(card, "large", limit, size, steps, *options)
            peak, planned = max(mib for _, mib in series), result["plan"]["total"] / MIB
            if peak > limit * 1024:
                raise Failure(f"{peak} MiB")
            speed = statistics.median(x["tokens_per_s"] for x in lines)
            return f"{peak} MiB, planned {planned:.0f}; {speed:,.0f} tok/s"
        card.attempt(name, one)


SETTINGS = (
    ("0.6b", "--seq-len 512 --batch-size 4"),
    ("0.6b", "--seq-len 512 --batch-size 4 --precision f32 --optimizer-state-mode f32"),
    ("0.6b", "--seq-len 1024 --batch-size 2 --precision bf16 --optimizer-state-mode bf16"),
    ("0.6b", "--seq-len 512 --batch-size 4 --compute-dtype f32"),
    ("1.7b", "--seq-len 2048 --batch-size 2 --recompute block"),
    ("1.7b", "--seq-len 512 --batch-size 8 --fused-step --optimizer-state-mode nvfp4"),
    ("1.7b", "--seq-len 512 --batch-size 4 --grad-accum 2 --weight-store bf16"),
    ("4b", "--seq-len 2048 --batch-size 1 --fused-step --recompute block"),
    ("4b", "--seq-len 512 --batch-size 4 --train-last-layers 8"),
    ("4b", "--seq-len 2048 --batch-size 8"),
)


def plan(card):
    """What `plan` says against what the driver counts, 64 MiB or 1 %."""
    for size, text in card.pick(SETTINGS, SETTINGS[:2]):
        def one(size=size, text=text):
            size, options = card.pick((size, text.split()),
                                      ("tiny", "--seq-len 32 --batch-size 1".split()))
            planned = card.json("plan", "--synthetic", size, *options)["total"] / MIB
            _, series = card.watch(card.nibble, "train", "-q", "--synthetic", size, "--steps", 3,
                                   "--device", card.device, *options)
            seen = max(mib for _, mib in series)
            if abs(seen - planned) > max(64, planned / 100) and not card.small:
                raise Failure(f"planned {planned:.0f} MiB, seen {seen}")
            return f"planned {planned:.0f} MiB, seen {seen}"
        card.attempt(f"{size} {text}", one)


def limits(card):
    """With a 4B in NVFP4: the time to the first token, and memory of long contexts."""
    model, dat = card.path("4b"), card.path("4b.dat")
    if card.small:
        t.make_model(card.nibble, model, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    else:
        card.run(card.nibble, "synth", "-q", "4b", model)
        shutil.copy(f"{ROOT}/tests/golden/tokenizer/qwen/tokenizer.json", model)
    card.run(card.nibble, "quantize", "-q", model, dat)
    generate = (card.nibble, "generate", "-q", "-m", dat, "--model-dir", model, "--raw", "--temp",
                "0", "--ignore-eos", "--device", card.device)
    for i in (1, 2, 3):
        begin = time.monotonic()
        card.run(*generate, "-p", "hello", "-n", 1)
        card.info(f"first token, time {i}: {1000 * (time.monotonic() - begin):.0f} ms from the "
                  "start of the process to its end")
    _, series = card.watch(*generate, "-p", "hello", "-n", card.pick(2000, 4), "-c",
                           card.pick(4096, 64))
    card.info(f"4,096 tokens of context: {max(mib for _, mib in series)} MiB")
    config = os.path.join(model, "config.json")
    with open(config, encoding="utf-8") as f:
        settings = json.load(f)
    settings["max_position_embeddings"] = 65536
    with open(config, "w", encoding="ascii") as f:
        json.dump(settings, f)
    prompt = " ".join(map(str, range(1, 13001)))[:card.pick(64000, 40)]
    _, series = card.watch(*generate, "-c", card.pick(64064, 128), "--kv-dtype", "f8", "-n",
                           card.pick(64, 4), "-p", prompt)
    card.info(f"64,000 tokens of context, f8: {max(mib for _, mib in series)} MiB")
