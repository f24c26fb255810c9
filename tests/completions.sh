#!/bin/sh
# What bash, zsh and fish complete, for those of them that are there.
# usage: completions.sh PREFIX
set -eu
prefix=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Lines of what is typed, a TAB, and words that must be offered.
cat >"$work/cases" <<'CASES'
nibble tr	train
nibble quant	quantize
nibble train --precis	--precision
nibble train --precision 	bf16 f32 nvfp4
nibble train --precision n	nvfp4
nibble eval 	ppl ab identity
nibble chat --device cu	cuda
nibble help tokeniz	tokenize tokenizer
CASES

check() { # check SHELL TYPED WORDS FILE: all words are in the file
    for word in $3; do
        if ! grep -qwF -e "$word" "$4"; then
            echo "FAIL: $1 does not complete '$2' to '$word':" >&2
            cat "$4" >&2
            exit 1
        fi
    done
}

cat >"$work/complete.bash" <<'BASH'
. "$1"
read -ra COMP_WORDS <<<"$2"
[[ $2 != *' ' ]] || COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_nibble nibble "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
BASH

# A shell on a terminal of its own, since zsh completes nowhere else.
cat >"$work/complete.zsh" <<'ZSH'
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PROMPT='' RPS1='' PROMPT_EOL_MARK=''; fpath=($1 \$fpath); autoload -U compinit"
zpty -w shell "compinit -u -D; unsetopt listbeep; bindkey '^I' complete-word; print -r READ''Y"
zpty -r -m shell text '*READY*'
zpty -w -n shell "$2"$'\t\t'
sleep 0.5
zpty -w -n shell $'\x15'
zpty -w shell "print -r END''ED"
zpty -r -m shell text '*ENDED*'
print -r -- "${text//[^[:print:]]/ }" | sed 's/\[[0-9;?]*[a-zA-Z]/ /g'
zpty -d shell
ZSH

tried=
while IFS='	' read -r typed words; do
    if command -v bash >/dev/null; then
        tried=bash
        bash "$work/complete.bash" "$prefix/share/bash-completion/completions/nibble" "$typed" >"$work/out"
        check bash "$typed" "$words" "$work/out"
    fi
    if command -v fish >/dev/null; then
        tried="$tried fish"
        HOME=$work fish -c "source $prefix/share/fish/vendor_completions.d/nibble.fish; complete -C '$typed'" >"$work/out"
        check fish "$typed" "$words" "$work/out"
    fi
    if command -v zsh >/dev/null; then
        tried="$tried zsh"
        HOME=$work timeout 20 zsh "$work/complete.zsh" "$prefix/share/zsh/site-functions" "$typed" >"$work/out" </dev/null
        check zsh "$typed" "$words" "$work/out"
    fi
done <"$work/cases"
echo "completions of $tried: ok"
