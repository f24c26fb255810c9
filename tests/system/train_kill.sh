#!/bin/sh
# kill -9 at random moments of training, then --resume: nothing is lost but the step under way.
# usage: tests/system/train_kill.sh NIBBLE, NB_TRAIN_KILLS kills (15)
set -eu
nibble=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -B "$(dirname "$0")/train_kill.py" "$nibble" "$work" "${NB_TRAIN_KILLS:-15}"
