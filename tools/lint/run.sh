#!/bin/sh
# Runs every check of the sources; ends with 'lint: ok', or with exit status 1.
# usage: tools/lint/run.sh BUILD
# NODES: how far clang's analyzer follows a function (75000; its own default is 225000, which takes
# three times as long).
set -eu
if [ $# -ne 1 ] || [ ! -f "$1/compile_commands.json" ] || [ ! -x "$1/nibble" ]; then
    echo "usage: run.sh BUILD, a finished build with compile_commands.json" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
lint=$PWD/tools/lint
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# Reads names of files; the arguments go to clang-tidy. The build may be one of another compiler, so
# flags that clang does not know are no errors.
tidy_files() {
    xargs -r -d '\n' -P "$(nproc)" -n 1 clang-tidy --quiet -p "$build" --extra-arg=-Wno-error \
        --extra-arg=-Wno-unknown-warning-option --extra-arg=-Xclang \
        --extra-arg=-analyzer-config --extra-arg=-Xclang \
        --extra-arg="max-nodes=${NODES:-75000}" --extra-arg=-idirafter \
        --extra-arg="$tmp/include" "$@" >>"$tmp/log" 2>&1
}

tidy() {
    source=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt")
    sed -n 's/^ *"file": "\(.*\.c\)",*$/\1/p' "$build/compile_commands.json" |
        grep -F "$source/src/" | sort -u >"$tmp/files"
    mkdir "$tmp/include"
    # clang has an omp.h only with libomp; that of gcc uses an attribute in a way clang does not know
    printf '#define __malloc__(free)\n#include "%s"\n#undef __malloc__\n' \
        "$(cc -print-file-name=include/omp.h)" >"$tmp/include/omp.h"
    result=0
    grep '/base/status\.c$' "$tmp/files" | tidy_files || result=1
    grep -v '/base/status\.c$' "$tmp/files" |
        tidy_files --extra-arg=-include --extra-arg="$lint/analyzer.h" || result=1
    grep -vE '^[0-9]+ warnings? (generated|treated as)' "$tmp/log" || true
    return $result
}

failed=""
step() { # step NAME COMMAND...
    name=$1
    shift
    echo "lint: $name"
    "$@" || failed="$failed $name"
}

step includes python3 -B "$lint/includes.py" .
step sizes python3 -B "$lint/sizes.py" . -v
step rules python3 -B "$lint/rules.py" . "$build/nibble"
step commits python3 -B "$lint/commits.py" .
step headers sh "$lint/headers.sh" "$build"
step clang-format "$lint/format.sh" --dry-run -Werror
step clang-tidy tidy

if [ -n "$failed" ]; then
    echo "lint: failed:$failed" >&2
    exit 1
fi
echo "lint: ok"
