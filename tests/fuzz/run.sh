#!/bin/sh
# Fuzzes one target for some seconds; new inputs go to BUILD/corpus-T, the seeds stay as they are.
# usage: tests/fuzz/run.sh BUILD TARGET SECONDS
set -eu
build=$1 target=$2 seconds=$3
seeds=$(dirname "$0")/corpus/$target
[ -d "$seeds" ] || {
    echo "fuzz: no target '$target'; there are $(cd "$(dirname "$0")/corpus" && echo *)" >&2
    exit 2
}
work=$build/corpus-$target
mkdir -p "$work"
dict=$(dirname "$0")/$target.dict
[ -f "$dict" ] && dict="-dict=$dict" || dict=
exec "$build/fuzz_$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
    -artifact_prefix="$build/crash-$target-" -print_final_stats=1 $dict "$work" "$seeds"
