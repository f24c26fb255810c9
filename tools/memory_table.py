#!/usr/bin/env -S python3 -B
"""Prints the table of docs/MEMORY.md: the fastest settings of each model on each card.

usage: memory_table.py NIBBLE"""
import json
import subprocess
import sys

SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
CARDS = (16, 24, 32, 80, 141)
OPTIONS = ("--device", "cuda", "--seq-len", "2048", "--batch-size", "8")


def words(fit):
    """The settings, without those that most have."""
    parts = ["block"] if fit["recompute"] == "block" else []
    parts.append(fit["optimizer_state_mode"])
    if fit["master_dtype"] == "f32":
        parts.append("f32 masters")
    parts.append(fit["weight_store"])
    if fit["grad_dtype"] == "bf16":
        parts.append("bf16 gradients")
    parts += ["fused"] if fit["fused_step"] else []
    parts += ["slices"] if fit["head_slices"] else []
    rows = f"{fit['batch_size']} x {fit['grad_accum']}"
    return f"{rows}: {', '.join(parts)}; **{fit['total'] / 2**30:.1f}**"


def cell(nibble, size, card):
    """What the plan says of a model on a card."""
    p = subprocess.run([nibble, "plan", "-q", "--synthetic", size, *OPTIONS, "--fit", str(card),
                        "--json"], capture_output=True, check=False)
    plan = json.loads(p.stdout)
    if plan["fits"]:
        return words(plan["fits"][0])
    return f"smallest {plan['smallest']['total'] / 2**30:.1f}"


print("| |", " | ".join(f"{c} GB" for c in CARDS), "|")
print("|---" * (len(CARDS) + 1) + "|")
for name in SIZES:
    print(f"| {name} |", " | ".join(cell(sys.argv[1], name, c) for c in CARDS), "|")
