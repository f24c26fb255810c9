"""train.py - what training computes: settings that must not change it, overfitting, the result.

usage: train.py NIBBLE WORK PART [all]
"""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import training as t

nibble, work, part = sys.argv[1:4]
full = sys.argv[4:] == ["all"]
slow = t.sanitized(nibble)


def options(**changes):
    """Options of a short run. Keys have _ for -; None leaves an option out, True is a flag."""
    o = {"model": work + "/model", "data": work + "/a.txt", "steps": 6, "seq_len": 24,
         "batch_size": 2, "lr": "2e-3", "warmup": 2, "weight_decay": "0.1", "precision": "f32",
         "master_dtype": "f32", "optimizer_state_mode": "f32", "threads": 1, **changes}
    args = []
    for name, value in o.items():
        if value is not None:
            args += ["--" + name.replace("_", "-")] + ([] if value is True else [value])
    return args


def trained(name, **changes):
    """Runs and returns the path of the weights, the log and the result."""
    out, lines = f"{work}/{name}.dat", f"{work}/{name}.jsonl"
    r = t.train(nibble, *options(out=out, log=lines, **changes))
    return t.read(out), t.log(lines), r


def same(what, a, b):
    """Compares weights and all numbers of the log."""
    assert a[1] == b[1], (what, [(x, y) for x, y in zip(a[1], b[1]) if x != y][:2])
    assert a[0] == b[0], f"{what}: the weights differ"


def distance(a, b):
    """The largest relative distance between tensors of two directories, in the Frobenius norm."""
    x, y = (t.tensors(f"{work}/{n}/model.safetensors") for n in (a, b))
    assert x.keys() == y.keys()
    worst = 0
    for name in x:
        u, v = t.floats(x[name]), t.floats(y[name])
        worst = max(worst, math.sqrt(math.fsum((i - j) ** 2 for i, j in zip(u, v)) /
                                     math.fsum(i * i for i in u)))
    return worst


# ---- settings that must not change the result ----

KINDS = [("f32", "f32", "f32", "f32"), ("bf16", "bf16", "int8", "f32"),
         ("nvfp4", "bf16", "nvfp4", "bf16"), ("nvfp4", "f32", "bf16", "f32")]


def equal():
    """Recomputing, fused steps and chunks of rows give the same bits."""
    for precision, master, state, compute in KINDS:
        kind = {"precision": precision, "master_dtype": master, "optimizer_state_mode": state,
                "compute_dtype": compute}
        plain = trained("plain", grad_accum=2, **kind)
        same(f"recompute, {kind}", plain,
             trained("other", grad_accum=2, recompute="block", **kind))
        for rows in (1, 7, 64, 100000):
            same(f"chunks of {rows}, {kind}", plain,
                 trained("other", grad_accum=2, step_chunk_rows=rows, **kind))
        for store in ("bf16", "scales"):
            same(f"weights as {store}, {kind}", plain,
                 trained("other", grad_accum=2, weight_store=store, **kind))
        by_layer = trained("layers", clip_by_layer=True, **kind)
        assert by_layer[0] != plain[0]
        same(f"fused, {kind}", by_layer, trained("other", fused_step=True, **kind))
        same(f"fused, recompute, {kind}", by_layer,
             trained("other", fused_step=True, clip_by_layer=True, recompute="block",
                     step_chunk_rows=9, **kind))
        for layers in (1, 2):
            some = trained("layers", clip_by_layer=True, train_last_layers=layers, **kind)
            same(f"fused, last {layers}, {kind}", some,
                 trained("other", fused_step=True, train_last_layers=layers, **kind))
        assert some[0] == by_layer[0], "the last two of two layers are all"


SLICED = [{"precision": "nvfp4", "master_dtype": "bf16", "optimizer_state_mode": "int8",
           "step_chunk_rows": 100},
          {"precision": "nvfp4", "master_dtype": "bf16", "optimizer_state_mode": "bf16",
           "compute_dtype": "bf16", "grad_dtype": "bf16", "weight_store": "scales",
           "recompute": "block"},
          {"precision": "bf16", "master_dtype": "f32", "optimizer_state_mode": "f32",
           "kl_base": 2, "data": "c.jsonl"}]


