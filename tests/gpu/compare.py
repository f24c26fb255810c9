"""Compares two files of `nibble debug hf`, or one with a reference of the same names.

usage: compare.py WANT GOT KIND:LIMIT...

KIND is the start of names, such as logits, grad. or adamw3. LIMIT is the largest relative error of
a tensor, by norm, or with a leading c the smallest cosine: grad.:c0.999. Prints the worst tensor of
each kind; the exit code is 1 if one is beyond its limit.
"""
import array
import json
import math
import struct
import sys

try:
    import numpy
except ImportError:
    numpy = None # slower, the same results


def floats(raw):
    """The values of f32 bytes."""
    return numpy.frombuffer(raw, "<f4") if numpy else array.array("f", bytes(raw))


def read(path):
    """{name: (shape, values)} of the f32 tensors of a safetensors file."""
    with open(path, "rb") as f:
        data = f.read()
    (size,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, t in json.loads(data[8:8 + size]).items():
        if name != "__metadata__" and t["dtype"] == "F32":
            start, end = (8 + size + i for i in t["data_offsets"])
            tensors[name] = t["shape"], floats(memoryview(data)[start:end])
    return tensors


def dot(a, b):
    """The sum of products."""
    if numpy:
        return float(numpy.dot(numpy.asarray(a, "f8"), numpy.asarray(b, "f8")))
    return math.fsum(x * y for x, y in zip(a, b))


def is_finite(a):
    """Whether all values are."""
    return bool(numpy.isfinite(a).all()) if numpy else all(map(math.isfinite, a))


def error(a, b):
    """The norm of a - b over that of a."""
    off = numpy.asarray(a, "f8") - b if numpy else [x - y for x, y in zip(a, b)]
    off = math.sqrt(dot(off, off))
    return off / max(math.sqrt(dot(a, a)), 1e-30) if off else 0.0


def cosine(a, b):
    """The cosine of the angle between two vectors."""
    return dot(a, b) / max(math.sqrt(dot(a, a) * dot(b, b)), 1e-30)


def worst_of(want, got, kind, measure, least):
    """(value, name) of the worst tensor whose name begins with `kind`."""
    values = []
    for name, (shape, x) in want.items():
        if not name.startswith(kind):
            continue
        assert name in got, f"'{name}' is missing"
        assert (shape or [1]) == (got[name][0] or [1]), (name, shape, got[name][0])
        assert is_finite(got[name][1]), f"'{name}' is not finite"
        values.append((measure(x, got[name][1]), name))
    assert values, f"there is nothing called '{kind}...'"
    return (min if least else max)(values)


def main():
    """Goes through the kinds."""
    want, got, failed = read(sys.argv[1]), read(sys.argv[2]), False
    for arg in sys.argv[3:]:
        kind, limit = arg.rsplit(":", 1)
        is_cosine = limit.startswith("c")
        bound = float(limit.lstrip("c"))
        value, name = worst_of(want, got, kind, cosine if is_cosine else error, is_cosine)
        bad = value < bound if is_cosine else not value <= bound
        failed = failed or bad
        print(f"{'FAIL ' if bad else ''}{kind}* {'cosine' if is_cosine else 'error'} {value:.7g}, "
              f"{'at least' if is_cosine else 'at most'} {bound:g}, worst {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
