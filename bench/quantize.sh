#!/bin/sh
# The codec on this machine, then a whole model of Qwen3-4B shapes (8 GB of random bf16) quantised
# by each method: seconds, GB/s per core, peak memory. Files go to $TMPDIR and are removed.
# usage: bench/quantize.sh NIBBLE
set -eu
nibble=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

"$nibble" bench ops
echo
"$nibble" synth 4b "$work/model" -q
cores=$("$nibble" doctor --json | sed -n 's/.*"usable": \([0-9]*\).*/\1/p' | head -n 1)
printf '%-8s  %8s  %8s  %14s  %12s\n' method seconds GB/s 'GB/s per core' 'peak memory'
for method in rtn 4over6 sweep; do
    for round in 1 2 3; do # the median of three
        "$nibble" quantize "$work/model" "$work/out.dat" --method "$method" --json -q >"$work/$round.json"
        sed -n 's/.*"seconds": \([0-9.]*\).*/\1/p' "$work/$round.json"
    done | sort -n | sed -n 2p >"$work/seconds"
    peak=$(sed -n 's/.*"peak_rss": \([0-9]*\).*/\1/p' "$work/3.json")
    bytes=$(sed -n 's/.*"source_bytes": \([0-9]*\).*/\1/p' "$work/3.json")
    awk -v m="$method" -v s="$(cat "$work/seconds")" -v b="$bytes" -v c="$cores" -v p="$peak" \
        'BEGIN { printf "%-8s  %8.2f  %8.2f  %14.2f  %8.1f MiB\n", m, s, b/s/1e9, b/s/1e9/c, p/1048576 }'
done
