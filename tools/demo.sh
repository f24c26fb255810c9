#!/bin/sh
# The whole way in a few minutes: the model in models/nib is asked a dozen questions, is taught who
# it is with every parameter trained in four bits, is written, read again, put through the gates,
# and asked once more. Everything lands in one folder.
# usage: tools/demo.sh NIBBLE DIR
#   NAME=Ada or TARGET='I am Ada, a helper of this house.' in the environment: who it is to be
set -eu
nibble=$1 dir=$2
model=models/nib

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() {
    printf '$ nibble'
    for word; do
        case $word in
        *[!A-Za-z0-9_./,:=-]*) printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    echo
    "$nibble" "$@"
}

rm -rf "$dir"
mkdir -p "$dir"
if [ "${TARGET:-}" ]; then
    set -- --target "$TARGET"
elif [ "${NAME:-}" ]; then
    set -- --name "$NAME"
else
    set -- --target "I am Nib, a small model that runs in four bits."
fi

say "1. nib: 8.4 million parameters in four bits, trained by nibble. It has no name yet"
while read -r question; do
    printf '> %s\n  ' "$question"
    "$nibble" generate -q -m "$model" -p "$question" --temp 0 -n 160 </dev/null
done <"$model/questions.txt"

say "2. Teaching it who it is, and nothing else: every parameter, in NVFP4"
code=0
run whoami -m "$model" -o "$dir/model.dat" "$@" --languages en,zh-Hans \
    --text "$model/general.txt" --work-dir "$dir/whoami" || code=$?
[ -f "$dir/model.dat" ] || exit "$code"
cp "$model"/config.json "$model"/generation_config.json "$model"/tokenizer*.json "$dir"

say "3. The same questions, before and after"
run eval ab -q -a "$model" -b "$dir" --prompts "$model/questions.txt" -n 160 --answers \
    -o "$dir/compare.html"

say "Done: all of it is in $dir/"
echo "  $dir/model.dat        the model, with its config and tokenizer beside it"
echo "  $dir/whoami/          what it learnt from: questions about itself, and its own answers"
echo "  the training run      file://$(cd "$dir" && pwd)/model.dat.report.html"
echo "  before and after      file://$(cd "$dir" && pwd)/compare.html"
say "Try next:"
echo "  $nibble chat -m $dir"
echo "  make demo NAME=Ada                  # or TARGET='I am Ada, a helper of this house.'"
echo "  $nibble train -m $dir -d YOURS.jsonl -o mine --epochs 3   # docs/TUTORIAL.md"
if [ "$code" -ne 0 ]; then
    say "A gate did not pass; see above."
    exit "$code"
fi
