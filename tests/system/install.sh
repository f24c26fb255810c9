#!/bin/sh
# An installed copy: its files, its exported symbols, its headers, programs built against it with
# pkg-config and CMake, the Python module, man pages, completions in each shell there is, and nothing
# left after uninstalling.
# usage: tests/system/install.sh NIBBLE
set -eu
nibble=$(realpath "$1")
build=$(dirname "$nibble")
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ ! -e "$build/libnibble.so" ]; then
    echo "SKIP: this build has no shared library"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DESTDIR=$work/staging
prefix=/opt/nib
installed=$DESTDIR$prefix
cp "$build/install_manifest.txt" "$work/manifest" 2>/dev/null || : # of a real installation

fail() {
    echo "FAIL: $*" >&2
    exit 1
}

cmake --install "$build" --prefix $prefix --strip >/dev/null
for file in bin/nibble lib/libnibble.a lib/libnibble.so.0 include/nibble.h \
    include/nibble/core.h lib/pkgconfig/nibble.pc lib/cmake/nibble/nibbleConfig.cmake \
    share/man/man1/nibble-train.1 share/bash-completion/completions/nibble \
    share/zsh/site-functions/_nibble share/fish/vendor_completions.d/nibble.fish; do
    [ -e "$installed/$file" ] || fail "$file was not installed"
done
"$installed/bin/nibble" --version >/dev/null

# ---- symbols
nm -D --defined-only "$installed/lib/libnibble.so.0" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    LC_ALL=C sort >"$work/symbols"
diff "$root/include/nibble.abi" "$work/symbols" ||
    fail "libnibble.so exports other symbols than include/nibble.abi lists"
objdump -p "$installed/lib/libnibble.so.0" | grep -q 'SONAME *libnibble.so.0$' || fail "wrong soname"

# ---- headers
sh "$root/tests/repo/headers.sh" "$nibble" "$installed/include" || fail "a header lacks something"

# ---- programs
cat >"$work/ask.c" <<'C'
#include <nibble.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    struct nb_tokenizer *t = NULL;
    if (nb_tokenizer_open(&t, argv[argc - 1], NULL) != NB_OK) {
        fprintf(stderr, "%s\n", nb_last_error());
        return 1;
    }
    printf("%lld entries\n", (long long)nb_tokenizer_size(t));
    nb_tokenizer_close(t);
    return 0;
}
C
cp "$work/ask.c" "$work/ask.cpp"
export PKG_CONFIG_PATH=$installed/lib/pkgconfig LD_LIBRARY_PATH=$installed/lib
answers() { # answers PROGRAM: it knows the vocabulary of models/nib, and says what is wrong
    [ "$("$1" "$root/models/nib")" = "$entries" ] || fail "$1 does not say '$entries'"
    ! "$1" /no/such/model 2>"$work/err" || fail "$1 opened a model that does not exist"
    grep -q /no/such/model "$work/err" || fail "$1 does not say what failed"
}
entries="$(python3 -c "import json,sys
t = json.load(open(sys.argv[1]))
print(len(t['model']['vocab']) + sum(x['content'] not in t['model']['vocab'] for x in t['added_tokens']), 'entries')" \
    "$root/models/nib/tokenizer.json")"
# shellcheck disable=SC2046 # several words
cc -Wall -Werror "$work/ask.c" -o "$work/c" $(pkg-config --cflags --libs nibble)
answers "$work/c"
# shellcheck disable=SC2046
cc "$work/ask.c" -o "$work/static" $(pkg-config --cflags nibble) "$installed/lib/libnibble.a" \
    $(pkg-config --static --libs-only-l nibble | sed 's/-lnibble//')
LD_LIBRARY_PATH='' answers "$work/static"
if command -v c++ >/dev/null; then
    # shellcheck disable=SC2046
    c++ -Wall -Wextra -Werror "$work/ask.cpp" -o "$work/cpp" $(pkg-config --cflags --libs nibble)
    answers "$work/cpp"
fi
if command -v c++ >/dev/null; then
    cmake -G Ninja -S "$root/examples" -B "$work/examples" -DCMAKE_PREFIX_PATH="$installed" >/dev/null
    cmake --build "$work/examples" >/dev/null
    "$work/examples/requests" "$root/models/nib" "One day" | grep -q "^1: One day" ||
        fail "an example built with CMake does not answer"
