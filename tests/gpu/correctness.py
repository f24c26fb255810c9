"""correctness.py - parts of run.py: operations, gradients and whole passes against references."""
import json
import os
import random
import struct
import sys

import compare
from card import ROOT, Failure, tail

sys.path.insert(0, os.path.join(ROOT, "tests", "cli"))
GOLDEN = os.path.join(ROOT, "tests", "golden")
TRAINING_OPERATIONS = (
    "attention, bf16", "attention_bwd, f32", "attention_bwd, bf16", "xent,", "xent_slice", "l1",
    "embed_bwd", "rmsnorm_bwd", "qkv_rope_bwd", "swiglu_bwd", "linear_bwd, f32",
    "linear_bwd, bf16", "linear, nvfp4, bf16", "grad_stats", "update_plan", "requantize",
    "adamw, f32 moments", "adamw, bf16 moments", "adamw, int8 moments", "adamw, nvfp4 moments")


# ---- operations ----

def check_kernels(card, *options):
    """Runs doctor --kernels; returns the checks, and prints a line for each that failed."""
    report = card.json("doctor --kernels", *options, codes=(0, 1))
    for k in report["kernels"]:
        if not k["passed"]:
            card.judge(False, f"{k['operation']}, {k['variant']} ({k['shapes']}): {k['result']}: "
                              f"{k['problem'] or '%g of %g' % (k['error'] or -1, k['bound'])}")
    return report


def kernels(card):
    """All operations, small and odd shapes."""
    report = check_kernels(card, *card.pick((), ("--only", "rmsnorm")))
    names = {k["operation"] for k in report["kernels"]}
    near = max((k for k in report["kernels"] if k["bound"]), key=lambda k: k["error"] / k["bound"])
    card.judge(report["failed"] == 0 and report["seconds"] < card.pick(60, 600),
               f"{len(report['kernels'])} checks of {len(names)} operations in "
               f"{report['seconds']:.1f} s; nearest to its bound: {near['operation']}, "
               f"{near['variant']}, {near['error']:.3g} of {near['bound']:.3g}")


def bits(card):
    """The operations whose bits are defined."""
    elements = card.pick(1 << 20, 4000)
    for only in ("embed_bwd", "grad_stats", "amax", "requantize", "adamw, f32 moments",
                 "adamw, bf16 moments", "adamw, int8 moments", "adamw, nvfp4 moments"):
        report = check_kernels(card, "--only", only, "--elements", elements)
        card.judge(report["failed"] == 0, f"{only}: {len(report['kernels'])} checks, about "
                                          f"{elements} elements, equal bits")


def ops(card):
    """The unit tests, from one program or from many."""
    program = os.path.join(card.build, "tests", "gpu_tests")
    if os.path.exists(program):
        names = card.run(program).split()
    else:
        folder = os.path.join(card.build, "tests")
        names = [n for n in ("test_ops", "test_attention", "test_layers", "test_backward",
                             "test_loss", "test_optimizer") if os.path.exists(f"{folder}/{n}")]
    if not names:
        raise Failure("the build has no tests")
    for name in card.pick(names, names[:1]):
        def one(name=name):
            args = [program, "--test=" + name] if os.path.exists(program) else \
                [os.path.join(card.build, "tests", name)]
            out = card.run(*args, "--gpu", codes=(0, 77), limit=240)
            if card.code == 77:
                raise Failure("it skipped itself: " + tail(out, 1))
            return ""
        card.attempt(name, one)


# ---- Hugging Face ----

