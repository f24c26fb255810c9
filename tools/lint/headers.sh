#!/bin/sh
# Compiles every header alone, with the include paths of a build: each must bring what it needs.
# usage: tools/lint/headers.sh BUILD
set -eu
if [ $# -ne 1 ] || [ ! -f "$1/compile_commands.json" ]; then
    echo "usage: headers.sh BUILD, a build directory with compile_commands.json" >&2
    exit 2
fi
flags=$(grep -oE -- ' (-I|-isystem ?)/[^ "]+' "$1/compile_commands.json" | sort -u)
cd "$(dirname "$0")/../.."

failed=0
for header in $(find include src -name '*.h' ! -path 'src/backend/cuda/*' | sort); do
    # shellcheck disable=SC2086
    echo "#include \"${header#*/}\"" |
        cc -std=gnu17 -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -fsyntax-only -Wall -Wextra -Werror \
            $flags -Iinclude -Isrc -x c - || {
        echo "$header: does not compile alone"
        failed=1
    }
done
exit $failed
