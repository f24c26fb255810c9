# How long a run takes, as 'nibble plan' estimates it.
# shellcheck shell=sh disable=SC2154 # $work and $nibble are lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"

check "plan" 0 python3 -B "$here/plan_time.py" "$nibble" "$work"
cat "$work/out"
finish
