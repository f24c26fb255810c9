# Training: settings that must not change the result, learning, outputs, the plan, interruptions,
# errors. NB_TRAIN_TESTS=all: also the plan of all settings.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
here=$(dirname "$0")
. "$here/lib.sh"

# ---- values ----

set --
[ "${NB_TRAIN_TESTS:-}" = all ] && set -- all
for part in equal odd slices accumulate compute decay scratch layers overfit export evaluation skip stop interrupt late outputs hang_up plan; do
    mkdir "$work/$part"
    check "$part" 0 python3 -B "$here/train.py" "$nibble" "$work/$part" $part "$@"
    cat "$work/out"
    [ $part = equal ] || rm -rf "${work:?}/$part"
done
model=$work/equal/model data=$work/equal/a.txt

# ---- errors: one line, before the first step ----

# refused NAME CODE TEXT OPTIONS...: exit code, one line on stderr with TEXT, nothing on stdout.
refused() {
    title=$1 expect=$2 said=$3
    shift 3
    check "$title" "$expect" "$nibble" train -q --seq-len 16 --threads 1 "$@"
    says err "$said"
    lines err 1
    lines out 0
}

printf 'not JSON\n' >"$work/bad.jsonl"
: >"$work/empty.txt"
mkdir "$work/other"
: >"$work/other/file"
refused "no model" 2 "a model is missing" -d "$data" --steps 1
refused "two models" 2 "give one of -m MODEL" -m "$model" --synthetic tiny --steps 1
set -- -m "$model" --steps 2
refused "no data" 2 "data is missing: -d FILE" "$@"
refused "data that is not there" 1 "nowhere.txt'" "$@" -d "$work/nowhere.txt"
refused "bad data" 1 "bad.jsonl:1: invalid JSON" "$@" -d "$data" -d "$work/bad.jsonl"
refused "empty data" 1 "there is no sample" "$@" -d "$work/empty.txt"
set -- "$@" -d "$data"
refused "no held-out data" 1 "nowhere.txt'" "$@" --eval-data "$work/nowhere.txt"
refused "empty held-out data" 1 "measuring takes two" "$@" --eval-data "$work/empty.txt"
refused "no end" 2 "say how long to train" -m "$model" -d "$data"
refused "a learning rate" 2 "--lr takes a number from 0" "$@" --lr -1
refused "a precision" 2 "--precision takes bf16|f32|nvfp4" "$@" --precision fp8
refused "states" 2 "--optimizer-state-mode takes" "$@" --optimizer-state-mode f16
refused "fused accumulation" 2 "use --grad-accum 1" "$@" --fused-step --grad-accum 2
refused "nothing to resume" 2 "--resume needs --checkpoint-dir" "$@" --resume
refused "a kind of target" 1 "x.bin'" "$@" -o "$work/x.bin"
refused "no folder for the target" 1 "No such file or directory" "$@" -o "$work/nowhere/x.dat"
refused "a folder of something else" 1 "not a model directory" "$@" -o "$work/other"
refused "no folder for checkpoints" 1 "cannot make directory" "$@" \
    --checkpoint-dir "$work/nowhere/ck"
refused "a log elsewhere" 1 "cannot write" "$@" --log "$work/nowhere/log.jsonl"

# A file that is no log is not overwritten by one.
cp "$data" "$work/precious.txt"
refused "a log that is none" 1 "precious.txt', line 1: invalid JSON" "$@" \
    --log "$work/precious.txt"
check "it is still there" 0 cmp "$data" "$work/precious.txt"
printf 'without the end of a line' >"$work/precious.txt"
cp "$work/precious.txt" "$work/copy.txt"
refused "a log that is one line" 1 "it is not a line of a training log" "$@" \
    --log "$work/precious.txt"
check "that is there, too" 0 cmp "$work/copy.txt" "$work/precious.txt"

# The source model is not overwritten, under any of its names.
check "four bits" 0 "$nibble" quantize -q "$model" "$work/four.dat"
cp "$work/four.dat" "$work/was.dat"
refused "the same directory" 1 "--overwrite replaces it" "$@" -o "$model/."
refused "its weights" 1 "--overwrite replaces it" "$@" -o "$model/model.safetensors"
ln -s "$work/four.dat" "$work/link.dat"
set -- --steps 2 --seq-len 16 -d "$data" --model-dir "$model" -m "$work/four.dat"
refused "the same file" 1 "--overwrite replaces it" "$@" -o "$work/link.dat"
refused "the directory beside" 1 "--overwrite replaces it" "$@" -o "$model"
check "it is as it was" 0 cmp "$work/four.dat" "$work/was.dat"
check "a plan is none of that" 0 "$nibble" plan "$@" -o "$work/four.dat"
check "overwriting" 0 "$nibble" train -q "$@" --lr 1e-2 -o "$work/four.dat" --overwrite
check "it changed" 1 cmp -s "$work/four.dat" "$work/was.dat"
check "it is sound" 0 "$nibble" inspect -q --verify "$work/four.dat" --model-dir "$model"

# Checkpoints of different runs do not mix.
set -- -m "$model" -d "$data" --steps 2 --checkpoint-dir "$work/ck"
check "a run" 0 "$nibble" train -q --seq-len 16 "$@"
refused "another run" 1 "continue from them with --resume" "$@"
refused "other settings" 1 "the run was begun with lr" "$@" --resume --lr 0.5
check "a run that is over" 0 "$nibble" train -q --seq-len 16 "$@" --resume
says out "2 steps"
check "and goes on for longer" 0 "$nibble" train --seq-len 16 "$@" --resume --steps 4
says out "4 steps"
says err "4 steps in all, not 2"
check "not for fewer steps than there were" 1 "$nibble" train -q --seq-len 16 "$@" --resume \
    --steps 3 -o "$work/short.dat"
says err "the run has gone past 3 steps"
check "and leaves nothing" 1 test -e "$work/short.dat"
finish
