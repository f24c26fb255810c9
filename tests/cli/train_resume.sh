# A run that was killed and resumed has the weights, moments and losses of an uninterrupted one.
# NB_TRAIN_TESTS=all: with every combination of threads.
# shellcheck shell=sh disable=SC2154 # $work and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"
if [ "${NB_TRAIN_TESTS:-}" = all ]; then
    set -- all
else
    set --
fi
check "killed and resumed" 0 python3 -B "$(dirname "$0")/train_resume.py" "$nibble" "$work" "$@"
says out "killed and resumed runs"
finish
