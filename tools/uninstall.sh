#!/bin/sh
# Removes the files that the last `make install` of a build wrote, and folders that are empty then.
# usage: tools/uninstall.sh BUILD PREFIX; DESTDIR as for the installation
set -eu
manifest=$1/install_manifest.txt
prefix=$2
if [ ! -f "$manifest" ]; then
    echo "uninstall: '$manifest' is missing: nothing was installed from here" >&2
    exit 1
fi
if grep -qv "^$prefix/" "$manifest"; then
    echo "uninstall: what was installed from here is not in '$prefix': name its PREFIX" >&2
    exit 1
fi
while read -r file || [ -n "$file" ]; do
    rm -f "${DESTDIR:-}$file"
    rmdir -p "$(dirname "${DESTDIR:-}$file")" 2>/dev/null || :
done <"$manifest"
