#!/bin/sh
# tools/deps.sh looks for every library that the build asks pkg-config for.
# usage: deps.sh NIBBLE [ROOT]
set -eu
root=${2:-$(cd "$(dirname "$0")/../.." && pwd)}
cd "$root"
libraries=$(cat CMakeLists.txt tests/CMakeLists.txt |
    sed -nE 's/^ *pkg_check_modules\( *[A-Za-z0-9_]+ +([^)]*)\).*/\1/p' | tr ' ' '\n' |
    sed -E 's/[<>=].*//' | grep -vxE '|REQUIRED|QUIET|IMPORTED_TARGET|GLOBAL|NO_CMAKE.*')
[ -n "$libraries" ] || { echo "found no pkg_check_modules in CMakeLists.txt"; exit 1; }
failed=0
for library in $libraries; do
    grep -qE "pkg-config --exists ([^\"]* )?${library}[ \"]" tools/deps.sh || {
        echo "tools/deps.sh does not look for $library"
        failed=1
    }
done
exit $failed
