#!/bin/sh
# A write that finds no room fails with exit code 1 and one line, and leaves what was there. On a
# small tmpfs where we may mount one, and under a limit on file sizes.
# usage: tests/system/full_disk.sh NIBBLE
set -eu
nibble=$(realpath "$1")
work=$(mktemp -d)
mounted=
cleanup() {
    [ -z "$mounted" ] || umount "$work/t" 2> /dev/null || :
    rm -rf "$work"
}
trap cleanup EXIT
cd "$work"

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# The same file or directory, byte by byte.
same() {
    if [ -d "$1" ]; then diff -rq "$1" "$2" > /dev/null; else cmp -s "$1" "$2"; fi
}

cat > config.json <<'END'
{"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
 "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
 "tie_word_embeddings": true}
END
"$nibble" synth tiny old.src --seed 1 --quiet
"$nibble" synth --config config.json new.src --seed 2 --quiet # 24 MB

# refused HOW WORDS COMMAND...: one line with these words, and the targets as they were.
refused() {
    how=$1 words=$2
    shift 2
    rc=0
    "$@" > stdout 2> stderr || rc=$?
    [ $rc -eq 1 ] || fail "$how: exit code $rc, not 1: $(cat stderr)"
    [ ! -s stdout ] || fail "$how: something on standard output: $(cat stdout)"
    [ "$(wc -l < stderr)" -eq 1 ] || fail "$how: not one line on standard error: $(cat stderr)"
    grep -q "$words" stderr || fail "$how: '$words' is not in: $(cat stderr)"
    for name in model.dat model.gguf model.safetensors model; do
        same "t/$name" "old/$name" || fail "$how: t/$name is not what it was"
    done
    [ "$(find t -mindepth 1 -maxdepth 1 | wc -l)" -eq 4 ] || fail "$how: left $(ls -A t)"
}

old_models() {
    for name in model.dat model.gguf model.safetensors model; do
        "$nibble" convert old.src "t/$name" --quiet
    done
    rm -rf old
    cp -r t old
}

# every_target HOW WORDS COMMAND...: the command gets convert or quantize, source and target.
every_target() {
    how=$1 words=$2
    shift 2
    for name in model.dat model.gguf model.safetensors model; do
        refused "$how, convert to $name" "$words" "$@" convert new.src "t/$name" --quiet
    done
    refused "$how, quantize to model.dat" "$words" "$@" quantize new.src t/model.dat --quiet
    refused "$how, synth" "$words" "$@" synth --config config.json t/fresh --quiet
}

checked=
mkdir t
if mount -t tmpfs -o size=12m none t 2> /dev/null; then
    mounted=yes
    old_models
    every_target "full disk" "No space left on device" "$nibble"
    dd if=/dev/zero of=t/model/filler bs=64k 2> /dev/null || : # nothing at all is left
    cp t/model/filler old/model/filler
    refused "no block left" "No space left on device" "$nibble" convert old.src t/model.gguf --quiet
    umount t
    mounted=
    checked="a full tmpfs"
fi

# The shell counts in blocks of 512 bytes (dash) or 1024 (others): 2 or 4 MiB.
limited() {
    (
        trap '' XFSZ # else the kernel ends the program before it can say why
        ulimit -f 4096
        exec "$nibble" "$@"
    )
}

if (trap '' XFSZ && ulimit -f 4096) 2> /dev/null; then
    rm -rf t
    mkdir t
    old_models
    every_target "file size limit" "File too large" limited
    checked="${checked:+$checked and }a limit on file sizes"
fi

[ -n "$checked" ] || { echo "full disk: neither tmpfs nor ulimit can be had here" >&2; exit 77; }
echo "full disk: refused with one line, old models intact, under $checked"
