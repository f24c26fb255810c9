#!/bin/sh
# The linters can fail: they pass a small tree, and find every mistake that is then put into it.
# usage: lint_selftest.sh
# shellcheck disable=SC2016
set -eu
here=$(cd "$(dirname "$0")" && pwd)
lint=$here/../../tools/lint
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
tree=$tmp/tree

put() { # put PATH: writes standard input
    mkdir -p "$(dirname "$tree/$1")"
    cat >"$tree/$1"
}

run() {
    for name in includes sizes rules; do
        python3 -B "$lint/$name.py" "$tree" "$tmp/nibble" || echo "$name: exit status $?"
    done >"$tmp/found" 2>&1
}

expect() { # expect WHAT: compares what was found with standard input
    LC_ALL=C sort "$tmp/found" >"$tmp/got"
    LC_ALL=C sort >"$tmp/want"
    diff -u "$tmp/want" "$tmp/got" || {
        echo "lint_selftest: $1 (- wanted, + found)"
        exit 1
    }
}

function_of() { # function_of LINES SIGNATURE: a function with that many lines
    printf '%s\n{\n' "$2"
    seq $(($1 - 3)) | sed 's/.*/    ;/'
    echo '}'
}

# ---- a tree without mistakes; some of it only looks like one ----

put ARCHITECTURE.md <<'END'
## Who may include whom

| folder | may include |
|---|---|
| base | |
| backend | |
| backend/cuda | backend |
| cli | |
END
put include/nibble.h <<'END'
/* nibble.h - public. */
#pragma once
#include "nibble/part.h"
END
put include/nibble/part.h <<'END'
/* part.h - public. */
#pragma once
typedef void (*nb_callback)(int a);
int nb_answer(nb_callback f);
END
put include/nibble/core.h <<'END'
/* core.h - public, and tested. */
#pragma once
enum nb_status nb_try(void);
void nb_do(void);
END
put src/base/core.c <<'END'
/* core.c - what core.h declares. */
enum nb_status nb_try(void)
{
    return NB_OK;
}
void nb_do(void)
{
}
END
put tests/unit/test_core_a.c <<'END'
/* test_core_a.c - calls all of core.h. */
static void test(void)
{
    nb_do();
    assert_fails(nb_try(), NB_EIO, "words");
}
END
put src/base/json.h <<'END'
/* json.h - JSON. */
#pragma once
#include <jansson.h>
END
put src/base/answer.c <<'END'
/* answer.c - strcpy(), printf("x") and #include "cli/x.h" in a comment. */
#include "base/json.h"
#include "nibble/part.h"
static const char *const text = "strcpy(a, b); abort(); /* ";
int nb_answer(nb_callback f)
{
    return snprintf(text, f->printf(nbi_model_writer_abort(f)));
}
END
put src/backend/devices.c <<'END'
/* devices.c - an exception that is listed. */
#include "backend/cuda/device.h"
END
put src/backend/cuda/device.h <<'END'
/* device.h - CUDA. */
#pragma once
#include "backend/backend.h"
END
put src/backend/backend.h <<'END'
/* backend.h - what both have. */
#pragma once
END
put src/cli/main.c <<'END'
/* main.c - may print. */
#include "nibble.h"
int main(void)
{
    printf("%d\n", cli_value(7));
    exit(0);
}
END
{
    printf '/* kernel.cu - long, and still good. */\n#include <cuda_runtime.h>\nextern "C" {\n'
    function_of 200 '__global__ static void k_long(int a, int b, int c, int d, int e, int f, int g)'
    echo '}'
} | put src/backend/cuda/kernel.cu
echo '/* test_a.c - a test. */' | put tests/unit/test_a.c
# Folders of these names are places of a machine only at the top.
printf 'about a command; see tests/%s/ and https://example.org/%s/\n' work root |
    put docs/cli/known.md
put tools/lint/allow.txt <<'END'
includes src/backend/devices.c:backend/cuda/device.h it is the one place
END
put tools/lint/retired.txt <<'END'
# What is not used any more.
[identifiers]
nbi_gone -> nbi_new
nbi_old* -> nbi_newer*
[phrases]
the gone phrase -> a phrase
END
echo 'What nbi_gone_too and not_nbi_old_one are, and the phrase.' | put docs/names.md
echo 'Was called nbi_gone.' | put CHANGELOG.md
printf '#!/bin/sh\n[ "$2" = known ]\n' >"$tmp/nibble"
chmod +x "$tmp/nibble"

run
expect "a good tree does not pass" </dev/null

# ---- one mistake of each kind ----