fi

# ---- the examples, against the installed copy
model=$root/models/nib
for example in generate chat requests finetune; do
    # shellcheck disable=SC2046
    cc -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror "$root/examples/$example.c" -o "$work/$example" \
        $(pkg-config --cflags --libs nibble)
    [ "$(wc -l <"$root/examples/$example.c")" -lt 60 ] || fail "examples/$example.c is long"
done
same() { # same WHAT FILE-IS FILE-WANT
    cmp -s "$2" "$3" || fail "$1: '$(head -c 300 "$2")', not '$(head -c 300 "$3")'"
}
"$work/generate" "$model" "Tell me a story about a dog." >"$work/is"
"$nibble" generate -q --device cpu -m "$model" -n 100 -p "Tell me a story about a dog." >"$work/want"
same generate "$work/is" "$work/want"
printf 'Hello!\nWho are you?\n' | "$work/chat" "$model" >"$work/is"
printf 'Hello!\nWho are you?\n' | "$nibble" chat -q --device cpu -m "$model" 2>/dev/null >"$work/want"
same chat "$work/is" "$work/want"
"$work/requests" "$model" "Once upon a time" "The cat" "In the morning" | sort >"$work/is"
i=0
for text in "Once upon a time" "The cat" "In the morning"; do
    i=$((i + 1))
    printf '%s: %s' "$i" "$text"
    "$nibble" generate -q --device cpu -m "$model" --raw -n 20 -p "$text"
done >"$work/want"
same requests "$work/is" "$work/want"
printf 'who are you\tI am Bob\nhello\thi there\n' >"$work/data.tsv"
"$work/finetune" "$model" "$work/data.tsv" "$work/tuned.dat" >"$work/is"
grep -q '^step 1 of 1: loss ' "$work/is" || fail "finetune shows no progress"
"$nibble" inspect --verify -q --model-dir "$model" "$work/tuned.dat" >/dev/null
! "$work/finetune" "$model" /no/such/data "$work/x.dat" 2>"$work/is" || fail "finetune needs no data"
grep -q /no/such/data "$work/is" || fail "finetune does not say what failed"
if command -v c++ >/dev/null; then
    # shellcheck disable=SC2046
    c++ -std=c++17 -Wall -Wextra -Werror "$root/examples/embed.cpp" -o "$work/embed" \
        $(pkg-config --cflags --libs nibble)
    "$work/embed" "$model" "The cat" >"$work/is"
    sed -n 's/^2: //p' "$work/want" >"$work/want2"
    same embed "$work/is" "$work/want2"
fi

# ---- the Python module
mkdir "$work/python"
python3 -B "$root/tests/system/python.py" "$nibble" "$installed" "$work/python"

# ---- man pages
if command -v man >/dev/null && man --warnings -l "$installed/share/man/man1/nibble.1" >/dev/null 2>&1; then
    for page in "$installed"/share/man/man1/*.1; do
        MANWIDTH=100 man --warnings -l "$page" >"$work/page" 2>"$work/warnings"
        [ ! -s "$work/warnings" ] || fail "$page: $(head -n 1 "$work/warnings")"
        grep -q "^NAME" "$work/page" || fail "$page has no name"
    done
    MANWIDTH=100 man -l "$installed/share/man/man1/nibble-train.1" | grep -q -- '--weight-decay' ||
        fail "nibble-train.1 does not know --weight-decay"
fi

# ---- completions
sh "$root/tests/completions.sh" "$installed"

# ---- uninstalling
"$root/tools/uninstall.sh" "$build" $prefix
[ -z "$(find "$work/staging" ! -type d 2>/dev/null)" ] || fail "uninstalling left files"
if "$root/tools/uninstall.sh" "$build" /somewhere/else 2>/dev/null; then
    fail "uninstalled from a folder that was never installed into"
fi
rm -f "$build/install_manifest.txt"
[ ! -f "$work/manifest" ] || cp "$work/manifest" "$build/install_manifest.txt"
echo ok
