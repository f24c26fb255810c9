"""train_resume_rules.py - which settings a resumed run must keep, and what it prints.

usage: train_resume_rules.py NIBBLE WORK PART
"""
import os
import shutil
import struct
import subprocess
import sys

import training as t

nibble, work, part = sys.argv[1:4]


def options(*more):
    """Options of a short run with checkpoints; later options override them."""
    return ["-m", work + "/model", "-d", work + "/c.jsonl", "--steps", 6, "--seq-len", 64,
            "--batch-size", 2, "--lr", "2e-3", "--threads", 1, "--checkpoint-dir", work + "/ck",
            *more]


def refused(*more, code=1):
    """The single line with which a run is refused."""
    out, said = t.run(nibble, "train", "-q", *options(*more), code=code)
    assert said.count("\n") == 1 and not out, said
    return said


def alone():
    """Two runs cannot share checkpoints or a log; the locks of a killed run are gone."""
    files = ["--log", work + "/run.jsonl"]
    forever = options("--steps", 1000000, "--schedule", "constant", *files)
    args = [nibble, "train", *map(str, forever)]
    with subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as p:
        while not p.stderr.readline().startswith("step 2/"):
            assert p.poll() is None
        said = [refused(), refused("--resume"), refused("--checkpoint-dir", work + "/other", *files)]
        p.kill()
    who = f"process {p.pid} is training with the checkpoints in '{work}/ck'"
    assert who in said[0] and who in said[1], said
    assert f"another run is writing the log '{work}/run.jsonl'" in said[2], said
    t.train(nibble, *options(*files, "--resume"))


def said_by(*more):
    """From a run's output, where it resumed and its steps."""
    lines = t.run(nibble, "train", *options(*more))[1].splitlines()
    return [x for x in lines if x.startswith("step ") or "checkpoint" in x or "resumed" in x]


def says():
    """Whether a run resumed, and from which step."""
    lines = said_by("--resume", "--save-every", 4, "--keep", 9)
    assert lines[0] == f"nibble: no checkpoint in '{work}/ck': starting from the beginning", lines
    os.remove(work + "/ck/step-00000006.ckpt")
    lines = said_by("--resume")
    assert lines[0] == f"nibble: resumed from step 4 of '{work}/ck'", lines
    assert lines[1].startswith("step 5/6 "), lines
    lines = said_by("--resume")
    assert lines == [f"nibble: resumed from step 6 of '{work}/ck'"], lines
    assert t.run(nibble, "train", "-q", *options("--resume"))[1] == ""
    shutil.rmtree(work + "/ck")
    assert all(x.startswith("step ") for x in said_by())


def changed(path, old, new):
    """A changed copy of a data file with the same number of examples, bytes and tokens."""
    data = t.read(path)
    assert data.count(old) and len(old) == len(new)
    with open(path + ".changed.jsonl", "wb") as f:
        f.write(data.replace(old, new, 1))
    return path + ".changed.jsonl"


def crc32c(data, crc=0):
    """Bit by bit."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def without_settings(path, *names):
    """Gives settings of a checkpoint other names, as if they were not there."""
    data = t.read(path)
    size, blobs = struct.unpack("<I", data[12:16])[0], struct.unpack("<I", data[40:44])[0]
    head, trailer = data[:size - 4], data[-(4 * blobs + 12):-4]
    for name in names:
        assert head.count(b'"%s"' % name) == 1, name
        head = head.replace(b'"%s"' % name, b'"x%s"' % name[1:])
    crc = crc32c(head)
    with open(path, "wb") as f:
        f.write(head + struct.pack("<I", crc) + data[size:-4] +
                struct.pack("<I", crc32c(trailer, crc)))


def compute():
    """The type of activations is a setting; runs from before it was one computed in f32."""
    t.train(nibble, *options("--steps", 4, "--schedule", "constant"))
    without_settings(work + "/ck/step-00000004.ckpt", b"compute_dtype", b"bf16_gradients",
                     b"head_slices", b"device")
    go_on = ["--schedule", "constant", "--resume", "--compute-dtype"]
    said = refused(*go_on, "bf16")
    assert 'the run was begun with compute_dtype "f32", not "bf16"' in said, said
    t.train(nibble, *options(*go_on, "f32"))


def other():
    """A run does not resume with other data, or with another model if that affects it."""
    def begin(*more):
        shutil.rmtree(work + "/ck", ignore_errors=True)
        t.train(nibble, *options("--steps", 4, "--schedule", "constant", *more))

    def go_on(*more):
        return refused("--schedule", "constant", "--resume", *more)

    data = work + "/c.jsonl"
    swapped = changed(data, b"what is 1?", b"what is 7?")
    begin()
    assert "--data is not what the run began with" in go_on("-d", data)
    only = ["--model", work + "/model", "--steps", 6, "--seq-len", 64, "--batch-size", 2, "--lr",
            "2e-3", "--schedule", "constant", "--checkpoint-dir", work + "/ck", "--resume"]
    said = t.run(nibble, "train", "-q", *only, "-d", swapped, code=1)[1]
    assert "--data is not what the run began with" in said, said
    begin("--replay", data)
    assert "--replay is not what the run began with" in go_on("--replay", swapped)
    stop = ["--stop-if-ppl-rises", 1000, "--eval-every", 2]
    begin("--eval-data", data, *stop)
    assert "--eval-data is not what the run began with" in go_on("--eval-data", swapped, *stop)
    begin("--eval-data", data)  # does not affect the run
    t.train(nibble, *options("--schedule", "constant", "--resume", "--eval-data", swapped))
    # Another model of the same shape is accepted if the checkpoint has all parameters.
    t.run(nibble, "synth", "-q", "--sigma", "0.05", "--seed", 6, "--config", work + "/model.json",
          work + "/another")
    shutil.copy(work + "/model/tokenizer.json", work + "/another")
    another = ["-m", work + "/another"]
    begin("--train-last-layers", 1)
    said = go_on("--train-last-layers", 1, *another)
    assert "the model is not the one that the run began with" in said, said
    assert "--train-last-layers leaves alone" in said, said
    t.train(nibble, *options("--schedule", "constant", "--resume", "--train-last-layers", 1))
    begin("--kl-base", "0.5")
    said = go_on("--kl-base", "0.5", *another)
    assert "the model is not the one that the run began with" in said, said
    # Another config, other types or epochs change the computation.
    begin()
    t.make_model(nibble, work + "/theta", rope_theta=20000.0)
    said = go_on("-m", work + "/theta")
    assert "the model is not the one that the run began with" in said, said
    t.run(nibble, "convert", "-q", work + "/model", work + "/wide", "--dtype", "f32")
    said = go_on("-m", work + "/wide")
    assert "the model is not the one that the run began with" in said, said
    assert "rows are others than with --steps alone" in go_on("--epochs", 9)


def main():
    """Runs one part of the tests."""
    t.make_model(nibble, work + "/model")
    t.make_data(work)
    {"alone": alone, "says": says, "compute": compute, "other": other}[part]()


main()
