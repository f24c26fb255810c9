#!/bin/sh
# The fast linters: who includes whom, sizes, names and forms. `make lint` runs these and more.
# usage: lint.sh NIBBLE
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
failed=0
python3 -B "$root/tools/lint/includes.py" "$root" || failed=1
python3 -B "$root/tools/lint/sizes.py" "$root" || failed=1
python3 -B "$root/tools/lint/rules.py" "$root" "$1" || failed=1
exit $failed
