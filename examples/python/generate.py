"""generate.py - one answer, printed as it grows; Ctrl-C ends it.

usage: generate.py MODEL TEXT
"""
import sys

import nibble

if len(sys.argv) != 3:
    sys.exit(__doc__)
try:
    for piece in nibble.Model(sys.argv[1]).generate(sys.argv[2], max_tokens=100):
        print(piece, end="", flush=True)
    print()
except nibble.NibbleError as error:
    sys.exit(str(error))
except KeyboardInterrupt:
    sys.exit(130)
