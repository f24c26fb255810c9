# A chat on a terminal whose window changes while somebody types: a few sessions of random keys,
# pastes and sizes; NB_CHAT_SESSIONS says how many.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"

check "windows that change" 0 python3 -B "$root/tests/cli/chat_resize.py" "$nibble" \
    "$root/models/nib" "$work" "${NB_CHAT_SESSIONS:-4}"
cat "$work/out"
finish
