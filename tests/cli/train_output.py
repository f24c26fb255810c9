"""train_output.py - the outputs of a run: models in every format, reports and answers; and what a
run that fails late leaves.

usage: train_output.py NIBBLE WORK PART
"""
import html
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

import training as t

nibble, work, part = sys.argv[1:4]
model = work + "/model"


def options(**changes):
    """Options of a short run. Keys have _ for -; None leaves an option out, True is a flag."""
    o = {"model": model, "data": work + "/a.txt", "steps": 3, "seq_len": 24, "batch_size": 2,
         "lr": "5e-3", "schedule": "constant", "precision": "nvfp4", "threads": 1, **changes}
    args = []
    for name, value in o.items():
        if value is not None:
            args += ["--" + name.replace("_", "-")] + ([] if value is True else [value])
    return args


def ppl(path, *more):
    """Mean loss of the held-out text."""
    r = t.run(nibble, "eval", "ppl", "-q", "--json", "-m", path, "--text", work + "/held.txt",
              "--ctx", 24, *more)[0]
    return json.loads(r)["nll"]


def clean(*names):
    """Removes files and directories of an earlier run."""
    for name in names:
        path = f"{work}/{name}"
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.remove(path)


# ---- tensor scales ----

def scale(tensors, name):
    """The tensor scale of a projection in ModelOpt's layout."""
    return struct.unpack("<f", tensors[name + ".weight_scale_2"][2])[0]


def same_scales(tensors, layers):
    """Groups that runtimes fuse share a tensor scale."""
    for i in range(layers):
        a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        assert len({scale(tensors, a + x) for x in ("q_proj", "k_proj", "v_proj")}) == 1, i
        assert scale(tensors, m + "gate_proj") == scale(tensors, m + "up_proj"), i


def two_level():
    """With tensor scales in the source, frozen tensors keep their bits and trained ones have scales."""
    q = work + "/q"
    t.run(nibble, "quantize", "-q", "--two-level", model, q)
    before, loss = t.tensors(q + "/model.safetensors"), ppl(q)
    same_scales(before, 2)
    beside = ["--model-dir", model]
    for end, more in (("", []), (".dat", beside), (".gguf", [])):
        clean("out" + end)
        e = t.train(nibble, *options(model=q, train_last_layers=1, lr=0, steps=1,
                                     out=work + "/out" + end, eval_data=work + "/held.txt"))
        got = ppl(work + "/out" + end, *more)
        assert got == loss and abs(e["eval"]["loss"] / loss - 1) < 1e-6, (end, got, loss, e)
        t.run(nibble, "inspect", "-q", "--verify", work + "/out" + end, *more)
    after = t.tensors(work + "/out/model.safetensors")
    assert all(after[n] == before[n] for n in before if not n.startswith("model.layers.1."))
    assert all(after[n] == before[n] for n in before if n.endswith("scale_2")), "another scale"
    for layers in (0, 1):
        clean("out")
        e = t.train(nibble, *options(model=q, train_last_layers=layers, out=work + "/out",
                                     eval_data=work + "/held.txt"))["eval"]
        got = ppl(work + "/out")
        assert got != loss and abs(e["loss"] / got - 1) < 1e-6, (layers, e, got, loss)
        after = t.tensors(work + "/out/model.safetensors")
        frozen = [n for n in before if layers and not n.startswith("model.layers.1.")
                  and n != "model.norm.weight"]
        assert all(after[n] == before[n] for n in frozen), "what is frozen changed"
        moved = [n for n in before if n.endswith("proj.weight") and n not in frozen]
        assert len(moved) == 14 - 7 * layers and all(after[n] != before[n] for n in moved)
        assert scale(after, "model.layers.1.mlp.down_proj") == scale(
            before, "model.layers.1.mlp.down_proj") < 1 / 64
        same_scales(after, 2)