def same_but_norms(what, a, b):
    """The same, but for the order in which the squares of the gradient's norm are added."""
    norms = [[float(x.pop("grad_norm")) for x in r[1] if "grad_norm" in x] for r in (a, b)]
    assert len(norms[0]) > 1 and all(abs(x / y - 1) < 1e-12 for x, y in zip(*norms)), (what, norms)
    same(what, a, b)


def slices():
    """Without clipping, embedding and head in slices become what they become as a whole, but for
    nvfp4 moments, whose scales are those of slices then; resuming is exact. The last of three
    slices has 116 rows."""
    for tied in (True, False):
        model = t.make_model(nibble, f"{work}/tied-{tied}", vocab_size=16500,
                             tie_word_embeddings=tied)
        for kind in SLICED[tied::2] if slow else SLICED:
            kind = {**kind, "model": model, "fused_step": True, "steps": 4,
                    "data": f"{work}/{kind.get('data', 'a.txt')}"}
            whole = trained("plain", grad_clip=0, **kind)
            same_but_norms(f"slices, {kind}", whole,
                           trained("other", grad_clip=0, head_slices=True, **kind))
            some = trained("other", head_slices=True, grad_clip="0.1", **kind)
            assert some[0] != whole[0], kind
            last = {**kind, "train_last_layers": 1}
            same(f"slices of what is not trained, {kind}", trained("plain", **last),
                 trained("other", head_slices=True, **last))
        kind = {"model": model, "fused_step": True, "head_slices": True, "precision": "nvfp4",
                "master_dtype": "bf16", "optimizer_state_mode": "nvfp4", "seed": 5}
        ck = {"checkpoint_dir": work + "/ck", "schedule": "constant"}
        t.train(nibble, *options(**{**kind, **ck, "steps": 3}))
        again = trained("other", resume=True, **{**kind, **ck})
        straight = trained("plain", **{**kind, **ck, "checkpoint_dir": work + "/straight"})
        assert straight[0] == again[0], "resumed, it is another"
        t.same_checkpoint(work + "/straight/step-00000006.ckpt", work + "/ck/step-00000006.ckpt")
        t.run(nibble, "train", "-q", *options(resume=True, **{**kind, **ck, "head_slices": None}),
              code=1)
        for name in ("straight", "ck"):
            shutil.rmtree(f"{work}/{name}")
    with_slices, without = (json.loads(t.run(nibble, "plan", "--json", *options(
        **{**kind, "head_slices": flag}))[0])["gradients"] for flag in (True, None))
    assert with_slices < without - 2 * (16500 - 8192) * 64 * 4, (with_slices, without)
    t.run(nibble, "train", "-q", *options(head_slices=True), code=2)
    t.run(nibble, "train", "-q", *options(head_slices=True, fused_step=True, loss="scalar"), code=2)


ODD = [{"hidden_size": 80, "intermediate_size": 136, "tie_word_embeddings": False},
       {"hidden_size": 48, "intermediate_size": 112, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 651}]


def odd():
    """Sizes that are no multiple of a vector or a block; one, two and three threads."""
    for shape in ODD:
        model = t.make_model(nibble, f"{work}/hidden-{shape['hidden_size']}", **shape)
        for precision, compute in [(x, "f32") for x in t.PRECISIONS] + [("nvfp4", "bf16")]:
            kind = {"precision": precision, "master_dtype": "bf16", "optimizer_state_mode": "int8",
                    "compute_dtype": compute, "model": model, "seq_len": 33, "batch_size": 3,
                    "steps": 4}
            one = trained("plain", **{**kind, "threads": 1})
            same(f"two threads, {shape}, {kind}", one, trained("other", **{**kind, "threads": 2}))
            same(f"three threads, {shape}, {kind}", one,
                 trained("other", recompute="block", step_chunk_rows=5, **{**kind, "threads": 3}))
            same(f"scales only, {shape}, {kind}", one,
                 trained("other", weight_store="scales", step_chunk_rows=5, **kind))
            t.run(nibble, "inspect", "-q", "--verify", work + "/other.dat", "--model-dir", model)


