"""Files of a model that are truncated or overwritten while a command uses them: an error message or
the undisturbed result, never a signal.

usage: file_shrinks.py NIBBLE WORK COUNT
"""
import os
import random
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import training  # noqa: E402

COMMANDS = (
    "generate -m model --raw -p cat -n 48 --seed 1 --ignore-eos --threads 2 -q",
    "generate -m model.gguf --raw -p cat -n 48 --seed 1 --ignore-eos --threads 1 --exact -q",
    "train -m model -d a.txt -o out --steps 4 --batch-size 2 --seq-len 64 --threads 2 -q "
    "--kl-base 0.5 --replay c.jsonl",
)


def run(nibble, work, command, disturb=None):
    """Exit code and message; disturb() runs beside the command."""
    with subprocess.Popen([nibble, *command.split()], cwd=work, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        beside = threading.Thread(target=disturb) if disturb else None
        if beside:
            beside.start()
        said = child.stderr.read().decode("utf-8", "replace")
        code = child.wait()
        if beside:
            beside.join()
    return code, said


def weights_of(command):
    """The file that the command reads weights from."""
    model = command.split()[2]
    return model if model.endswith(".gguf") else model + "/model.safetensors"


def main():
    """Disturbs COUNT runs, each at a random moment."""
    nibble, work, count = os.path.realpath(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rng = random.Random(int(os.environ.get("NB_SEED", "1")))
    os.chdir(work)
    training.make_data(work)
    training.make_model(nibble, "model", hidden_size=256, intermediate_size=1024)
    training.run(nibble, "convert", "-q", "--dtype", "f32", "model", "model.gguf")
    seconds = {}
    for command in COMMANDS:
        begin = time.monotonic()
        code, said = run(nibble, work, command)
        assert code == 0, f"{command}: exit code {code}: {said}"
        seconds[command] = time.monotonic() - begin
    ends = {0: 0, 1: 0}
    for i in range(count):
        command = COMMANDS[i % len(COMMANDS)]
        path = weights_of(command)
        shutil.copyfile(path, "kept")
        size, delay = os.path.getsize(path), rng.random() * seconds[command]
        length, truncated = rng.randrange(size), rng.random() < 0.7

        def disturb():
            time.sleep(delay)
            if truncated:
                os.truncate(path, length)
                return
            with open(path, "r+b") as f:
                f.seek(length)
                f.write(b"\xff" * (size - length))

        code, said = run(nibble, work, command, disturb)
        what = f"{command}, {'cut' if truncated else 'overwritten'} at {length} after {delay:.3f} s"
        assert code in ends, f"{what}: exit code {code}: {said}"
        assert code == 0 or said.startswith("nibble: "), f"{what}: {said!r}"
        ends[code] += 1
        os.replace("kept", path)
    print(f"{count} files changed in use: {ends[0]} runs ended well, {ends[1]} with a message")
    assert ends[0] and ends[1], "files are to be changed before and after they are read"


main()
