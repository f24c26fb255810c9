#!/bin/sh
# Every public header compiles alone, as C17 and as C++17.
# usage: headers.sh NIBBLE [INCLUDE], a folder with nibble.h and nibble/
set -eu
include=${2:-$(cd "$(dirname "$0")/../.." && pwd)/include}
failed=0
compile() { # compile LANGUAGE COMPILER OPTION...
    language=$1
    shift
    for header in "$include"/nibble.h "$include"/nibble/*.h; do
        name=${header#"$include"/}
        echo "#include <$name>" |
            "$@" -fsyntax-only -Wall -Wextra -Wpedantic -Werror -I"$include" - || {
            echo "$name does not compile alone as $language"
            failed=1
        }
    done
}
compile C cc -std=c17 -x c
if command -v c++ >/dev/null; then
    compile C++ c++ -std=c++17 -x c++
else
    echo "SKIP C++: there is no c++"
fi
exit $failed
