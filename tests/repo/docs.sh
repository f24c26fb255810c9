#!/bin/sh
# docs/cli holds what the option tables say.
# usage: docs.sh NIBBLE [ROOT]
set -eu
root=${2:-$(cd "$(dirname "$0")/../.." && pwd)}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
"$1" help --write-docs "$dir"
diff -r "$root/docs/cli" "$dir" || {
    echo "docs/cli is not what the program says of itself: run make docs"
    exit 1
}
