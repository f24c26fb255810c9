# lib.sh - what the command-line tests share. Sourced with $1 = the nibble binary.
nibble=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# check NAME EXPECTED-EXIT-CODE COMMAND...: keeps stdout and stderr in $work/out and $work/err.
check() {
    name=$1 expected=$2
    shift 2
    code=0
    "$@" >"$work/out" 2>"$work/err" </dev/null || code=$?
    if [ "$code" -ne "$expected" ]; then
        echo "FAIL $name: exit code $code, $expected expected"
        sed 's/^/    /' "$work/err"
        failures=$((failures + 1))
    fi
}

# says out|err TEXT: the kept output holds TEXT.
says() {
    if ! grep -qF -- "$2" "$work/$1"; then
        echo "FAIL $name: '$2' is not in std$1:"
        sed 's/^/    /' "$work/$1"
        failures=$((failures + 1))
    fi
}

# lines out|err N: exactly N lines.
lines() {
    n=$(wc -l <"$work/$1")
    if [ "$n" -ne "$2" ]; then
        echo "FAIL $name: $n lines on std$1, $2 expected"
        sed 's/^/    /' "$work/$1"
        failures=$((failures + 1))
    fi
}

# sanitized: whether the binary was built with AddressSanitizer, and is slow.
sanitized() {
    grep -qF __asan_init "$nibble"
}

finish() {
    [ "$failures" -eq 0 ] && echo "ok" || echo "$failures failures"
    [ "$failures" -eq 0 ]
}
