#!/bin/sh
# What nibble does today, in a minute: a small random model is made, quantised, inspected, taken
# through every format and back, and run; a vocabulary and a data set are made. Everything lands in
# one folder.
# usage: tools/demo.sh NIBBLE DIR
set -eu
nibble=$1 dir=$2

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '$ nibble %s\n' "$*"; "$nibble" "$@"; }

rm -rf "$dir"
mkdir -p "$dir"

say "1. A small Qwen3 with random weights"
run synth tiny "$dir/model"

say "2. Its projections in four bits, three ways of choosing the block scales"
for method in rtn 4over6 sweep; do
    printf '%-8s' "$method"
    "$nibble" quantize "$dir/model" "$dir/$method.dat" --method "$method" -q --report "$dir/$method.json"
    sed -n 's/.*"snr_db": \([0-9]*[.][0-9]\{0,2\}\).*/\1 dB/p' "$dir/$method.json" | tail -n 1
done

say "3. What is in the file, and is it sound?"
run inspect "$dir/sweep.dat" --verify --model-dir "$dir/model" | tail -n 12

say "4. Through every format and back, bit for bit"
run convert "$dir/sweep.dat" "$dir/modelopt" --model-dir "$dir/model"
run convert "$dir/modelopt" "$dir/compressed" --layout compressed-tensors
run convert "$dir/compressed" "$dir/sweep.gguf"
run convert "$dir/sweep.gguf" "$dir/back.dat"
cmp "$dir/sweep.dat" "$dir/back.dat" && echo "sweep.dat and back.dat are the same, byte for byte"

say "5. Text: a vocabulary of its own, a data set, and what of it is trained on"
mkdir "$dir/text"
run tokenizer train --vocab 1024 -o "$dir/text/tokenizer.json" README.md docs/*.md
run data whoami -o "$dir/text/who.tsv" --name Ada
run data show -m "$dir/text" -d "$dir/text/who.tsv" -n 2 --color always

say "6. Every path through the model, compared"
run parity -m "$dir/sweep.dat" --model-dir "$dir/model"

say "7. This machine"
run doctor

say "Done. All files are in $dir/. Try next:"
echo "  $nibble inspect $dir/sweep.gguf"
echo "  $nibble quantize PATH-TO-A-QWEN3 my.dat        # any Hugging Face Qwen3 directory"
echo "  $nibble generate -m PATH-TO-A-QWEN3 -p 'What is a nibble?'"
echo "  $nibble bench decode --synthetic 0.6b"
