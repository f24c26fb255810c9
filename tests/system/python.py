"""The Python module of the examples, against an installed copy of the library.
usage: python.py NIBBLE INSTALLED WORK

The declarations are compared with what a C compiler says of the installed header; what the module
generates and trains is compared with what the program does."""
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

ROOT = os.path.dirname(os.path.abspath(__file__)) + "/../.."
NIBBLE, INSTALLED, work = sys.argv[1:]
MODEL = ROOT + "/models/nib"
sys.path.insert(0, ROOT + "/examples/python")
import nibble  # pylint: disable=wrong-import-position
import nibble_h  # pylint: disable=wrong-import-position

STORY = "Tell me a story about a dog."


def run(*args):
    """What nibble prints, as text."""
    return subprocess.run([NIBBLE, *map(str, args)], stdin=subprocess.DEVNULL, check=True,
                          stdout=subprocess.PIPE).stdout.decode()


def read(path):
    """The bytes of a file."""
    with open(path, "rb") as f:
        return f.read()


@contextlib.contextmanager
def raises(kind, text=""):
    """Expects an exception whose message holds a text."""
    try:
        yield
    except kind as error:
        assert text in str(error), f"'{error}' does not say '{text}'"
    else:
        raise AssertionError(f"no {kind.__name__}")


# ---- the declarations ----

KIND = """
#include <nibble.h>
#include <stdio.h>
#define KIND(x) _Generic((x), _Bool: "bool", int: "int", unsigned: "u32", int64_t: "i64", \\
    uint64_t: "u64", double: "f64", default: "pointer")
#define MEMBER(s, m) printf(#s " " #m " %zu %zu %s\\n", offsetof(struct s, m), \\
    sizeof(((struct s *)0)->m), KIND(((struct s *)0)->m));
#define NAMES(list) static const char *const list[] = {NB_##list##_LIST(NB_ENUM_NAME)}
"""


def compiled(name, code):
    """The lines that a C program prints."""
    path = f"{work}/{name}"
    with open(path + ".c", "w", encoding="ascii") as f:
        f.write(KIND + "int main(void)\n{\n" + code + "    return 0;\n}\n")
    subprocess.run(["cc", "-Werror", "-Wconversion", "-I", INSTALLED + "/include", path + ".c",
                    "-L", INSTALLED + "/lib", "-lnibble", "-o", path], check=True)
    return subprocess.run([path], check=True, stdout=subprocess.PIPE).stdout.decode().splitlines()


def kind(ctype):
    """What KIND says of a type."""
    names = {ctypes.c_bool: "bool", ctypes.c_int: "int", ctypes.c_uint: "u32",
             ctypes.c_int64: "i64", ctypes.c_uint64: "u64", ctypes.c_double: "f64"}
    return names.get(ctype, "pointer")


def structures():
    """Every structure has the size that C gives it, and every member its place and type."""
    code, wanted = "", []
    for tag, struct in nibble_h.S.items():
        code += f'    printf("{tag} %zu\\n", sizeof(struct {tag}));\n'
        wanted.append(f"{tag} {ctypes.sizeof(struct)}")
        for name, ctype in struct._fields_:
            code += f"    MEMBER({tag}, {name})\n"
            at = getattr(struct, name)
            wanted.append(f"{tag} {name} {at.offset} {at.size} {kind(ctype)}")
    assert len(wanted) > 100, wanted
    found = compiled("structures", code)
    for is_, want in zip(found, wanted):
        assert is_ == want, f"'{is_}' in C, '{want}' in nibble_h.py"


def enumerators():
    """Names of enumerators, in the order of their numbers."""
    code = ""
    for member, text in nibble_h.ENUMS.items():
        c_list = {"schedule": "LR_SCHEDULE"}.get(member, member.upper())
        code += (f"    NAMES({c_list});\n    for (size_t i = 0; i < sizeof {c_list} / sizeof "
                 f"*{c_list}; i++)\n        printf(\"{member} %s\\n\", {c_list}[i]);\n")
    code += '    printf("%d\\n", NB_ROLE_USER);\n'
    wanted = [f"{member} {name}" for member, text in nibble_h.ENUMS.items()
              for name in text.split()]
    found = compiled("enumerators", code)
    assert found == wanted + [str(nibble.NB_ROLE_USER)], (found, wanted)


