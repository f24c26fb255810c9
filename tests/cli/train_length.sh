# Training: how many steps a run has, and what it says about its data at the start.
# shellcheck shell=sh disable=SC2154 # $work is lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"
for part in epochs rows; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$here/train_length.py" "$nibble" "$work/$part" $part
    cat "$work/out"
    rm -rf "${work:?}/$part"
done
finish