def growth():
    """Weights outgrow their tensor scale, and resuming gives the same bytes."""
    q = work + "/q"
    t.run(nibble, "quantize", "-q", "--two-level", "--layout", "compressed-tensors", model, q)
    run = {"model": q, "lr": "0.3", "steps": 8, "fused_step": True}
    clean("a", "b", "ck")
    t.train(nibble, *options(out=work + "/a", **run))
    t.train(nibble, *options(checkpoint_dir=work + "/ck", **{**run, "steps": 5}))
    t.train(nibble, *options(checkpoint_dir=work + "/ck", resume=True, out=work + "/b",
                              weight_store="scales", **run))
    a, b = (t.tensors(f"{work}/{n}/model.safetensors") for n in "ab")
    assert a == b, "resumed, it is another"
    old = t.tensors(q + "/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_global_scale"
    before, after = (struct.unpack("<f", x[name][2])[0] for x in (old, a))
    assert 1 < after < before and (before / after).is_integer(), (before, after)


# ---- GGUF ----

def gguf_types(path):
    """Names and types of a GGUF's tensors, as inspect lists them."""
    listed = json.loads(t.run(nibble, "inspect", "--json", path)[0])["tensors"]
    return {x["name"]: x["dtype"] for x in listed}


def gguf():
    """A GGUF equals the converted directory except for norms, which it holds as f32, and its
    perplexity is the one that training measured."""
    for precision in t.PRECISIONS:
        for layers in (0, 1):
            clean("out.gguf")
            e = t.train(nibble, *options(precision=precision, train_last_layers=layers, steps=6,
                                         out=work + "/out.gguf", eval_data=work + "/held.txt"))
            types = gguf_types(work + "/out.gguf")
            norms = [n for n in types if "norm" in n]
            assert len(norms) == 9 and {types[n] for n in norms} == {"f32"}, types
            loss = ppl(work + "/out.gguf")
            assert abs(e["eval"]["loss"] / loss - 1) < 1e-6, (precision, layers, e, loss)
            t.run(nibble, "inspect", "-q", "--verify", work + "/out.gguf")
    # Frozen tensors return to bf16 where that loses nothing.
    clean("back")
    t.run(nibble, "convert", "-q", work + "/out.gguf", work + "/back")
    back, was = (t.tensors(f"{x}/model.safetensors") for x in (work + "/back", model))
    assert back["model.layers.0.input_layernorm.weight"] == was[
        "model.layers.0.input_layernorm.weight"]
    # The type of norms is a setting of the run, so resuming with another is refused.
    clean("ck")
    t.train(nibble, *options(checkpoint_dir=work + "/ck"))
    said = t.run(nibble, "train", *options(checkpoint_dir=work + "/ck", resume=True, steps=4,
                                           out=work + "/out.gguf"), code=1)[1]
    assert "f32_norms" in said, said
    # Rows whose length GGUF cannot store.
    t.make_model(nibble, work + "/odd", hidden_size=48, intermediate_size=112)
    clean("out.gguf")
    out, said = t.run(nibble, "train", *options(model=work + "/odd", out=work + "/out.gguf"),
                      code=1)
    assert "blocks of 64" in said and "step 1" not in said and not out, said


# ---- failures late in a run ----

def limited(size, *args):
    """Runs with a limit of file size; returns exit code, result and stderr."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    r = subprocess.run([nibble, "train", "-q", *map(str, args)], stdin=subprocess.DEVNULL,
                       capture_output=True, check=False, text=True, preexec_fn=limit)
    return r.returncode, r.stdout, r.stderr.splitlines()


def late():
    """Nothing is lost if checkpoints or logs cannot be written or data changes."""
    straight = work + "/straight.dat"
    t.train(nibble, *options(out=straight, steps=5))
    run = {"out": work + "/out.dat", "checkpoint_dir": work + "/ck", "save_every": 1, "steps": 5}
    code, out, said = limited(os.path.getsize(straight) + 20000, *options(**run))
    assert code == 0 and out.startswith("5 steps"), (code, out, said)
    assert len(said) == 2 and "saving a checkpoint" in said[0] and "goes on" in said[0], said
    assert "the result has been written" in said[1], said
    assert t.read(straight) == t.read(work + "/out.dat") and t.steps(work + "/ck") == []
    # Without a result to write, a missing checkpoint is a failure.
    code, _, said = limited(20000, *options(**{**run, "out": None}))
    assert code == 1 and len(said) == 2 and "saving a checkpoint" in said[1], (code, said)
    # If neither result nor checkpoint fits, the run fails at the start. If only the result does
    # not, its checkpoint is kept.
    code, _, said = limited(20000, *options(**run))
    assert code == 1 and len(said) == 1 and "out.dat" in said[0], (code, said)
    code, out, said = limited(1000, *options(log=work + "/log", steps=20))
    assert code == 0 and out.startswith("20 steps") and len(said) == 1, (code, out, said)
    assert "without a log" in said[0] and 0 < t.read(work + "/log").count(b"\n") < 20, said


def changed():
    """If the data is truncated during the run, a checkpoint of the last step allows to resume."""
    data = work + "/c.txt"
    whole = t.read(work + "/a.txt") * 20
    args = options(data=data, steps=100000, checkpoint_dir=work + "/ck", keep=9)
    with open(data, "wb") as f:
        f.write(whole)
    with subprocess.Popen([nibble, "train", *map(str, args)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as p:
        for line in p.stderr:
            if line.startswith("step 3/"):
                os.truncate(data, 100)
                break
        said = p.stderr.read().splitlines()
    assert p.returncode == 1 and "c.txt" in said[-1], (p.returncode, said[-3:])
    (step,) = t.steps(work + "/ck")
    last = [line for line in said if line.startswith("step ")]
    assert not last or last[-1].startswith(f"step {step}/"), (step, last[-1:])
    with open(data, "wb") as f:
        f.write(whole)
    said = t.run(nibble, "train", *options(data=data, steps=step + 2, resume=True,
                                           checkpoint_dir=work + "/ck"))[1]
    assert f"step {step + 1}/" in said and f"step {step}/" not in said, said


def refused(**changes):
    """Fails before anything is loaded, in one line."""
    said = t.run(nibble, "train", *options(out=work + "/out.dat", **changes), code=1)[1]
    assert said.count("\n") == 1, said
    return said


def paths():
    """Reports that cannot be written are refused at the start."""
    assert "nowhere" in refused(vram_report=work + "/nowhere/vram.json")
    assert "nowhere" in refused(log=work + "/nowhere/log.jsonl")
    os.mkdir(work + "/out.dat.report.html")
    assert "report.html" in refused()


def stopped():
    """Ctrl-C during the answers after training leaves the result in place."""
    with open(work + "/many.txt", "w", encoding="ascii") as f:
        f.writelines(f"what is {i}?\n" for i in range(250))
    out = work + "/out.dat"
    with subprocess.Popen([nibble, "train", *map(str, options(
            steps=1, out=out, test_prompts=work + "/many.txt", vram_report=work + "/vram.json"))],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        while not os.path.exists(out) and p.poll() is None:
            time.sleep(0.01)
        p.send_signal(signal.SIGINT)
        shown, said = p.communicate()
    assert p.returncode == 130 and not shown, (p.returncode, shown, said)
    t.run(nibble, "inspect", "-q", "--verify", out, "--model-dir", model)
    assert os.path.exists(out + ".report.html")
    assert len(phases(work + "/vram.json")) == 6


# ---- reports ----

PHASES = ["start", "model_loaded", "batch_ready", "zero_grad_done", "backward_done",
          "optimizer_step_done"]


def phases(path):
    """Reads a memory report."""
    with open(path, encoding="ascii") as f:
        r = json.load(f)
    assert set(r) == {"Pid", "CreatedUtc", "Samples"}, r
    for s in r["Samples"]:
        assert set(s) == {"TimestampUtc", "Phase", "PidMemoryMiB", "TotalMemoryMiB"}, s
        assert s["PidMemoryMiB"] > 0, s
    return [s["Phase"] for s in r["Samples"]]


def memory():
    """The memory report has six samples of the first step and none of later ones."""
    vram = work + "/vram.json"
    for more in ({}, {"grad_accum": 3}, {"fused_step": True}, {"steps": 7}):
        t.train(nibble, *options(vram_report=vram, **more))
        assert phases(vram) == PHASES, (more, phases(vram))
        os.remove(vram)
    # A run that fails: ids outside the vocabulary.
    small = t.make_model(nibble, work + "/small", vocab_size=300, eos_token_id=299)
    t.run(nibble, "train", "-q", *options(model=small, vram_report=vram), code=1)
    assert phases(vram) == PHASES[:4], phases(vram)


CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]") # not allowed in XML


def rows(page, which):
    """A table of the report, as lists of cells."""
    table = re.search(f'<table id="{which}">(.*?)</table>', page, re.S).group(1)
    return [[html.unescape(c) for c in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)]
            for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)]


def answers():
    """Answers before and after appear on stdout, in JSON and in the report, also when resumed."""
    prompts = work + "/p.jsonl"
    with open(prompts, "w", encoding="ascii") as f:
        f.write('{"prompt": "who are you?", "response": "nobody"}\n')
        f.write('{"messages": [{"role": "system", "content": "be brief"}, '
                '{"role": "user", "content": "what is 2?"}]}\n')
    run = {"test_prompts": prompts, "lr": "2e-2", "checkpoint_dir": work + "/ck"}
    first = t.train(nibble, *options(steps=6, **run))["answers"]
    assert [x["prompt"] for x in first] == ["who are you?", "what is 2?"], first
    assert all(x["before"] != x["after"] for x in first), first
    shown = t.run(nibble, "train", "-q", *options(steps=6, resume=True, out=work + "/out", **run))[0]
    for x in first:
        assert f"prompt: {x['prompt']}\nbefore: {x['before']}\nafter:  {x['after']}\n" in shown
    page = t.read(work + "/out/report.html").decode()
    wanted = [[CONTROL.sub("\ufffd", x[k]) for k in ("prompt", "before", "after")] for x in first]
    assert rows(page, "samples")[1:] == wanted, (rows(page, "samples"), wanted)
    assert "steps before 7 are not shown" in page, page[-4000:]


def settings():
    """The report lists every setting of a run."""
    clean("out")
    t.run(nibble, "train", "-q", *options(
        out=work + "/out", steps=2, epochs=3, loss="ce", kl_base="0.25", eps="1e-7",
        replay=work + "/c.jsonl:0.25", final_lr_frac="0.125", train_last_layers=1,
        recompute="block", fused_step=True, eval_data=work + "/held.txt"), "-d", work + "/b.txt")
    page = t.read(work + "/out/report.html").decode()
    assert "<title>out</title>" in page and "<h1>out</h1>" in page, page[:4000]
    assert "step 0, held-out loss" in page and "step 2, held-out loss" in page
    found = dict(rows(page, "settings"))
    wanted = {"data": f"{work}/a.txt\n{work}/b.txt", "replay": work + "/c.jsonl",
              "share of replay": "0.25", "held-out data": work + "/held.txt", "loss": "ce",
              "weight of KL to the base model": "0.25", "of it at the end": "0.125", "eps": "1e-07",
              "steps": "2", "epochs at most": "3", "layers that are trained": "1",
              "recompute": "block", "update inside the backward pass": "yes"}
    assert {k: found.get(k) for k in wanted} == wanted, found
    assert "not shown" not in page


def main():
    """Runs one part of the tests."""
    t.make_model(nibble, model)
    t.make_data(work)
    parts = {"two_level": two_level, "growth": growth, "gguf": gguf, "late": late,
             "changed": changed, "paths": paths, "stopped": stopped, "memory": memory,
             "answers": answers, "settings": settings}
    parts[part]()


main()
