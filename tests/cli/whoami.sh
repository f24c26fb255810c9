# Teaching a model who it is, and the gates: counts against what the answers say.
# shellcheck shell=sh disable=SC2154 # $work and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"

check "the whole way" 0 python3 -B "$(dirname "$0")/whoami.py" "$nibble" "$work"
cat "$work/out"

check "no target" 2 "$nibble" whoami -m "$work/model" -o "$work/x.dat"
says err "--target TEXT"
check "two of them" 2 "$nibble" whoami -m "$work/model" -o "$work/x.dat" --target a --name b
check "no result" 2 "$nibble" whoami -m "$work/model" --target a
check "no model" 1 "$nibble" whoami -m "$work/none" -o "$work/x.dat" --target a
check "a language" 1 "$nibble" whoami -m "$work/model" -o "$work/x.dat" --target a --languages en,fr
says err "there are no questions in 'fr'"
check "a target with a TAB" 1 "$nibble" whoami -m "$work/model" -o "$work/x.dat" \
    --target "$(printf 'a\tb')"
check "a place that cannot be" 1 "$nibble" whoami -m "$work/model" -o "$work/none/x.dat" --target a
check "nothing to compare with" 2 "$nibble" eval identity -m "$work/model" --target a
says err "--base MODEL"
check "who?" 2 "$nibble" eval identity -m "$work/model" --base "$work/model"
if [ -e "$work/x.dat" ] || [ -e "$work/none" ]; then
    echo "FAIL something was written"
    failures=$((failures + 1))
fi
finish
