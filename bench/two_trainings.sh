#!/bin/sh
# Two training runs at once on the same cores: what each gets of the speed of one by itself.
# usage: bench/two_trainings.sh NIBBLE [ROUNDS]
set -eu
nibble=$1
rounds=${2:-3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

train() { # train FILE: tokens a second of 20 steps
    "$nibble" bench train --synthetic tiny --seq-len 256 --batch-size 4 --steps 20 -q --json >"$1.json"
    sed -n 's/.*"tokens_per_s": \([0-9.]*\).*/\1/p' "$1.json" >"$1"
}

printf '%10s %10s %10s %8s   tokens a second\n' alone first second share
i=0
while [ $i -lt "$rounds" ]; do
    train "$work/alone"
    train "$work/first" &
    train "$work/second"
    wait
    awk -v a="$(cat "$work/alone")" -v b="$(cat "$work/first")" -v c="$(cat "$work/second")" \
        'BEGIN { printf "%10.0f %10.0f %10.0f %7.0f%%\n", a, b, c, 100 * (b < c ? b : c) / a }'
    i=$((i + 1))
done