put src/base/bad.c <<'END'
/* bad.c - includes. */
#include "cli/opt.h"
#include "answer.c"
#include "json.h"
#include <jansson.h>
#include <cuda_runtime.h>
END
echo '/* new.h - a folder that has no row. */' | put src/extra/new.h
printf '/* opt.h - options. */\n#pragma once\n' | put src/cli/opt.h
echo '| gone | nothing |' >>"$tree/ARCHITECTURE.md"
sed -i 's/^| cli | |/| cli | backend |/' "$tree/ARCHITECTURE.md"
cat >>"$tree/tools/lint/allow.txt" <<'END'
sizes src/base/long.c:allowed_size it is allowed
sizes src/base/long.c:unused nobody needs this
rules src/base/long.c:noreason
END
{
    echo '/* long.c - sizes. */'
    function_of 121 'static void too_long(void)'
    function_of 3 'static void too_many(int a, int b, int c, int d, int e, int f, int g, int h)'
    function_of 500 'static void allowed_size(void)'
    seq 700 | sed 's/.*/;/'
} | put src/base/long.c
{
    echo '/* long.cu - a kernel. */'
    function_of 201 '__global__ static void k_too_long(void)'
} | put src/backend/cuda/long.cu
{ printf '/* long.h - . */\n#pragma once\n' && seq 300 | sed 's/.*/;/'; } | put src/base/long.h
seq 446 | sed 's/.*/;/' >>"$tree/include/nibble/part.h"
echo 'int nb_missing(void);' >>"$tree/include/nibble/part.h"

cat >>"$tree/include/nibble/core.h" <<'END'
enum nb_status nb_again(void);
void nb_undo(void); /* nb_undo() */
END
cat >>"$tree/src/base/core.c" <<'END'
enum nb_status nb_again(void)
{
    return NB_OK;
}
void nb_undo(void)
{
}
END
echo '/* nb_undo() */ int ok = nb_again();' >>"$tree/tests/unit/test_core_a.c"
put src/base/rules.c <<'END'
/* rules.c - names and calls. */
int visible(void)
{
    strcpy(a, b);
    fprintf(stderr, "no");
}
int nb_secret(void)
{
    abort();
}
static inline int nbi_hidden(void)
{
    return a.strcpy(1);
}
END
put src/cli/cmd.c <<'END'
/* cmd.c - a name. */
int command(void)
{
    return 0;
}
END
put src/base/form.h <<'END'
/* other.h - names another file. */
END
printf 'no comment\n\t\n \n%0101d\n\303\244\n/* %s */\nend' 0 FIXME | put src/base/form.c
printf '/* helper.c - not a test. */\n#include "x.c"\nint x = sscanf(a);\n' | put tests/unit/helper.c
echo 'cd /home/me' | put docs/notes.md
echo 'no command' | put docs/cli/unknown.md
echo 'not a line of it' >>"$tree/tools/lint/retired.txt"
printf '/* retired.h - The gone\n * phrase, nbi_gone. */\n#pragma once\nint nbi_old_one;\n' |
    put src/base/retired.h
echo 'It is nbi_gone.' | put README.md