def accumulate():
    """Four rows at once equal four accumulated passes of one row, up to rounding."""
    # AdamW turns even a gradient as small as eps into an update of lr, so lr sets the tolerance.
    plain = {"sample_mode": "sequential", "steps": 12, "warmup": 0, "lr": "5e-4"}
    for name, more in (("at once", {"batch_size": 4}),
                       ("one by one", {"batch_size": 1, "grad_accum": 4})):
        shutil.rmtree(f"{work}/{name}", ignore_errors=True)
        t.train(nibble, *options(out=f"{work}/{name}", log=f"{work}/{name}.jsonl", **plain, **more))
    worst = distance("at once", "one by one")
    a, b = (t.log(f"{work}/{n}.jsonl") for n in ("at once", "one by one"))
    losses = max(abs(float(x["loss"]) / float(y["loss"]) - 1) for x, y in zip(a, b))
    print(f"batch 4 against accumulation of 4: weights {worst:.2g}, losses {losses:.2g}")
    assert worst < 1e-6 and losses < 1e-6
    assert a[0]["loss"] == b[0]["loss"], "the loss of the same weights differs"
    assert [x["tokens"] for x in a] == [x["tokens"] for x in b]


def compute():
    """Activations in bf16 lead where those in f32 do, and so do gradients in bf16 in addition; f32
    is the CPU's default."""
    model = {} if slow else {"model": "models/nib", "seq_len": 64, "lr": "2e-4"}
    kinds = [(name, "f32") for name in ("auto", "f32", "bf16")] + [("bf16", "bf16")]
    runs = [trained(name + grad, **{"precision": "nvfp4", "steps": 30, "compute_dtype": name,
                                    "grad_dtype": grad, **model}) for name, grad in kinds]
    same("auto", runs[0], runs[1])
    losses = [[float(x["loss"]) for x in r[1]] for r in runs[1:]]
    for of_run in losses[1:]:
        worst = max(abs(a / b - 1) for a, b in zip(losses[0], of_run))
        print(f"30 steps in bf16: losses within {100 * worst:.2g} % of those in f32")
        assert 0 < worst < 0.01, losses
    assert losses[1] != losses[2], "gradients in bf16 change nothing"
    assert runs[2][2]["plan"]["compute_dtype"] == "bf16", runs[2][2]
    assert runs[3][2]["plan"]["gradients"] < 0.75 * runs[2][2]["plan"]["gradients"]
    for grads in ({"compute_dtype": "f32"}, {"compute_dtype": "bf16", "grad_accum": 2}):
        t.run(nibble, "train", "-q", *options(precision="nvfp4", grad_dtype="bf16", **grads), code=2)
    t.run(nibble, "train", "-q", *options(precision="f32", compute_dtype="bf16"), code=2)


def scratch():
    """--from-scratch needs a config and a tokenizer alone, and ignores existing weights."""
    bare = work + "/bare"
    shutil.rmtree(bare, ignore_errors=True)
    shutil.copytree(work + "/model", bare)
    os.remove(bare + "/model.safetensors")
    results = []
    for model in (work + "/model", bare):
        out = work + "/scratch"
        shutil.rmtree(out, ignore_errors=True)
        t.train(nibble, *options(model=model, out=out, steps=2), "--from-scratch")
        results.append(t.read(out + "/model.safetensors"))
    assert results[0] == results[1]
    t.run(nibble, "train", "-q", *options(model=bare, steps=1), code=1)


def decay():
    """Weight decay shrinks matrices and does not touch norms."""
    out = work + "/decay"
    shutil.rmtree(out, ignore_errors=True)
    t.train(nibble, *options(out=out, lr="1e-3", weight_decay=100, steps=1, warmup=0,
                             master_dtype="f32", schedule="constant"))
    before, after = (t.tensors(f"{d}/model.safetensors") for d in (work + "/model", out))
    for name, x in before.items():
        left = 1 if name.endswith("norm.weight") else 0.9
        for a, b in zip(t.floats(x), t.floats(after[name])):
            assert abs(b - left * a) < 1.1e-3, (name, a, b)


