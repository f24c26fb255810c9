"""training.py - helpers of the training tests: a small model, data, and readers of files."""
import array
import contextlib
import fcntl
import json
import os
import random
import struct
import subprocess
import time

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 602,
    "vocab_size": 672}
TOKENIZER = os.path.dirname(os.path.abspath(__file__)) + "/../golden/tokenizer/qwen/tokenizer.json"
WORDS = "cat dog sees runs over the hill and blue sky rain 2 17 falls gently on".split()
PRECISIONS = ("bf16", "f32", "nvfp4")
STATES = ("f32", "bf16", "int8", "nvfp4")


def sanitized(nibble):
    """Whether the binary was built with AddressSanitizer, which makes it slow."""
    with open(nibble, "rb") as f:
        return b"__asan_init" in f.read()


def run(nibble, *args, code=0):
    """Runs nibble, checks its exit code and returns what it printed."""
    r = subprocess.run([nibble, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True,
                       check=False)
    said = r.stderr.decode()
    assert r.returncode == code, f"{args}: exit code {r.returncode}, not {code}: {said}"
    return r.stdout.decode(), said


def train(nibble, *args):
    """The result of a training run, from JSON."""
    return json.loads(run(nibble, "train", "-q", "--json", *args)[0])


def make_model(nibble, where, **changes):
    """A random model with a tokenizer of 647 entries."""
    config = dict(CONFIG, **changes)
    with open(where + ".json", "w", encoding="ascii") as f:
        json.dump(config, f)
    run(nibble, "synth", "-q", "--sigma", "0.05", "--seed", 5, "--config", where + ".json", where)
    with open(TOKENIZER, "rb") as f, open(where + "/tokenizer.json", "wb") as g:
        g.write(f.read())
    return where


def sentence(rng, count):
    """Random words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def make_data(work):
    """Writes texts, a conversation file and a held-out text."""
    rng = random.Random(1)
    for name, count in (("a.txt", 60), ("b.txt", 40), ("held.txt", 12)):
        with open(f"{work}/{name}", "w", encoding="ascii") as f:
            f.writelines(sentence(rng, rng.randint(4, 14)) + ".\n" for _ in range(count))
    with open(work + "/c.jsonl", "w", encoding="ascii") as f:
        for i in range(20):
            f.write(json.dumps({"messages": [
                {"role": "user", "content": f"what is {i}?"},
                {"role": "assistant", "content": sentence(rng, 8)}]}) + "\n")


def read(path):
    """The bytes of a file."""
    with open(path, "rb") as f:
        return f.read()


def tensors(path):
    """The tensors of a safetensors file: (type, shape, bytes) by name."""
    data = read(path)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"],
                   data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]])
            for name, t in header.items()}


def floats(tensor):
    """The values of an f32 or bf16 tensor."""
    dtype, _, raw = tensor
    if dtype == "BF16":
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        raw = bytes(wide)
    return array.array("f", raw)


def checkpoint(path):
    """Settings, values and blobs of a checkpoint, read as docs/FORMATS.md describes."""
    data = read(path)
    assert data[:8] == b"NBCKPT\r\n", path
    version, size, total, step, length, values, blobs = struct.unpack("<IIQQIII", data[8:44])
    assert version == 1 and total == len(data), path
    at = 44 + length + 1
    found = {"step": step, "settings": json.loads(data[44:44 + length])}

    def name():
        nonlocal at
        n = data[at]
        text = data[at + 1:at + 1 + n].decode()
        assert data[at + 1 + n] == 0
        at += n + 2
        return text

    for _ in range(values):
        kind = data[at]
        at += 1
        text = name()
        (found[text],) = struct.unpack("<d" if kind else "<q", data[at:at + 8])
        at += 8
    table = []
    for _ in range(blobs):
        text = name()
        table.append((text, *struct.unpack("<Q", data[at:at + 8])))
        at += 8
    assert at + 4 == size, path
    at += 4
    for text, n in table:
        found["blob " + text] = data[at:at + n]
        at += n
    assert data[at + 4 * blobs:at + 4 * blobs + 8] == b"NBCKEND\n", path
    return found


def same_checkpoint(a, b):
    """Checks that all but the seconds is equal: masters, moments, scales, counts, loader states."""
    x, y = checkpoint(a), checkpoint(b)
    assert any(name.endswith(".m") for name in x) and "seconds" in x, list(x)
    for z in (x, y):
        del z["seconds"]
    assert x.keys() == y.keys(), x.keys() ^ y.keys()
    differ = [name for name in x if x[name] != y[name]]
    assert not differ, f"{a} and {b} differ in {differ[:5]}"


def log(path):
    """The lines of a training log without times; losses and rates as printed."""
    lines = []
    for text in read(path).decode().splitlines():
        line = json.loads(text, parse_float=str)
        for key in ("tokens_per_s", "seconds", "resident_bytes"):
            line.pop(key, None)
        lines.append(line)
    return lines


def steps(path):
    """The steps that have checkpoints, in order."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(n[5:-5]) for n in os.listdir(path) if n.endswith(".ckpt") and n[0] == "s")
    return []


def kill_at(nibble, args, file):
    """Kills (-9) a training run once a file exists and before the run ends: its stderr is a pipe
    that is not read and holds only about ten lines, so the run blocks."""
    r, w = os.pipe()
    size = fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 4096)
    os.write(w, b"." * (size - 1200))
    with subprocess.Popen([nibble, "train", *map(str, args)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=w) as p:
        end = time.monotonic() + 60
        while not os.path.exists(file) and p.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        said = p.poll()
        p.kill()
    os.close(w)
    text = os.read(r, size).lstrip(b".").decode()
    os.close(r)
    assert said is None and os.path.exists(file), f"{args}: exit code {said}: {text}"
