#!/bin/sh
# Runs clang-format on all C and CUDA sources that git knows or would add.
# usage: tools/lint/format.sh -i | --dry-run -Werror
set -eu
cd "$(dirname "$0")/../.."
git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | while read -r file; do
    [ ! -f "$file" ] || echo "$file" # deleted, and not yet committed
done | xargs clang-format "$@"
