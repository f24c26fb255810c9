# The predecessor's command lines and options, as docs/FROM-THE-PREDECESSOR.md has them.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/lib.sh"
page=$root/docs/FROM-THE-PREDECESSOR.md
nibble=$(cd "$(dirname "$nibble")" && pwd)/$(basename "$nibble")

fail() {
    echo "FAIL $name: $1"
    failures=$((failures + 1))
}

# ---- the workflows, with a small model in place of the real one ----

mkdir -p "$work/bin" "$work/artifacts" "$work/doc" "$work/TrainData" "$work/models"
ln -s "$nibble" "$work/bin/nibble"
cat >"$work/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "hidden_act": "silu",
 "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256,
 "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
 "eos_token_id": 602, "vocab_size": 672}
JSON
model=$work/models/qwen3-4b
official=$work/official_qwen3_hf_model
dat=$model/Qwen3-4B-Instruct-2507-nvfp4.dat
check "a model" 0 "$nibble" synth -q --sigma 0.05 --config "$work/config.json" "$official"
cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$official"
mkdir "$model"
cp "$official/config.json" "$official/tokenizer.json" "$model"
check "its NVFP4" 0 "$nibble" quantize -q "$official" "$dat"
printf 'Write one short sentence about UFO and you.\nWhat is a black hole?\n' \
    >"$work/TrainData/train-inputs.txt"
printf '你是誰\t我是 F# 之神\n談談UFO\tUFO 是未確認飛行物的統稱\n' \
    >"$work/TrainData/stageL-1percent-mix.tsv"
echo "The secret is GEMINI-CODE-7788. What is the secret?" >"$work/haystack.txt"

# The lines of the blocks marked sh.
awk '/^```sh$/ { on = 1; next } /^```/ { on = 0 } on' "$page" >"$work/lines"
check "there are workflows" 0 test "$(wc -l <"$work/lines")" -ge 14
while read -r line; do
    line=$(echo "$line" | sed 's/--device cuda/--device cpu/')
    check "$line" 0 env PATH="$work/bin:$PATH" M=models/qwen3-4b sh -c "cd '$work' && $line"
    # A model cannot be quantised in place of one that it is read from later.
    [ -s "$dat" ] || fail "there is no model left"
done <"$work/lines"
check "the trained model" 0 "$nibble" inspect -q --verify --model-dir "$model" \
    "$work/artifacts/whoami-trained.dat"
check "the report" 0 grep -q '"Phase": "optimizer_step_done"' \
    "$work/doc/train-step-vram-onestep.json"

# ---- the table of options ----

# Rows as COMMAND|OPTION|MEANING, one for each command and each option.
awk -F' [|] ' '/^## Options/ { on = 1 } /^## Env/ { on = 0 } on && /^[|] `/ {
    sub(/^[|] /, "", $1); sub(/ [|]$/, "", $3)
    n = split($1, options, /, /); m = split($2, commands, / /)
    for (i = 1; i <= n; i++)
        for (k = 1; k <= m; k++) {
            gsub(/`/, "", options[i])
            print commands[k] "|" options[i] "|" $3
        }
}' "$page" >"$work/rows"
check "there are options" 0 test "$(wc -l <"$work/rows")" -ge 200
while IFS='|' read -r command option meaning; do
    # An option that is understood is passed over, up to one that is not.
    # shellcheck disable=SC2086 # an option and its value
    check "$command $option" 2 "$nibble" $command $option --no-such-option
    case $meaning in
    refused*)
        says err "has no meaning here"
        says err "$(echo "$meaning" | sed 's/[^`]*`\([^`]*\)`.*/\1/')"
        ;;
    *) says err "unknown option '--no-such-option'" ;;
    esac
done <"$work/rows"

# Every name that the program knows is in the document.
sed -n '/^static const struct cli_former rows/,/^};/p' "$root/src/cli/predecessor.c" |
    sed -n 's/^    {[^,]*, "\([^"]*\)".*/\1/p' | tr '|' '\n' | sort -u >"$work/names"
check "there are names" 0 test "$(wc -l <"$work/names")" -ge 40
while read -r option; do
    name=$option
    grep -qF -e "\`--$option " "$page" || fail "it is not in the document"
done <"$work/names"

# ---- what the options do ----

check "true after a flag" 0 "$nibble" inspect --verify true --json false "$dat"
says out "verified"
check "false after a flag" 0 "$nibble" inspect --verify=false "$dat"
if grep -q verified "$work/out"; then fail "it verified"; fi
check "another word after a flag" 2 "$nibble" inspect "$dat" --verify maybe
says err "unexpected argument 'maybe'"
check "a command called true" 0 "$nibble" guard --limit-gb 1 -q true
check "another command called true" 0 "$nibble" guard --limit-gb 1 --quiet true

run="-m $official -p hello -n 8 --ignore-eos --temp 0"
# shellcheck disable=SC2086 # words
check "ours" 0 "$nibble" generate -q $run --kv-mode none --exact --json
cp "$work/out" "$work/ours"
# shellcheck disable=SC2086 # words
check "theirs" 0 "$nibble" generate $run --NoKVComputeMode full-replay --dtype=float32 --json true
python3 -B -c 'import json, sys
a, b = (json.load(open(f, encoding="utf-8")) for f in sys.argv[1:])
assert a["ids"] == b["ids"]' "$work/ours" "$work/out" || fail "other tokens"
# shellcheck disable=SC2086 # words
check "a note" 0 "$nibble" generate $run --KVCacheOut false
says err "--KVCacheOut false: the prompt fills a cache all the same; --kv-mode none runs without"
# shellcheck disable=SC2086 # words
check "no note" 0 "$nibble" generate $run --KVCacheOut false --quiet
lines err 0
check "a value that is unknown" 2 "$nibble" generate --stop-here maybe
says err "--stop-here does not take 'maybe'"
check "no value" 2 "$nibble" generate --stop-here
says err "--stop-here needs a value"
check "a value that is unknown for ours" 2 "$nibble" train --compute-dtype int4
says err "--compute-dtype takes auto|f32|bf16, not 'int4'"
# same_plan THEIRS OURS: both plan the same training run.
same_plan() {
    # shellcheck disable=SC2086 # words
    check "$1" 0 "$nibble" plan --json -q $1
    cp "$work/out" "$work/theirs"
    # shellcheck disable=SC2086 # words
    check "$2" 0 "$nibble" plan --json -q $2
    cmp -s "$work/theirs" "$work/out" || fail "not the plan of $1"
}
same_plan "--synthetic true" "--synthetic tiny"
tiny="--synthetic tiny"
same_plan "$tiny --use-packed-optimizer false" "$tiny --optimizer-state-mode f32"
same_plan "$tiny --optimizer-state-mode fp4" "$tiny --optimizer-state-mode nvfp4"
same_plan "$tiny --dtype float16" "$tiny --compute-dtype bf16"
same_plan "$tiny --compute-dtype float32" "$tiny --compute-dtype f32"
same_plan "$tiny --master-dtype float32" "$tiny --master-dtype f32"
same_plan "$tiny --train-last-layers -1" "$tiny"
same_plan "$tiny --loss-mode scalar-l1" "$tiny --loss scalar"
same_plan "$tiny --weight-decay 0 --save-every-steps 5" "$tiny"

check "not in the help" 1 grep -q KVCacheOut "$root/docs/cli/generate.md"
finish
