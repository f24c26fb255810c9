# What --resume requires and prints; one run at a time.
# shellcheck shell=sh disable=SC2154 # $work is lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"
for part in alone says compute other; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$here/train_resume_rules.py" "$nibble" "$work/$part" $part
    cat "$work/out"
    rm -rf "${work:?}/$part"
done
finish
