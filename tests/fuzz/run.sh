#!/bin/sh
# Fuzzes the targets that are named, or all of tests/fuzz/targets, for some seconds each, JOBS at a
# time. New inputs go to BUILD/corpus-TARGET; the seeds in tests/fuzz/corpus stay as they are.
# usage: tests/fuzz/run.sh BUILD SECONDS JOBS [TARGET...]
set -eu
# libFuzzer's C++ library is loaded before that of AddressSanitizer, which does not matter here.
export ASAN_OPTIONS="verify_asan_link_order=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
[ $# -ge 3 ] || { echo "usage: $0 BUILD SECONDS JOBS [TARGET...]" >&2; exit 2; }
build=$(cd "$1" && pwd) seconds=$2 jobs=$3
shift 3
cd "$(dirname "$0")"

# one TARGET: the fuzzer's log is shown if it found something
one() {
    grep -qxF -- "$1" targets || {
        echo "fuzz: no target '$1'; there are $(tr '\n' ' ' <targets)" >&2
        exit 2
    }
    log=$build/fuzz-$1.log
    mkdir -p "$build/corpus-$1"
    set -- "$1" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
        -artifact_prefix="$build/crash-$1-" -print_final_stats=1
    target=$1
    [ ! -f "$target.dict" ] || set -- "$@" -dict="$target.dict"
    shift
    "$build/fuzz_$target" "$@" "$build/corpus-$target" "corpus/$target" >"$log" 2>&1 || {
        cat "$log"
        echo "fuzz: $target failed" >&2
        exit 1
    }
    echo "fuzz: $target, $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs"
}

if [ $# -eq 1 ]; then
    one "$1"
    exit
fi
if [ $# -eq 0 ]; then
    # shellcheck disable=SC2046 # names without blanks
    set -- $(cat targets)
fi
printf '%s\n' "$@" | xargs -n 1 -P "$jobs" sh "./$(basename "$0")" "$build" "$seconds" 1
