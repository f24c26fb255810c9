#!/bin/sh
# Compares nibble's files with the packages that others read and write them with.
# usage: tests/interop/run.sh NIBBLE [NAME...]
#
# The packages live in build/interop-venv, which is made again when requirements.txt changes. A
# NAME runs only the checks whose title contains it. DATA names a folder with tokenizer/ (Qwen3's
# tokenizer.json, and cases.jsonl), configs/Qwen3-0.6B/ and corpora/; checks that need what it lacks
# are skipped.
set -eu

[ $# -ge 1 ] || { echo "usage: $0 NIBBLE [NAME...]" >&2; exit 2; }
[ -x "$1" ] || { echo "$0: '$1' is not a program" >&2; exit 2; }
nibble=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/build/interop-venv

"$root/tools/deps.sh" interop

if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
    rm -rf "$venv"
    mkdir -p "$root/build"
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$venv/requirements.txt" # last: marks the venv as complete
fi

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" "$here/check.py" "$nibble" "$tmp" "$@"