def some_layers():
    """Frozen layers are written bit for bit as they were read, in every type."""
    t.run(nibble, "convert", "-q", work + "/model", work + "/model.f32", "--dtype", "f32")
    t.run(nibble, "quantize", "-q", work + "/model", work + "/model.q")
    t.make_model(nibble, work + "/untied", tie_word_embeddings=False, num_hidden_layers=3)
    for model in ("model", "model.f32", "model.q", "untied"):
        before = t.tensors(f"{work}/{model}/model.safetensors")
        last = "model.layers.2." if model == "untied" else "model.layers.1."
        for precision in t.PRECISIONS:
            out = f"{work}/some"
            shutil.rmtree(out, ignore_errors=True)
            t.train(nibble, *options(model=f"{work}/{model}", out=out, train_last_layers=1,
                                     precision=precision))
            after = t.tensors(out + "/model.safetensors")
            for name, old in before.items():
                moved = name.startswith(last) or name == "model.norm.weight"
                if not moved:
                    assert after[name] == old, f"{model}, {precision}: '{name}' changed"
                elif name.endswith("up_proj.weight"):
                    assert after[name] != old, f"{model}, {precision}: '{name}' did not change"


# ---- learning ----

def overfit():
    """Learns one batch by heart in NVFP4, with each moment type."""
    with open(work + "/one.txt", "w", encoding="ascii") as f:
        f.write("the blue cat sees 17 dogs over the hill and the rain falls gently on\n")
    for state in t.STATES[-1:] if slow else t.STATES:
        for master in ("bf16",) if slow else ("bf16", "f32"):
            r = t.train(nibble, *options(
                data=work + "/one.txt", steps=300, batch_size=1, seq_len=48,
                lr="1e-2", warmup=10, weight_decay=None, precision="nvfp4", master_dtype=master,
                optimizer_state_mode=state, threads=1))
            print(f"overfitting, {state} moments, {master} masters: {r['loss']:.2g}")
            assert r["loss"] < 0.01, f"{state}, {master}: loss {r['loss']}"


# ---- what is written ----

def ppl(model, *more):
    """Perplexity of the held-out text, in windows of 24."""
    r = json.loads(t.run(nibble, "eval", "ppl", "-q", "--json", "-m", model, "--text",
                         work + "/held.txt", "--ctx", 24, *more)[0])
    return r["nll"], r["tokens"]


def export():
    """File, directory and GGUF of the same run hold the same model."""
    beside = ["--model-dir", work + "/model"]
    for precision in t.PRECISIONS:
        for master in ("bf16", "f32"):
            shutil.rmtree(work + "/out", ignore_errors=True)
            kind = {"precision": precision, "master_dtype": master, "lr": "5e-3"}
            for end in ("", ".dat"):
                t.train(nibble, *options(out=f"{work}/out{end}", **kind))
            t.run(nibble, "convert", "-q", work + "/out", work + "/out.gguf")
            nll = {}
            for end, more in (("", []), (".dat", beside), (".gguf", [])):
                t.run(nibble, "inspect", "-q", "--verify", f"{work}/out{end}", *more)
                nll[end] = ppl(f"{work}/out{end}", *more)
            assert nll[""] == nll[".dat"] == nll[".gguf"], (kind, nll)
            assert nll[""][0] < ppl(work + "/model")[0], "nothing was learnt"


def evaluation():
    """The loss that training reports is that of the model it wrote."""
    for precision in t.PRECISIONS:
        for master in ("bf16", "f32"):
            e = t.train(nibble, *options(
                out=work + "/out.dat", precision=precision, master_dtype=master, steps=12,
                lr="5e-3", eval_data=work + "/held.txt"))["eval"]
            loss, tokens = ppl(work + "/out.dat", "--model-dir", work + "/model")
            print(f"{precision}, {master} masters: {e['loss']:.8f} by the trainer, {loss:.8f} by "
                  "eval ppl")
            assert e["tokens"] == tokens, (precision, master, e, tokens)
            assert abs(e["loss"] / loss - 1) < 1e-6, (precision, master, e, loss)


