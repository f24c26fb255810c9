"""train.py - trains every parameter of a model until the loss is low; Ctrl-C ends it.

usage: train.py MODEL DATA OUT
"""
import sys

import nibble

ENOUGH = 0.05  # loss


def each(p):
    """Shows a step; true ends the run."""
    print("step {step} of {steps}: loss {loss:.4f}, {tokens_per_s:.0f} tokens/s".format(**p))
    return p["loss"] < ENOUGH


if len(sys.argv) != 4:
    sys.exit(__doc__)
model, data, out = sys.argv[1:]
try:
    last = nibble.train(model, [data], out, each, epochs=20, seq_len=128, lr=1e-4)
    print(f"{out}: {last['step']} steps, last loss {last['loss']:.4f}")
except nibble.NibbleError as error:
    sys.exit(str(error))
except KeyboardInterrupt:
    sys.exit(130)
