"""learning.py - the parts scale-SETTING-SEED of run.py: a model of 125 M parameters from random
weights on texts that bench/scale.py has prepared, two epochs."""
import json
import lzma
import os
import shutil

from card import Failure, log_lines

SETTINGS = {
    "bf16-f32": ("--precision", "bf16", "--optimizer-state-mode", "f32"),
    "nvfp4-f32": ("--precision", "nvfp4", "--optimizer-state-mode", "f32"),
    "nvfp4-int8": ("--precision", "nvfp4", "--optimizer-state-mode", "int8"),
    "nvfp4-nvfp4": ("--precision", "nvfp4", "--optimizer-state-mode", "nvfp4"),
}
SEEDS = (1, 2, 3)


def data(card):
    """Unpacks what was carried in the folder `scale` of the build, or in NB_SCALE."""
    carried = os.environ.get("NB_SCALE", os.path.join(card.build, "scale"))
    if not os.path.exists(carried + "/train.jsonl.xz"):
        raise Failure(f"there is no {carried}/train.jsonl.xz: bench/scale.py prepare makes it")
    model = card.path("scale")
    os.makedirs(model, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{carried}/{name}", model)
    for name in ("train.jsonl", "held.jsonl"):
        with lzma.open(f"{carried}/{name}.xz") as f, open(f"{model}/{name}", "wb") as g:
            if card.small:
                g.writelines(f.readline() for _ in range(20))
            else:
                shutil.copyfileobj(f, g)
    if card.small:
        with open(f"{model}/config.json", encoding="ascii") as f:
            config = json.load(f)
        with open(f"{model}/config.json", "w", encoding="ascii") as f:
            json.dump(dict(config, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                           num_attention_heads=1, num_key_value_heads=1), f)
    return model


def scale(card, setting, seed):
    """One run. Its log goes to $OUT, for the table and the curves of bench/scale.py report."""
    model, log = data(card), card.path("scale.jsonl")
    sizes = card.pick(("--epochs", 2, "--seq-len", 512, "--batch-size", 32, "--eval-every", 250),
                      ("--steps", 3, "--seq-len", 32, "--batch-size", 2, "--eval-every", 2))
    card.do("train", "-q", "-m", model, "--from-scratch", "-d", model + "/train.jsonl",
            "--eval-data", model + "/held.jsonl", *sizes, "--lr", "1e-3", "--warmup", 100,
            "--schedule", "cosine", "--weight-decay", "0.1", "--seed", seed, "--log", log,
            *SETTINGS[setting])
    lines = log_lines(log)
    losses = [x["loss"] for x in lines if "loss" in x]
    evals = [x["eval"]["loss"] for x in lines if "eval" in x]
    last = losses[-max(1, len(losses) // 20):]
    speed = [x["tokens_per_s"] for x in lines if "tokens_per_s" in x][-1]
    result = {"setting": setting, "seed": seed, "commit": card.commit, "steps": len(losses),
              "train_loss": sum(last) / len(last), "held_out_loss": min(evals),
              "tokens_per_s": speed}
    card.judge(losses[-1] < losses[0] or card.small, json.dumps(result))
    if card.out:
        shutil.copy(log, f"{card.out}/scale-{setting}-{seed}.jsonl")
