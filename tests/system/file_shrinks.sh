#!/bin/sh
# Weights that are truncated or overwritten at random moments of generate and train.
# usage: tests/system/file_shrinks.sh NIBBLE, NB_SHRINKS files (60; with sanitizers 20)
set -eu
nibble=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
files=60
! grep -qF __asan_init "$nibble" || files=20
python3 -B "$(dirname "$0")/file_shrinks.py" "$nibble" "$work" "${NB_SHRINKS:-$files}"