def write_ids(path, rows, tokens, vocab, seed=1):
    """Random ids, labels for four fifths of them."""
    rng, blob, header = random.Random(seed), b"", {}
    ids = [rng.randrange(2, vocab) for _ in range(rows * tokens)]
    labels = [-100 if rng.random() < 0.2 else i for i in ids]
    for name, values in (("input_ids", ids), ("labels", labels)):
        raw = struct.pack(f"<{len(values)}i", *values)
        header[name] = {"dtype": "I32", "shape": [rows, tokens],
                        "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + blob)
    return path


def compare_files(want, got, limits):
    """The worst tensor of each kind; beyond its limit is a failure."""
    a, b, said = compare.read(want), compare.read(got), []
    for kind, limit in limits:
        cosine = limit < 0
        value, name = compare.worst_of(a, b, kind, compare.cosine if cosine else compare.error,
                                       cosine)
        said.append(f"{kind}* {'cosine' if cosine else 'error'} {value:.6g}")
        if value < -limit if cosine else not value <= limit:
            raise Failure(f"{name}: {said[-1]}, {abs(limit)} allowed")
    return ", ".join(said)


F32_LIMITS = (("logits", 1e-5), ("grad.", 1e-4), ("adamw3.", 2e-4))


def against_golden(card, model, golden):
    """debug hf of the inputs of a golden file."""
    card.do("debug hf", "-q", "-m", model, "--in", golden, "--precision", "f32", "--out",
            card.path("hf.safetensors"))
    return compare_files(golden, card.path("hf.safetensors"), F32_LIMITS)


def hf(card):
    """The goldens of the repository."""
    for name in ("tied", "untied"):
        card.attempt(name, against_golden, card, f"{GOLDEN}/hf/{name}",
                     f"{GOLDEN}/hf/{name}.golden.safetensors")


def hf_shapes(card):
    """Goldens that transformers makes here, of larger and odd shapes."""
    out = card.path("made")
    os.makedirs(out, exist_ok=True)
    said = card.run(sys.executable, "-B", os.path.join(ROOT, "tests", "gpu", "hf_reference.py"),
                    out)
    names = [n[:-len(".golden.safetensors")] for n in sorted(os.listdir(out))
             if n.endswith(".golden.safetensors")]
    card.judge(len(names) >= 4, f"transformers made {len(names)} references: {tail(said, 1)}")
    for name in names:
        card.attempt(name, against_golden, card, f"{out}/{name}",
                     f"{out}/{name}.golden.safetensors")


# ---- gradients ----

def gradients_of(card, model, ids, name, device, *options):
    """debug hf to a file."""
    path = card.path(name + ".safetensors")
    card.do("debug hf", "-q", *model, "--in", ids, "--out", path, *options, device=device)
    return path


def cut(card, **changes):
    """Two layers of 4B with a small vocabulary, as random weights."""
    sizes = card.pick(dict(hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
                           num_key_value_heads=8, vocab_size=4096), {})
    config = card.config("cut", **dict(sizes, **changes))
    card.run(card.nibble, "synth", "-q", "--sigma", "0.02", "--config", config, card.path("cut"))
    return ("-m", card.path("cut")), card.pick(4096, 672)


def compare_gradients(card, name, model, ids):
    """Of a pass in bf16, and in f32, on the device against f32 on the CPU."""
    want = gradients_of(card, model, ids, "cpu", "cpu")
    f32 = gradients_of(card, model, ids, "f32", card.device)
    card.attempt(f"{name}, f32", compare_files, want, f32, (("logits", 1e-5), ("grad.", 1e-4)))
    bf16 = gradients_of(card, model, ids, "bf16", card.device, "--compute-dtype", "bf16")
    card.attempt(f"{name}, bf16", compare_files, want, bf16, (("grad.", -0.999),))


def gradients(card):
    """A trained model, and two layers of 4B."""
    if not card.small:
        nib = os.path.join(ROOT, "models", "nib")
        with open(f"{nib}/config.json", encoding="utf-8") as f:
            vocab = json.load(f)["vocab_size"]
        ids = write_ids(card.path("ids.safetensors"), 2, 128, vocab)
        compare_gradients(card, "nib", ("-m", f"{nib}/model.dat", "--model-dir", nib), ids)
    model, vocab = cut(card)
    ids = write_ids(card.path("ids.safetensors"), *card.pick((2, 300), (1, 9)), vocab)
    compare_gradients(card, "two layers of 4B", model, ids)


def long_row(card):
    """One row of 32,768 tokens, in bf16 against the CPU's f32; a small vocabulary for the logits."""
    model, vocab = cut(card, vocab_size=672, num_hidden_layers=2)
    vocab = min(vocab, 672)
    ids = write_ids(card.path("ids.safetensors"), 1, card.pick(32768, 70), vocab)
    bf16 = gradients_of(card, model, ids, "bf16", card.device, "--compute-dtype", "bf16")
    want = gradients_of(card, model, ids, "cpu", "cpu")
    card.attempt("two layers, bf16", compare_files, want, bf16, (("grad.", -0.999),))


# ---- the command line ----

def shape_of(card, name, hidden, ffn, heads, kv_heads, layers):
    """A random model in NVFP4."""
    config = card.config(name, hidden_size=hidden, intermediate_size=ffn, head_dim=128,
                         num_attention_heads=heads, num_key_value_heads=kv_heads,
                         num_hidden_layers=layers, max_position_embeddings=2048)
    card.run(card.nibble, "synth", "-q", "--sigma", "0.05", "--config", config, card.path(name))
    with open(f"{GOLDEN}/tokenizer/qwen/tokenizer.json", "rb") as f, \
            open(card.path(name, "tokenizer.json"), "wb") as g:
        g.write(f.read())
    card.run(card.nibble, "quantize", "-q", card.path(name), card.path(name + ".dat"))
    return ("-m", card.path(name + ".dat"), "--model-dir", card.path(name))


SHAPES = (("a", 256, 544, 8, 2, 3), ("b", 336, 1040, 4, 2, 3), ("c", 512, 544, 8, 8, 3),
          ("d", 1024, 3072, 16, 2, 3), ("e", 2560, 9728, 32, 8, 2))


def checks(card):
    """Scripts of tests/cli, every path against another, sessions of every kind."""
    def script(name):
        out = card.run("sh", f"{ROOT}/tests/cli/{name}", card.nibble, codes=(0, 77))
        if card.code == 77:
            raise Failure("it skipped itself: " + tail(out, 1))

    for name in card.pick(("cuda.sh", "debug_hf.sh"), ()):
        card.attempt(name, script, name)
    with open(card.path("text"), "w", encoding="ascii") as f:
        f.write("\n".join(map(str, range(1, card.pick(701, 5)))))
    for shape in card.pick(SHAPES, ()):
        card.attempt(f"parity of shape {shape[1:]}", lambda s=shape: card.do(
            "parity", "-q", *shape_of(card, *s), "--text", card.path("text")) and "")
    card.attempt("50 runs and changes of mode", lambda: card.do(
        "stress kv", "-q", *shape_of(card, *SHAPES[0]), "--iterations", card.pick(50, 1)) and "")


# ---- compute-sanitizer ----

def sanitizer(card, tool, *command, limit=150):
    """Runs a command under a tool; an error that it finds is a failure."""
    card.run(card.tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", "9", *command,
             limit=limit)
    return ""


def sanitize(card):
    """Prompts of one row, of up to 64 (decode kernels) and of more; tokens drawn; sequences."""
    card.tool("compute-sanitizer")
    model = shape_of(card, *SHAPES[0])
    generate = (card.nibble, "generate", "-q", *model, "--raw", "-n", "4", "--device", card.device)
    prompts = {n: " ".join(map(str, range(1, n + 1))) for n in (1, 16, 80)}
    for tool in ("memcheck", "initcheck", "racecheck"):
        for n, prompt in prompts.items():
            card.attempt(f"{tool}, a prompt of {n} numbers", sanitizer, card, tool, *generate,
                         "-p", prompt, "--temp", "0")
        card.attempt(f"{tool}, tokens that are drawn", sanitizer, card, tool, *generate, "-p",
                     "hello", "--temp", "1", "--top-k", "20")
        for only in ("linear, nvfp4, fast", "attention, kv f16, fast", "batch, kv f16"):
            if tool == "racecheck" and only.startswith("batch"):
                continue # racecheck has never ended when such kernels run in a graph
            card.attempt(f"{tool}, {only}", sanitizer, card, tool, card.nibble, "doctor",
                         "--kernels", "--only", only, "--device", card.device)


def sanitize_train(card):
    """Whole steps: forward, backward, update."""
    card.tool("compute-sanitizer")
    config = card.config("step", head_dim=64, num_attention_heads=4)
    for tool in ("memcheck", "initcheck"):
        for options in (("--optimizer-state-mode", "int8"),
                        ("--optimizer-state-mode", "nvfp4", "--recompute", "block", "--fused-step"),
                        ("--precision", "f32"),
                        ("--precision", "bf16", "--optimizer-state-mode", "bf16")):
            card.attempt(f"{tool}, {' '.join(options)}", sanitizer, card, tool, card.nibble,
                         "train", "-q", "--config", config, "--steps", "1", "--seq-len", "48",
                         "--batch-size", "2", "--device", card.device, *options)


def racecheck(card):
    """Each training operation alone."""
    card.tool("compute-sanitizer")
    for only in TRAINING_OPERATIONS:
        card.attempt(only, sanitizer, card, "racecheck", card.nibble, "doctor", "--kernels",
                     "--only", only, "--device", card.device)
