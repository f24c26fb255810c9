#!/bin/sh
# Arguments that are no models, and options that do not exist: exit code 1 or 2, one line on
# standard error, nothing on standard output, nothing written.
# usage: tests/cli/hostile.sh NIBBLE
set -eu
nibble=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
checked=0

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

mkdir in out in/empty.dir
cd in
mkfifo pipe.dat pipe.gguf pipe.safetensors
for e in dat safetensors gguf; do
    : > "empty.$e"
    head -c 300 /dev/zero > "zeros.$e"
    head -c 300 /dev/zero | tr '\0' '\377' > "ones.$e"
    ln -s /dev/null "null.$e"
    ln -s loop.$e "loop.$e"
    mkdir "dir.$e"
done
mkdir broken.dir
echo '{"weight_map": {"a": "../zeros.safetensors"}}' \
    > broken.dir/model.safetensors.index.json
echo 'text' > model.bin
echo 'text' > noending
cd ..
find in | sort > in.list

# refused CODE WORDS ARG...: runs nibble in a subshell that must fail so, and in time.
refused() {
    code=$1 words=$2
    shift 2
    rc=0
    timeout 20 "$nibble" "$@" > stdout 2> stderr < /dev/null || rc=$?
    [ "$rc" -eq "$code" ] || fail "'$*': exit code $rc, not $code: $(cat stderr)"
    [ ! -s stdout ] || fail "'$*': something on standard output"
    [ "$(wc -l < stderr)" -eq 1 ] || fail "'$*': not one line on standard error: $(cat stderr)"
    [ "$(tr -d '\n' < stderr | tr -cd '\000-\037\177' | wc -c)" -eq 0 ] ||
        fail "'$*': control characters on standard error"
    grep -q -- "$words" stderr || fail "'$*': '$words' is not in: $(cat stderr)"
    find in | sort | cmp -s - in.list || fail "'$*' changed its input directory"
    [ -z "$(ls -A out)" ] || fail "'$*' left $(ls -A out)"
    checked=$((checked + 1))
}

# ---- things that are no models ----

# every_command SRC WORDS
every_command() {
    refused 1 "$2" inspect "$1"
    refused 1 "$2" inspect "$1" --verify
    refused 1 "$2" inspect "$1" --json
    for target in out/model.dat out/model.safetensors out/model.gguf out/model; do
        refused 1 "$2" convert "$1" "$target"
        refused 1 "$2" quantize "$1" "$target"
    done
}

for e in dat safetensors gguf; do
    every_command "in/missing.$e" "No such file"
    every_command "in/pipe.$e" "not a regular file"
    every_command "in/null.$e" "not a regular file"
    every_command "in/empty.$e" "file ends early"
    every_command "in/loop.$e" "cannot open"
    every_command "in/dir.$e" "no weights"
    every_command "in/ones.$e" "cannot read"
    every_command "in/zeros.$e/x.dat" "Not a directory"
done
for e in dat safetensors gguf; do
    every_command "in/zeros.$e" "cannot read"
done
every_command in/empty.dir "no weights"
every_command in/broken.dir "not in a file of this directory"
every_command in "several weights files\|holds both"
every_command in/model.bin "cannot tell what"
every_command in/noending "cannot tell what"
every_command in/missing "cannot tell what\|No such file"
every_command /dev/null "cannot tell what\|not a regular file"
every_command "" "cannot tell what\|No such file"
every_command "$(printf 'in/\033[31mred\n.dat')" "No such file"

# ---- targets that cannot be ----

"$nibble" synth tiny good --quiet
refused 1 "a directory has that name" convert good in/dir.dat
refused 1 "not a regular file" convert good in/pipe.dat
refused 1 "cannot create" convert good out/missing/model.dat
refused 1 "cannot create" convert good out/missing/model
refused 1 "cannot write" convert good out/model.bin
refused 1 "a file has that name" convert good in/noending
refused 1 "both source and target" convert good good
refused 1 "will not write a model into" convert good in
refused 2 "no size '5b'" synth 5b out/model
refused 2 "not the name of a directory" synth tiny out/model.gguf
refused 1 "No such file" synth --config in/missing.json out/model
refused 1 "No such file" convert good out/model.gguf --model-dir in/missing

# ---- bad usage ----

refused 2 "did you mean '--verify'" inspect good --verfy
refused 2 "did you mean '--dtype'" convert good out/model --dtyp bf16
refused 2 "did you mean '--two-level'" quantize good out/model --two-levels
refused 2 "did you mean '--shard-mb'" convert good out/model --shard_mb=1
refused 2 "did you mean 'quantize'" quantise good out/model
refused 2 "did you mean 'inspect'" inspct good
refused 2 "unknown command" frobnicate
refused 2 "unknown option '-z'" inspect good -z
refused 2 "takes keep|f32|f16|bf16, not 'f8'" convert good out/model --dtype f8
refused 2 "takes rtn|4over6|sweep" quantize good out/model --method best
refused 2 "needs a value" convert good out/model --dtype
refused 2 "takes true or false" inspect good --verify=yes
refused 2 "takes a whole number" inspect good --threads 0
refused 2 "takes a whole number" inspect good --threads -1
refused 2 "takes a whole number" inspect good --threads 99999999999999999999
refused 2 "takes a whole number" inspect good --threads 2x
refused 2 "takes a whole number" inspect good --threads ''
refused 2 "takes a number" synth tiny out/model --sigma nan
refused 2 "takes a number" synth tiny out/model --sigma 1e400
refused 2 "FILE is missing" inspect
refused 2 "DST is missing" convert good
refused 2 "unexpected argument" inspect good better
refused 2 "device takes" inspect good --device tpu

echo "hostile arguments: $checked calls refused as they should be"