def functions():
    """Functions take so many parameters, and give such results. A number that is too wide, or a
    pointer in place of one, does not compile."""
    values = {"ptr": "(void *)0", "str": "(char *)0", "size": "(size_t)0", "bool": "(_Bool)0"}
    results = {"enum": "u32", "ptr": "pointer", "str": "pointer"}
    code, wanted = "    (void)0;\n", []
    for line in nibble_h.FUNCTIONS.strip().splitlines():
        result, name, *parameters = line.split()
        call = f"{name}({', '.join(values[p] for p in parameters)})"
        if result == "void":
            code += f"    if (0)\n        {call};\n"
        else:
            code += f'    printf("{name} %s\\n", KIND({call}));\n'
            wanted.append(f"{name} {results[result]}")
    assert compiled("functions", code) == wanted


# ---- generating ----

def answers():
    """What the model says is what the program prints, greedy or not, with stop texts or raw."""
    model = nibble.Model(MODEL, threads=1)
    info = model.info()
    assert (info["device"], info["threads"], info["layers"]) == ("cpu", 1, 8), info
    greedy = ["generate", "-q", "--device", "cpu", "-m", MODEL, "-n", 100]
    pieces = list(model.generate(STORY, max_tokens=100))
    assert len(pieces) > 50 and "".join(pieces) + "\n" == run(*greedy, "-p", STORY), pieces
    some = "".join(model.generate(STORY, max_tokens=100, temperature=0.9, top_k=20, seed=7))
    assert some + "\n" == run(*greedy, "--temp", 0.9, "--top-k", 20, "--seed", 7, "-p", STORY), some
    assert some != "".join(pieces)
    short = "".join(model.generate(STORY, max_tokens=100, stop=["dog", "ball", "Lily"]))
    assert short + "\n" == run(*greedy, "--stop", "dog", "--stop", "ball", "--stop", "Lily", "-p",
                               STORY) and len(short) < 100, short
    raw = "".join(model.generate("The cat", raw=True, max_tokens=20))
    assert raw + "\n" == run(*greedy[:-1], 20, "--raw", "-p", "The cat"), raw


