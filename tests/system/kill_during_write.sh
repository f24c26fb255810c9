#!/bin/sh
# Kills nibble while it writes over an existing model, at many moments of the run: afterwards the
# old model or the new one must be there, whole. Then the same with SIGINT and SIGTERM, which must
# also clean up. For a .dat, a .gguf and a model directory.
# usage: tests/system/kill_during_write.sh NIBBLE
set -eu
nibble=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
kills=30 # of each target, spread over the time of an undisturbed run
! grep -qF __asan_init "$nibble" || kills=10

fail() {
    echo "FAILED: $*" >&2
    ls -la "$work" "$work/t" >&2
    exit 1
}

now_ms() {
    echo $(($(date +%s%N) / 1000000))
}

# The same model or directory, byte by byte.
same() {
    if [ -d "$1" ]; then diff -rq "$1" "$2" > /dev/null; else cmp -s "$1" "$2"; fi
}

# Everything under a temporary name; what is inside a temporary directory goes with it.
temporaries() {
    find t -name '.*.nibble-*' -prune | wc -l
}

write() {
    "$nibble" quantize new.src "$1" --threads 1 --quiet > run.out 2>&1
}

restore() {
    rm -rf "$1"
    cp -r "$2" "$1"
}

cat > config.json <<'END'
{"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
 "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
 "max_position_embeddings": 1024, "tie_word_embeddings": true}
END
"$nibble" synth tiny old.src --seed 1 --quiet
"$nibble" synth --config config.json new.src --seed 2 --quiet

# ---- kill -9 ----

# one_kill TARGET OLD NEW DELAY: sets outcome to old or new.
one_kill() {
    "$nibble" quantize new.src "$1" --threads 1 --quiet > run.out 2>&1 &
    pid=$!
    sleep "$4"
    kill -9 "$pid" 2> /dev/null || :
    wait "$pid" 2> /dev/null || :
    if same "$1" "$2"; then outcome=old
    elif same "$1" "$3"; then outcome=new
    else fail "'$1' is neither the old nor the new model, $4 s after the start"; fi
    "$nibble" inspect "$1" --verify --quiet > /dev/null || fail "'$1' is not valid"
    [ "$(temporaries)" -le 1 ] || fail "temporary files of dead writers stay"
}

kill_target() {
    target=$1
    mkdir t
    "$nibble" quantize old.src "$target" --quiet > /dev/null
    cp -r "$target" old
    restore "$target" old
    start=$(now_ms)
    write "$target" || fail "cannot write '$target': $(cat run.out)"
    took=$(($(now_ms) - start))
    cp -r "$target" new
    same old new && fail "old and new are the same"
    olds=0 news=0 i=0
    while [ $i -lt $kills ]; do
        restore "$target" old
        one_kill "$target" old new "$(awk "BEGIN { print $took * 1.1 * $i / ($kills - 1) / 1000 }")"
        [ $outcome = old ] && olds=$((olds + 1)) || news=$((news + 1))
        i=$((i + 1))
    done
    [ $olds -gt 0 ] || fail "no kill came in time"
    restore "$target" old
    write "$target" || fail "cannot write '$target' after the kills: $(cat run.out)"
    same "$target" new || fail "'$target' is not the new model after an undisturbed run"
    [ "$(temporaries)" -eq 0 ] || fail "temporary files are left: $(find t -name '.*')"
    echo "$target: $kills kills over $took ms, the old model $olds times, the new one $news times"
}

# ---- signals that ask ----

# one_signal TARGET SIGNAL CODE
one_signal() {
    restore "$1" old
    for part in 3 6 12 24; do # earlier and earlier, should the run have been over
        "$nibble" quantize new.src "$1" --threads 1 --quiet > run.out 2>&1 &
        pid=$!
        sleep "$(awk "BEGIN { print $took / $part / 1000 }")"
        kill -s "$2" "$pid" 2> /dev/null || :
        rc=0
        wait "$pid" || rc=$?
        [ $rc -eq 0 ] || break
        restore "$1" old
    done
    [ $rc -eq "$3" ] || fail "exit code $rc after SIG$2, not $3: $(cat run.out)"
    same "$1" old || fail "'$1' changed though SIG$2 stopped the run"
    [ "$(temporaries)" -eq 0 ] || fail "SIG$2 left $(find t -name '.*.nibble-*')"
    echo "$1: SIG$2 ends with exit code $rc, the old model is there, nothing else"
}

begin=$(now_ms)
for target in t/model.dat t/model.gguf t/model; do
    kill_target $target
    one_signal $target INT 130
    one_signal $target TERM 143
    rm -rf t old new
done
echo "kill during write: done in $((($(now_ms) - begin) / 1000)) s"
