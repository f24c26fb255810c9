# --stop-if-ppl-rises: when a run ends and which model is written, also after --resume.
# shellcheck shell=sh disable=SC2154 # $work is lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"
for part in rises resumed last nonsense; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$here/train_stop.py" "$nibble" "$work/$part" $part
    cat "$work/out"
    rm -rf "${work:?}/$part"
done
finish