def cancelled():
    """An answer that nobody waits for any more is cancelled, and the model stays usable."""
    ended = []
    stop = nibble._Caller.stop

    def watch(self, call):
        stop(self, call)
        ended.append(str(call.exception()))

    nibble._Caller.stop = watch
    model = nibble.Model(MODEL)
    whole = "".join(model.generate(STORY, max_tokens=30))
    for _ in model.generate(STORY, temperature=1.0):
        break
    with raises(KeyboardInterrupt):
        for _ in model.generate(STORY, temperature=1.0):
            signal.raise_signal(signal.SIGINT)
    with raises(ZeroDivisionError):
        for _ in model.generate(STORY, temperature=1.0):
            print(1 // 0)
    nibble._Caller.stop = stop
    assert ended == ["None"] + 3 * ["interrupted"], ended
    assert "".join(model.generate(STORY, max_tokens=30)) == whole


def errors():
    """Failures are exceptions that say what failed."""
    with raises(nibble.NibbleError, "/no/such/model"):
        nibble.Model("/no/such/model")
    with raises(nibble.NibbleError, "top-p -1"):
        list(nibble.Model(MODEL).generate("x", top_p=-1.0))
    with raises(TypeError, "warmth"):
        list(nibble.Model(MODEL).generate("x", warmth=1))
    with raises(nibble.NibbleError, "/no/such/data.tsv"):
        nibble.train(MODEL, ["/no/such/data.tsv"], steps=1)
    with raises(nibble.NibbleError, "no tokenizer"):
        list(nibble.Model(None, synthetic="tiny").generate("x"))


# ---- training ----

STEPS = {"steps": 4, "seq_len": 64, "batch_size": 2, "lr": 1e-3, "schedule": "constant", "seed": 5,
         "device": "cpu"}


def same_as_the_program(out, steps, **options):
    """The result is what `nibble train` writes with these options."""
    names = [text for name, value in {**STEPS, **options, "steps": steps}.items()
             for text in ("--" + name.replace("_", "-"), value)]
    run("train", "-q", "-m", MODEL, "-d", work + "/data.tsv", "-o", work + "/want.dat", *names)
    assert read(out) == read(work + "/want.dat"), f"{out} is not what nibble trains"


def trains():
    """The model and the losses are the program's; each sees every step and can end the run."""
    seen = []
    data, out = [work + "/data.tsv"], work + "/is.dat"
    last = nibble.train(MODEL, data, out, seen.append, **STEPS)
    assert [p["step"] for p in seen] == [1, 2, 3, 4] and str(last) == str(seen[-1]), last
    assert seen[-1]["loss"] < seen[0]["loss"], seen
    same_as_the_program(out, 4)
    last = nibble.train(MODEL, data, out, lambda p: p["step"] == 2, **STEPS)
    assert last["step"] == 2, last
    same_as_the_program(out, 2)
    nibble.train(MODEL, data, out, **{**STEPS, "schedule": "linear", "precision": "f32",
                                      "bf16_master": False, "moment_type": "f32"})
    same_as_the_program(out, 4, schedule="linear", precision="f32", optimizer_state_mode="f32")


def ends(name, each, kind_, **options):
    """A run that an exception ends leaves a checkpoint and no result; returns its step."""
    out, checkpoints = f"{work}/{name}.dat", f"{work}/{name}"
    with raises(kind_):
        nibble.train(MODEL, [work + "/data.tsv"], out, each, checkpoint_dir=checkpoints,
                     **{**STEPS, **options})
    assert not os.path.exists(out)
    (left,) = [n for n in os.listdir(checkpoints) if n.endswith(".ckpt")]
    return int(left[5:-5])


def ended():
    """Exceptions of the callback and Ctrl-C, in it and in a step."""
    assert ends("division", lambda p: 0 // (p["step"] - 3), ZeroDivisionError) == 3
    assert ends("ctrl-c", lambda p: signal.raise_signal(signal.SIGINT), KeyboardInterrupt) == 1

    def later(p):
        if p["step"] == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    steps = ends("ctrl-c-in-a-step", later, KeyboardInterrupt, steps=100000)
    assert 1 <= steps < 100000, steps
    nibble.train(MODEL, [work + "/data.tsv"], work + "/on.dat", resume=True,
                 checkpoint_dir=work + "/division", **STEPS)
    same_as_the_program(work + "/on.dat", 4)


def examples():
    """The two programs beside the module, which find the library by the loader's search."""
    def start(name, *args, code=0):
        env = dict(os.environ, LD_LIBRARY_PATH=INSTALLED + "/lib")
        env.pop("NIBBLE_LIBRARY", None)
        r = subprocess.run([sys.executable, "-B", f"{ROOT}/examples/python/{name}", *args],
                           capture_output=True, env=env, check=False)
        assert r.returncode == code, (name, r)
        return (r.stderr if code else r.stdout).decode()

    said = start("generate.py", MODEL, STORY)
    assert said == run("generate", "-q", "--device", "cpu", "-m", MODEL, "-n", 100, "-p", STORY)
    said = start("train.py", MODEL, work + "/data.tsv", work + "/tuned.dat")
    assert said.startswith("step 1 of ") and "tuned.dat: " in said, said
    run("inspect", "--verify", "-q", "--model-dir", MODEL, work + "/tuned.dat")
    assert "/no/such" in start("generate.py", "/no/such", STORY, code=1)
    assert "/no/such" in start("train.py", MODEL, "/no/such.tsv", work + "/x.dat", code=1)


with open(work + "/data.tsv", "w", encoding="ascii") as table:
    table.writelines(f"what is {i}?\tit is {i * i}\n" for i in range(12))
with raises(OSError, "/no/such/library"):
    nibble.load("/no/such/library")
nibble.load(INSTALLED + "/lib/libnibble.so.0")
for test in (structures, enumerators, functions, answers, cancelled, errors, trains, ended,
             examples):
    test()
