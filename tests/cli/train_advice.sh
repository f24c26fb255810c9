# Warnings about runs that cannot teach much, the warm-up that is chosen, checkpoints by time.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"

parts="few warmup warmup_resumed loss by_time by_time_options"
! sanitized || parts="warmup_resumed by_time_options" # the others are about numbers
for part in $parts; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$here/train_advice.py" "$nibble" "$work/$part" $part
    rm -rf "${work:?}/$part"
done
finish
