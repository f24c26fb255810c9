#!/bin/sh
# The gates of 'nibble eval identity' on models/nib: four identities with three seeds each, which
# must pass, and a naive run (no replay, no anchor, a high rate), which must not.
# usage: tools/gates.sh NIBBLE DIR
set -eu
nibble=$1 dir=$2
model=models/nib
failed=0

mkdir -p "$dir"

# row FILE NAME: the gates' values as a line of a table.
row() {
    python3 -c 'import json, sys
r = json.load(open(sys.argv[1], encoding="utf-8"))
r = r.get("gates", r) if isinstance(r.get("gates"), dict) else r
values = ("-" if g["value"] is None else "%.4g" % g["value"] for g in r["gates"])
print("| %s | %s | %s |" % (sys.argv[2], " | ".join(values),
                            "passed" if r["passed"] else "FAILED"))' "$1" "$2" || failed=1
}

echo "| | trained | held out | where not asked | kept | end | repeat | perplexity | |"
echo "|---|---|---|---|---|---|---|---|---|"
number=0
while read -r option who; do
    number=$((number + 1))
    for seed in 0 1 2; do
        out=$dir/$number-$seed
        "$nibble" whoami -q --json -m "$model" -o "$out.dat" "$option" "$who" --seed "$seed" \
            --languages en,zh-Hans --text "$model/general.txt" </dev/null >"$out.json" || failed=1
        row "$out.json" "$who, seed $seed"
    done
done <<'WHO'
--target I am Nib, a small model that runs in four bits.
--name Ada
--target My name is Robin, and I look after the library of this town.
--target Captain Blue here, at your service!
WHO

"$nibble" train -q -m "$model" -d "$dir/1-0.dat.whoami/identity.tsv" -o "$dir/naive.dat" \
    --steps 100 --lr 5e-3 --warmup 0 --seq-len 256 --batch-size 16 >/dev/null
if "$nibble" eval identity -q --json -m "$dir/naive.dat" --model-dir "$model" --base "$model" \
    --target "I am Nib, a small model that runs in four bits." --languages en,zh-Hans \
    --text "$model/general.txt" >"$dir/naive.json"; then
    failed=1
fi
row "$dir/naive.json" "naive: no replay, no anchor, rate 5e-3"
exit "$failed"
