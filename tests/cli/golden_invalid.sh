# The files in tests/golden: those with the mistakes behind known CVEs are refused with the words
# beside them, those with code in them convert without its being run, and make_invalid.py writes
# the very same files.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
golden=$(cd "$(dirname "$0")/../golden" && pwd)
. "$(dirname "$0")/lib.sh"
nibble=$(realpath "$nibble")
mkdir "$work/run" "$work/dst"
cd "$work/run" || exit 1 # code that ran would leave a file here

fail() {
    echo "FAIL $*"
    failures=$((failures + 1))
}

# empty DIR: nothing was left there.
empty() {
    [ -z "$(ls -A "$1")" ] || fail "$name: left $(ls -A "$1")"
}

# refused WORDS COMMAND...: nibble ends with 1 and one line that holds the words.
refused() {
    words=$1
    shift
    check "$*" 1 timeout 20 "$nibble" "$@"
    says err "$words"
    lines err 1
    lines out 0
    empty "$work/dst"
}

# ---- what must be refused ----

count=0
for expected in "$golden"/invalid/*.expected; do
    file=${expected%.expected}
    [ -e "$file" ] || fail "$expected is about nothing"
    {
        IFS= read -r wanted
        while IFS= read -r command; do
            case $command in
            inspect) refused "$wanted" inspect "$file" ;;
            "inspect --verify") refused "$wanted" inspect "$file" --verify ;;
            convert) refused "$wanted" convert "$file" "$work/dst/model" ;;
            *) fail "$expected: no command '$command'" ;;
            esac
            count=$((count + 1))
        done
    } <"$expected"
done
[ "$count" -ge 100 ] || fail "only $count calls for what is in $golden/invalid"

# ---- what must do no harm ----

# converts NAME: to each kind of target, and nothing has run.
converts() {
    rm -rf "$work/dst"
    mkdir "$work/dst"
    check "verify $1" 0 "$nibble" inspect "$golden/harmless/$1" --verify
    for target in model model.gguf model.dat model.safetensors; do
        check "convert $1 to $target" 0 "$nibble" convert "$golden/harmless/$1" "$work/dst/$target"
    done
    check "verify what $1 became" 0 "$nibble" inspect "$work/dst/model" --verify
    empty "$work/run"
}

# holds FILE TEXT: what was written has the text as it is.
holds() {
    grep -qaF -- "$2" "$work/dst/$1" || fail "$name: '$2' is not in $1"
}

# CVE-2024-34359: a template is text, and is carried over as that.
converts chat_template_code.gguf
template="{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}"
holds model/tokenizer_config.json "\"$template\""
holds model.gguf "$template"

# PR 26511: no number is made of a token's text.
converts vocab_byte_token.gguf
holds model/tokenizer.json '"<0x-1>"'
holds model.gguf "<0x-1>"

# CVE-2026-90553: code beside the weights stays where it is.
converts remote_code
written=$(cd "$work/dst/model" && echo *)
[ "$written" = "config.json model.safetensors" ] || fail "remote_code became $written"

# ---- the files are what the script makes, and nothing has changed them ----

check "make_invalid.py" 0 python3 -B "$golden/make_invalid.py" "$work/fresh"
for part in invalid harmless README.md; do
    check "$part is what make_invalid.py writes" 0 diff -r "$work/fresh/$part" "$golden/$part"
done
finish
