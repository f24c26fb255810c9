# The outputs of training: models, reports, answers; runs that fail late.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"

parts="two_level growth gguf late changed paths stopped memory answers settings"
for part in $parts; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$here/train_output.py" "$nibble" "$work/$part" $part
    rm -rf "${work:?}/$part"
done
finish
