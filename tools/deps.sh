#!/bin/sh
# Installs what is missing of the named sets, and does nothing when all is there.
# usage: tools/deps.sh build|test|lint|fuzz|interop...
set -eu

debian=""
fedora=""
need() { # need TEST DEBIAN FEDORA: adds the packages if TEST fails
    if ! sh -c "$1" >/dev/null 2>&1; then
        debian="$debian $2"
        fedora="$fedora $3"
    fi
}

for set in "$@"; do
    case "$set" in
    build)
        need "command -v cc" gcc gcc
        need "echo 'int main(void){return 0;}' | cc -x c - -o /dev/null" libc6-dev glibc-devel
        need "command -v cmake" cmake cmake
        need "command -v ninja" ninja-build ninja-build
        need "command -v pkg-config" pkg-config pkgconf
        need "command -v git" git git
        need "command -v python3" python3 python3
        need "pkg-config --exists jansson" libjansson-dev jansson-devel
        need "pkg-config --exists libpcre2-8" libpcre2-dev pcre2-devel
        need "pkg-config --exists libutf8proc" libutf8proc-dev utf8proc-devel
        ;;
    test)
        need "pkg-config --exists cmocka" libcmocka-dev libcmocka-devel
        ;;
    lint)
        need "command -v clang-format" clang-format clang-tools-extra
        need "command -v clang-tidy" clang-tidy clang-tools-extra
        ;;
    fuzz)
        need "command -v clang" clang clang
        need "echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n){return d && n > 99;}' |
              clang -fsanitize=fuzzer,address -x c - -o /dev/null" \
            "libclang-rt-dev" compiler-rt
        ;;
    interop)
        need "python3 -m venv --help" python3-venv python3
        need "python3 -c 'import ensurepip'" python3-venv python3-pip
        ;;
    *)
        echo "deps: unknown set '$set'" >&2
        exit 2
        ;;
    esac
done

[ -n "$debian" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
    echo "missing packages; install these and try again:" >&2
    echo "  Fedora and its relatives: dnf install$fedora" >&2
    echo "  Debian and its relatives: apt-get install$debian" >&2
    exit 1
fi

as_root=""
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
        echo "missing packages; run as root: apt-get install$debian" >&2
        exit 1
    fi
    as_root=sudo
fi
echo "installing:$debian" >&2
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq
# shellcheck disable=SC2086
$as_root apt-get install -y -qq --no-install-recommends $debian >/dev/null