# ---- what goes wrong ----

def skip():
    """Exactly the steps that see a token with an infinite embedding are skipped."""
    path = t.make_model(nibble, work + "/huge", tie_word_embeddings=False) + "/model.safetensors"
    token = int(t.run(nibble, "tokenize", "-m", work + "/huge", "--no-special", "--text", "@")[0])
    data = bytearray(t.read(path))
    size = int.from_bytes(data[:8], "little")
    at = 8 + size + json.loads(data[8:8 + size])["model.embed_tokens.weight"]["data_offsets"][0]
    data[at + token * 128:at + token * 128 + 128] = b"\x80\x7f" * 64 # in bf16
    with open(path, "wb") as f:
        f.write(data)
    with open(work + "/huge.txt", "w", encoding="ascii") as f:
        f.write("".join("the cat sees @\n" if i in (3, 20, 31) else "the rain falls\n"
                        for i in range(60)))
    text = t.run(nibble, "tokenize", "-m", work + "/huge", "--file", work + "/huge.txt")[0]
    ids = text.split(",")
    where = sorted({i // 24 + 1 for i, x in enumerate(ids[:288]) if int(x) == token})
    assert len(ids) >= 288 and len(where) >= 2, (len(ids), where)
    for precision, state in (("f32", "f32"), ("bf16", "int8"), ("nvfp4", "nvfp4")):
        shutil.rmtree(work + "/huge.ck", ignore_errors=True)
        _, said = t.run(nibble, "train", *options(
            model=work + "/huge", data=work + "/huge.txt", steps=12, epochs=1, batch_size=1,
            precision=precision, optimizer_state_mode=state, sample_mode="sequential",
            checkpoint_dir=work + "/huge.ck", save_every=1, keep=100, log=work + "/huge.jsonl"))
        lines = t.log(work + "/huge.jsonl")
        counts = [0] + [int(float(x["skipped"])) for x in lines]
        bad = [i for i in range(1, len(counts)) if counts[i] > counts[i - 1]]
        assert len(lines) == 12 and bad == where, (precision, counts, where)
        assert f"({len(bad)} skipped)" in said, said
        c = [None] + [t.checkpoint(f"{work}/huge.ck/step-{i:08}.ckpt")
                      for i in range(1, len(counts))]
        blobs = [x and {k: v for k, v in x.items() if k.startswith("blob")} for x in c]
        for i in range(2, len(counts)):
            assert (blobs[i] == blobs[i - 1]) == (i in bad), f"{precision}: step {i}, skipped {bad}"
        assert c[-1]["updates"] == len(lines) - len(bad), c[-1]["updates"]
        for i in bad:
            assert lines[i - 1]["grad_norm"] is None, lines[i - 1]
    # The last step and the evaluation see it.
    with open(work + "/bad.txt", "w", encoding="ascii") as f:
        f.write("the cat @ sees @\n" * 20)
    bad = work + "/bad.txt"
    only = options(model=work + "/huge", data=bad, eval_data=bad, steps=2)
    r = t.train(nibble, *only)
    assert r["loss"] is r["eval"]["loss"] is r["eval"]["ppl"] is None and r["skipped"] == 2, r
    out, _ = t.run(nibble, "train", "-q", *only)
    assert out == "2 steps, 2 skipped: their gradients were not finite\n", out
    # Everything overflows: a short run completes, reports it, and writes a readable result.
    over = {"model": work + "/model", "lr": 100, "weight_decay": 100, "schedule": "constant",
            "grad_clip": 0, "out": work + "/overflow.dat"}
    r = t.train(nibble, *options(steps=10, **over))
    assert 0 < r["skipped"] < 10 and r["steps"] == 10, r
    print(f"{len(where)} of {len(lines)} steps skipped; of 10 with overflow {r['skipped']}")
    # Ten skipped steps in a row end a run, with a checkpoint and without a result; resumed, it gets
    # ten more.
    os.remove(work + "/overflow.dat")
    first = 20 - r["skipped"]
    for end, more in ((first, {}), (first + 10, {"resume": True})):
        _, said = t.run(nibble, "train", *options(steps=60, checkpoint_dir=work + "/over.ck",
                                                  log=work + "/over.jsonl", **over, **more), code=1)
        assert (f"stopped after step {end}: the gradients of the last {end - first + 10} steps "
                "were not finite") in said, said
        c = t.checkpoint(f"{work}/over.ck/step-{end:08}.ckpt")
        assert c["skipped_in_row"] == end - first + 10, c["skipped_in_row"]
        assert len(t.log(work + "/over.jsonl")) == end
    assert not os.path.exists(work + "/overflow.dat")


def stop():
    """The run ends when perplexity rises, and evaluates its last step once."""
    run = {"lr": "0.05", "schedule": "constant", "warmup": 0, "steps": 40, "precision": "nvfp4",
           "eval_data": work + "/held.txt", "eval_every": 2, "stop_if_ppl_rises": 1}
    _, lines, r = trained("stopped", **run)
    evals = [(x["step"], float(x["eval"]["ppl"])) for x in lines if "eval" in x]
    best = min(p for _, p in evals)
    assert r["stopped"] and 4 <= r["steps"] < 40, r
    assert [s for s, _ in evals] == list(range(0, r["steps"] + 1, 2)), evals
    assert evals[-1][1] > 1.01 * best and r["eval"]["step"] == r["steps"], (evals, r["eval"])
    assert all(p <= 1.01 * min(q for _, q in evals[:i + 1])
               for i, (_, p) in enumerate(evals[:-1])), evals


def interrupt():
    """SIGINT finishes the step, writes a checkpoint and exits with 130; the resumed run equals an
    uninterrupted one."""
    files = {"checkpoint_dir": work + "/int.ck", "log": work + "/int.jsonl",
             "out": work + "/int.dat"}
    run = {"precision": "nvfp4", "steps": 60, "grad_accum": 4, "eval_data": work + "/held.txt",
           "eval_every": 5, "threads": 1}
    straight = trained("straight", **run)
    stops, resumed = 0, None
    while True:
        args = [nibble, "train", *map(str, options(**run, **files, resume=True))]
        with subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True) as p:
            lines, seen = [], 0
            for line in p.stderr:
                lines.append(line)
                seen += line.startswith("step ")
                if seen == 3 + 4 * stops and stops < 3 and p.poll() is None:
                    p.send_signal(signal.SIGINT)
                    time.sleep(0.002)
                    p.send_signal(signal.SIGINT)  # like timeout(1): a single signal
                    seen += 1000
        if p.returncode == 0:
            break
        stops += 1
        assert p.returncode == 130, (p.returncode, lines[-3:])
        done = t.steps(work + "/int.ck")[-1]
        assert lines[-1] == (f"nibble: interrupted after step {done}; --resume continues from "
                             "there\n"), (lines[-3:], done)
        assert not os.path.exists(files["out"])
        resumed = done
    assert stops >= 1 and resumed, "no signal came in time"
    same("interrupted", straight, (t.read(files["out"]), t.log(files["log"])))
    print(f"{stops} interruptions")
    # During a long evaluation: a checkpoint of the step before it.
    with open(work + "/long.txt", "w", encoding="ascii") as f:
        f.write("the rain falls gently on the hill and the cat sees it.\n" * 20000)
    for ck in (work + "/long.ck", None):
        args = options(eval_data=work + "/long.txt", eval_every=2, checkpoint_dir=ck, threads=1)
        with subprocess.Popen([nibble, "train", *map(str, args)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
            for line in p.stderr:
                if line.startswith("step 2/"):
                    time.sleep(0.3)
                    p.send_signal(signal.SIGINT)
                    break
            said = p.stderr.read()
        assert p.returncode == 130, (p.returncode, said)
        lines = said.splitlines()
        assert len(lines) == 2 and "Ctrl-C again" in lines[0] and "interrupted" in lines[1], said
        assert not ck or t.steps(ck) == [2], t.steps(ck)


def hang_up():
    """SIGHUP works like SIGTERM, a second one changes nothing, and nohup(1) ignores it."""
    run = {"steps": 3, "grad_accum": 150 if slow else 700, "threads": 1}  # about a second per step

    def signalled(name, wish, first, second):
        """A run that gets a signal in its second step, and another one later in that step."""
        args = options(**run, checkpoint_dir=f"{work}/{name}.ck", out=f"{work}/{name}.dat")
        with subprocess.Popen([nibble, "train", *map(str, args)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGHUP, wish)) as p:
            for line in p.stderr:
                if line.startswith("step 1/"):
                    time.sleep(0.1)
                    p.send_signal(first)
                    time.sleep(0.4)
                    p.send_signal(second)
                    break
            said = p.stderr.read()
        return p.returncode, said, t.steps(f"{work}/{name}.ck")

    code, _, steps = signalled("nohup", signal.SIG_IGN, signal.SIGHUP, signal.SIGHUP)
    assert code == 0 and steps == [3], (code, steps)
    for name, first, second in (("hup", signal.SIGHUP, signal.SIGHUP),
                                ("both", signal.SIGHUP, signal.SIGTERM),
                                ("term", signal.SIGTERM, signal.SIGHUP)):
        code, said, steps = signalled(name, signal.SIG_DFL, first, second)
        assert code == 128 + first, (name, code, said)
        assert "interrupted after step 2" in said and steps == [2], (name, said, steps)
        assert not os.path.exists(f"{work}/{name}.dat")
    files = {"checkpoint_dir": work + "/hup.ck", "out": work + "/hup.dat"}
    t.train(nibble, *options(**run, **files, resume=True))
    assert t.read(work + "/hup.dat") == t.read(work + "/nohup.dat")


def interrupted_late():
    """After SIGINT in the last evaluation the result is in place, and the message says so."""
    with open(work + "/long.txt", "w", encoding="ascii") as f:
        f.write("the rain falls gently on the hill and the cat sees it.\n" * 20000)
    out = work + "/late.dat"
    args = options(eval_data=work + "/long.txt", out=out, threads=1)
    with subprocess.Popen([nibble, "train", "-q", *map(str, args)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        while not os.path.exists(out) and p.poll() is None:
            time.sleep(0.01)
        p.send_signal(signal.SIGINT)
        said = p.stderr.read()
    assert p.returncode == 130, (p.returncode, said)
    assert f"interrupted after the last step; '{out}' is in place" in said, said
    t.run(nibble, "inspect", "--verify", out, "--model-dir", work + "/model")
    # An earlier interruption leaves no result, but keeps the answers that whoami collected.
    args = ["whoami", "-m", work + "/model", "-o", work + "/ada", "--name", "Ada", "--count", 100,
            "--samples", 4, "-n", 4, "--steps", 5000, "--seq-len", 64, "--batch-size", 2]
    with subprocess.Popen([nibble, *map(str, args)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        for line in p.stderr:
            if line.startswith("step 2/"):
                p.send_signal(signal.SIGINT)
                break
        said = p.stderr.read()
    assert p.returncode == 130 and os.path.exists(work + "/ada.whoami/identity.tsv"), said
    assert said.splitlines()[-1] == f"nibble: interrupted; '{work}/ada' was not written", said
    assert not os.path.exists(work + "/ada")


def outputs():
    """Outputs that would overwrite each other or an input are refused, and nothing changes."""
    shutil.copytree(work + "/model", work + "/own")
    os.mkdir(work + "/dir")
    os.symlink(work + "/dir", work + "/link")
    held, model = work + "/held.txt", work + "/own"
    weights = model + "/model.safetensors"
    bad = [{"out": work + "/r.dat", "vram_report": work + "/r.dat"},
           {"out": work + "/r.dat", "log": work + "/r.dat"},
           {"out": work + "/r.dat", "log": work + "/r.dat.report.html"},
           {"out": work + "/r.dat", "vram_report": work + "/r.dat.report.html"},
           {"log": work + "/dir/x", "vram_report": work + "/link/x"},
           {"log": work + "/a.txt"}, {"vram_report": work + "/a.txt"},
           {"vram_report": held, "eval_data": held}, {"log": held, "replay": held},
           {"vram_report": weights}, {"log": weights}, {"log": model + "/config.json"},
           {"vram_report": model + "/tokenizer.json"}]
    names = [work + "/a.txt", held, *(model + "/" + x for x in sorted(os.listdir(model)))]
    before = [t.read(x) for x in names]
    for wrong in bad:
        _, said = t.run(nibble, "train", "-q", *options(model=model, steps=1, **wrong), code=1)
        assert len(said.splitlines()) == 1, (wrong, said)
        assert "destroy" in said or "two files" in said, (wrong, said)
        assert [t.read(x) for x in names] == before, wrong
        assert not os.path.exists(work + "/r.dat"), wrong


# ---- the plan ----

PLANS = [
    {"precision": "f32", "master_dtype": "f32", "optimizer_state_mode": "f32"},
    {"precision": "bf16", "optimizer_state_mode": "bf16"},
    {},
    {"recompute": "block"},
    {"fused_step": True},
    {"fused_step": True, "recompute": "block", "optimizer_state_mode": "nvfp4"},
    {"train_last_layers": 2, "compute_dtype": "bf16", "grad_dtype": "bf16",
     "weight_store": "scales"},
    {"seq_len": 256, "batch_size": 4, "threads": 2},
    {"batch_size": 8, "seq_len": 128, "grad_accum": 2, "recompute": "block"},
    {"precision": "f32", "train_last_layers": 4},
    {"from_scratch": True, "master_dtype": "f32", "optimizer_state_mode": "f32"}]


def plan():
    """The plan, against the peak memory of the process above that of a one-layer model."""
    if slow:
        return print("a sanitizer has memory of its own")
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 64}
    t.make_model(nibble, work + "/one", num_hidden_layers=1, **shape)
    t.make_model(nibble, work + "/eight", num_hidden_layers=8, vocab_size=8192, **shape)
    plain = {"steps": 2, "seq_len": 64, "threads": 1, "precision": "nvfp4", "master_dtype": "bf16",
             "optimizer_state_mode": "int8"}
    r = t.train(nibble, *options(model=work + "/one", **plain))
    base = r["peak_bytes"] - r["plan"]["total"]
    assert 0 < base < 10e6, base
    for setting in PLANS if full else PLANS[2:7:2]:
        opts = options(model=work + "/eight", **{**plain, **setting})
        r = t.train(nibble, *opts)
        said = json.loads(t.run(nibble, "plan", "--json", *opts)[0])
        assert said.pop("estimate")["steps"] == 2
        assert said == r["plan"], (said, r["plan"])
        parts = ("masters", "moments", "gradients", "weights", "activations", "scratch", "host")
        assert said["total"] == sum(said[x] for x in parts) > 100e6, said
        growth = r["peak_bytes"] - base
        print(f"{said['total'] / 1e6:.1f} MB planned, {growth / 1e6:.1f} MB taken, "
              f"{100 * (growth / said['total'] - 1):+.1f} %: {setting}")
        assert abs(growth / said["total"] - 1) < 0.03, (setting, growth, said)


def main():
    """Runs one part of the tests."""
    t.make_model(nibble, work + "/model")
    t.make_data(work)
    parts = {"equal": equal, "odd": odd, "accumulate": accumulate, "compute": compute,
             "slices": slices, "decay": decay, "scratch": scratch, "layers": some_layers,
             "overfit": overfit, "export": export, "evaluation": evaluation, "skip": skip,
             "interrupt": interrupt, "hang_up": hang_up, "late": interrupted_late,
             "outputs": outputs, "stop": stop, "plan": plan}
    parts[part]()


main()