run
expect "some mistakes were not found, or too many" <<'END'
ARCHITECTURE.md:1: the table has no row for src/extra
ARCHITECTURE.md:8: no file of src/cli includes backend
ARCHITECTURE.md:9: there is no folder src/gone
ARCHITECTURE.md:9: there is no folder src/nothing
README.md:1: 'nbi_gone' is retired, write: nbi_new
docs/cli/unknown.md:1: nibble has no command 'unknown'
docs/notes.md:1: '/home/...' exists on one machine only
include/nibble/core.h:5: nb_again is in no assert_fails of tests/unit/test_core_*.c
include/nibble/core.h:6: nb_undo is not called in tests/unit/test_core_*.c
include/nibble/part.h:451: 451 lines, at most 450 are allowed
include/nibble/part.h:451: nb_missing is declared and not defined
includes: exit status 1
rules: exit status 1
sizes: exit status 1
src/backend/cuda/long.cu:2: k_too_long has 201 lines, at most 200 are allowed
src/base/bad.c:2: base may not include cli ("cli/opt.h")
src/base/bad.c:3: "answer.c" is no header
src/base/bad.c:4: no file src/json.h; includes are paths from src/ or include/
src/base/bad.c:5: include base/json.h instead of <jansson.h>
src/base/bad.c:6: CUDA header <cuda_runtime.h> outside of backend/cuda
src/base/form.c:1: does not open with '/* form.c - ' and a purpose
src/base/form.c:2: tab
src/base/form.c:2: trailing blank
src/base/form.c:3: trailing blank
src/base/form.c:4: 101 columns, at most 100
src/base/form.c:5: not ASCII
src/base/form.c:6: FIXME does not belong here
src/base/form.c:7: no newline at the end
src/base/form.h:1: does not open with '/* form.h - ' and a purpose
src/base/form.h:1: header without #pragma once
src/base/long.c:1201: 1325 lines, at most 1200 are allowed
src/base/long.c:123: too_many has 8 parameters, at most 7 are allowed
src/base/long.c:2: too_long has 121 lines, at most 120 are allowed
src/base/long.h:301: 302 lines, at most 300 are allowed
src/base/rules.c:11: nbi_hidden is static, so it has no prefix
src/base/rules.c:2: visible is not static, so name it nbi_...
src/base/rules.c:4: strcpy is banned
src/base/rules.c:5: fprintf: the library neither prints nor exits
src/base/rules.c:7: nb_secret is in no public header
src/base/rules.c:9: abort: the library neither prints nor exits
src/base/retired.h:1: 'The gone phrase' is retired, write: a phrase
src/base/retired.h:2: 'nbi_gone' is retired, write: nbi_new
src/base/retired.h:4: 'nbi_old_one' is retired, write: nbi_newer*
src/cli/cmd.c:2: command is not static, so name it cli_...
src/extra/new.h:1: header without #pragma once
tests/unit/helper.c:1: helper.c is not named test_*.c
tests/unit/helper.c:2: a test includes headers, not .c files
tests/unit/helper.c:3: sscanf is banned
tools/lint/retired.txt:7: want 'OLD -> NEW' below [identifiers] or [phrases]
tools/lint/allow.txt:4: want 'LINTER PATH:WHAT REASON'
tools/lint/allow.txt:3: nothing needs the exception src/base/long.c:unused
END

fails() { # fails WORDS COMMAND...: it must, and say WORDS
    words=$1
    shift
    if "$@" >"$tmp/found" 2>&1 || ! grep -q "$words" "$tmp/found"; then
        cat "$tmp/found"
        echo "lint_selftest: does not fail with '$words': $*"
        exit 1
    fi
}

# ---- subjects of commits ----

commit() { # commit DIRECTORY SUBJECT
    git -C "$1" -c user.name=a -c user.email=a@b.c -c commit.gpgsign=false commit -q \
        --allow-empty -m "$2"
}

check_commits() {
    python3 -B "$lint/commits.py" "$1"
}

long=$(printf '%073d' 0)
check_commits "$tmp" # no repository
git init -q "$tmp/upstream"
commit "$tmp/upstream" "$long."
fails "has no full stop" check_commits "$tmp/upstream"
commit "$tmp/upstream" "${long#0}" # the older one is left alone
check_commits "$tmp/upstream"
git clone -q "$tmp/upstream" "$tmp/clone"
commit "$tmp/clone" "$long"
commit "$tmp/clone" "Do this"
fails "73 characters" check_commits "$tmp/clone"
git clone -q --depth 1 "file://$tmp/clone" "$tmp/shallow"
check_commits "$tmp/shallow"

# ---- the other tests of this folder ----

echo 'pkg_check_modules(A REQUIRED IMPORTED_TARGET known>=1.2 unknown)' | put CMakeLists.txt
echo 'pkg_check_modules(B REQUIRED other)' | put tests/CMakeLists.txt
printf 'need "pkg-config --exists known" a\nneed "pkg-config --exists other" b\n' | put tools/deps.sh
fails "does not look for unknown" sh "$here/deps.sh" - "$tree"
printf 'need "pkg-config --exists unknown" c\n' >>"$tree/tools/deps.sh"
sh "$here/deps.sh" - "$tree"

printf '#!/bin/sh\necho page >"$3/known.md"\n' >"$tmp/nibble"
fails "run make docs" sh "$here/docs.sh" "$tmp/nibble" "$tree"
rm "$tree/docs/cli/unknown.md"
echo page | put docs/cli/known.md
sh "$here/docs.sh" "$tmp/nibble" "$tree"

echo 'typedef int part;' | put api/nibble/part.h
echo '#include "nibble/part.h"' | put api/nibble.h
sh "$here/headers.sh" - "$tree/api" >/dev/null
if command -v c++ >/dev/null; then
    echo 'typedef int class;' | put api/nibble/c.h
    fails "nibble/c.h does not compile alone as C++" sh "$here/headers.sh" - "$tree/api"
    rm "$tree/api/nibble/c.h"
fi
echo 'part x;' | put api/nibble/needs_part.h
fails "nibble/needs_part.h does not compile alone as C" sh "$here/headers.sh" - "$tree/api"
