"""Compares nibble with the safetensors, gguf, tokenizers and jinja2 packages and with numpy.

usage: check.py NIBBLE SCRATCH [NAME...]

Prints a line per check; exit code 1 if one failed. Called by run.sh.
"""

import os
import shutil
import sys
import time
import traceback

import in_checks
import out_checks
import quant_checks
import text_checks
from harness import Box, Failed, Skipped


def run_one(box, check, args):
    """'ok', 'FAIL' or 'SKIP', and why, or what a check has to say."""
    try:
        return "ok", check(box, *args) or ""
    except Skipped as e:
        return "SKIP", str(e)
    except Failed as e:
        return "FAIL", str(e)
    except Exception:  # pylint: disable=broad-except; whatever a package throws is a finding
        return "FAIL", traceback.format_exc().strip()


def main():
    nibble, scratch, *wanted = sys.argv[1:]
    data = os.environ.get("DATA", "")
    counts = {"ok": 0, "FAIL": 0, "SKIP": 0}
    rows = out_checks.CHECKS + quant_checks.CHECKS + in_checks.CHECKS + text_checks.CHECKS
    for number, (title, check, *args) in enumerate(rows):
        if wanted and not any(w in title for w in wanted):
            continue
        box, start = Box(nibble, os.path.join(scratch, str(number)), data), time.monotonic()
        result, why = run_one(box, check, args)
        counts[result] += 1
        print(f"{result:4}  {title} ({time.monotonic() - start:.1f} s)" + (why and f": {why}"),
              flush=True)
        shutil.rmtree(box.root)
    if counts["SKIP"]:
        print(f"{counts['SKIP']} skipped")
    print(f"{counts['ok']} passed, {counts['FAIL']} failed")
    return 1 if counts["FAIL"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
