# Progress lines and answers on a terminal of 40, 80 and 200 columns, and of one that changes.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/cli/lib.sh"

parts="train resized interrupted failed bars chat chat_resized wide ctrl_c type_ahead"
for part in $parts; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$root/tests/cli/terminal.py" "$nibble" "$root/models/nib" \
        "$work/$part" $part
    rm -rf "${work:?}/$part"
done
finish
