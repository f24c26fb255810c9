#!/bin/sh
# Makes the model nib anew: its data from the corpora, its tokenizer, then the training run, which
# a second call goes on with where it ended.
# usage: train.sh NIBBLE CORPORA OUT [more options of 'nibble train']
#
# CORPORA holds tinystories/ and ms_chitchat/. OUT gets the data, checkpoints, the log and the
# model. 18 M tokens: an hour and a half on 2 cores, half an hour on 16.
set -eu
nibble=$1 corpora=$2 out=$3
shift 3
here=$(dirname "$0")

mkdir -p "$out/shape"
cp "$here"/shape/*.json "$out/shape"
if [ ! -f "$out/shape/tokenizer.json" ]; then
    python3 "$here/prepare.py" "$corpora" "$out/data"
    "$nibble" tokenizer train --vocab 8192 -o "$out/shape/tokenizer.json" "$out/data/tokenizer.txt"
fi
for file in "$out"/data/train-*; do
    set -- "$@" -d "$file"
done
"$nibble" train -m "$out/shape" --from-scratch -o "$out/model" --steps 2200 --seq-len 256 \
    --batch-size 32 --lr 3e-3 --warmup 100 --schedule linear --final-lr-frac 0.02 \
    --weight-decay 0.1 --precision nvfp4 --master-dtype bf16 --optimizer-state-mode int8 --seed 1 \
    --eval-data "$out/data/held-out.jsonl" --eval-data "$out/data/held-out.txt" --eval-every 250 \
    --checkpoint-dir "$out/checkpoints" --save-every 50 --resume --log "$out/train.jsonl" "$@"
