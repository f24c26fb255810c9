#!/bin/sh
# run.sh - tests and measurements that need a GPU.
#
# usage: run.sh BUILD [checks|sanitizers|figures|limits ...]     (default: all)
#
# BUILD is a build directory with CUDA=1. Nothing is compiled, so it may come from another machine.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "${1:?the folder of a build}" && pwd) || exit 1
shift
nibble=$build/nibble
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

if ! "$nibble" doctor --device cuda >/dev/null 2>&1; then
    echo "SKIP: no usable GPU ('$nibble doctor' says why)"
    exit 77
fi

# try NAME COMMAND...: runs the command and prints its result in one line. Exit code 77 is a skip.
try() {
    name=$1 rc=0
    shift
    timeout -k 5 600 "$@" >"$work/log" 2>&1 || rc=$?
    if [ $rc -eq 0 ]; then
        echo "ok   $name"
    elif [ $rc -eq 77 ]; then
        echo "SKIP $name: $(tail -n 1 "$work/log")"
    else
        echo "FAIL $name ($*)"
        tail -n 15 "$work/log" | sed 's/^/     /'
        failures=$((failures + 1))
    fi
}

# shape NAME HIDDEN FEED-FORWARD HEADS KV-HEADS LAYERS: makes a random model in NVFP4.
shape() {
    mkdir -p "$work/$1.config"
    cat >"$work/$1.config/config.json" <<JSON
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
 "hidden_act": "silu", "hidden_size": $2, "intermediate_size": $3, "max_position_embeddings": 2048,
 "num_attention_heads": $4, "num_hidden_layers": $6, "num_key_value_heads": $5,
 "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "eos_token_id": 602, "vocab_size": 672}
JSON
    "$nibble" synth -q --sigma 0.05 --config "$work/$1.config/config.json" "$work/$1" &&
        cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$work/$1" &&
        "$nibble" quantize -q "$work/$1" "$work/$1.dat"
}

checks() {
    for test in ops attention linear_decode layers backend training_forward backward backward_products loss optimizer \
        run_ahead infer_batch; do
        try "test_$test" "$build/tests/test_$test"
    done
    try "the command line" sh "$root/tests/cli/cuda.sh" "$nibble"
    try "Hugging Face's outputs" sh "$root/tests/cli/debug_hf.sh" "$nibble"
    seq 1 700 >"$work/text"
    while read -r name sizes; do
        # shellcheck disable=SC2086 # numbers
        shape "$name" $sizes || exit 1
        try "parity of shape $sizes" "$nibble" parity -q -m "$work/$name.dat" --model-dir "$work/$name" \
            --text "$work/text" --device cuda
    done <<SHAPES
a 256 544 8 2 3
b 336 1040 4 2 3
c 512 544 8 8 3
d 1024 3072 16 2 3
e 2560 9728 32 8 2
SHAPES
    try "50 runs and changes of mode" "$nibble" stress kv -q -m "$work/a.dat" \
        --model-dir "$work/a" --iterations 50 --device cuda
}

sanitizers() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "SKIP sanitizers: there is no compute-sanitizer"
        return
    fi
    [ -f "$work/a.dat" ] || shape a 256 544 8 2 3 || exit 1
    for tool in memcheck initcheck racecheck; do
        # prompts of one row, of up to 64 rows (the decode kernels), and of more
        for prompt in "hello" "$(seq 1 16 | tr '\n' ' ')" "$(seq 1 80 | tr '\n' ' ')"; do
            try "$tool, a prompt of ${#prompt} characters" compute-sanitizer --tool $tool \
                --error-exitcode 9 "$nibble" generate -q -m "$work/a.dat" --model-dir "$work/a" \
                --raw -p "$prompt" -n 4 --temp 0 --device cuda
        done
        try "$tool, tokens that are drawn" compute-sanitizer --tool $tool --error-exitcode 9 \
            "$nibble" generate -q -m "$work/a.dat" --model-dir "$work/a" --raw -p hello -n 4 \
            --temp 1 --top-k 20 --device cuda
        # racecheck takes long in products, and has never ended when such kernels
        # run in a graph.
        short='*'
        if [ $tool = racecheck ]; then
            short='*short*'
        else
            try "$tool, twenty sequences" compute-sanitizer --tool $tool --error-exitcode 9 \
                "$build/tests/test_infer_batch" '*twenty*'
        fi
        try "$tool, products of few rows" compute-sanitizer --tool $tool --error-exitcode 9 \
            "$build/tests/test_linear_decode" "$short"
        try "$tool, layers in one call" compute-sanitizer --tool $tool --error-exitcode 9 \
            "$build/tests/test_layers" '*short*'
    done
}

# figure NAME OPTIONS...: prints tokens per second, and their share of the measured roofline.
figure() {
    name=$1
    shift
    if "$nibble" bench "$@" -q --synthetic 4b --device cuda --json >"$work/out" 2>"$work/log"; then
        printf '%-42s %9.0f tok/s' "$name" \
            "$(sed -n 's/.*"tokens_per_s": \([0-9.]*\).*/\1/p' "$work/out")"
        printf ', %.2f of the ceiling\n' "$(sed -n 's/.*"share": \([0-9.]*\).*/\1/p' "$work/out")"
    else
        echo "FAIL $name: $(tail -n 1 "$work/log")"
        failures=$((failures + 1))
    fi
}

figures() {
    figure "decode, 16 tokens of context" decode -n 64
    figure "decode, 4,096 tokens" decode --depth 4096
    figure "decode, 32,768 tokens, f8" decode --depth 32768 --kv-dtype f8
    for n in 8 32 64; do
        figure "$n sequences" decode --parallel $n
    done
    figure "a prompt of 4,096 tokens" prefill -n 4096
}

# memory NAME COMMAND...: prints the most device memory that the command had in use.
memory() {
    name=$1 most=0
    shift
    before=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
    timeout -k 5 600 "$@" >"$work/out" 2>"$work/log" &
    while kill -0 $! 2>/dev/null; do
        used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1)
        [ "$used" -le "$most" ] || most=$used
    done
    if wait $!; then
        printf '%-42s %9d MiB\n' "$name" $((most - before))
    else
        echo "FAIL $name: $(tail -n 1 "$work/log")"
        failures=$((failures + 1))
    fi
}

# With a 4B model: time to the first token, and device memory for long contexts.
limits() {
    if ! nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null |
        grep -q '^[0-9]'; then
        echo "SKIP limits: nvidia-smi says nothing of memory"
        return
    fi
    "$nibble" synth -q 4b "$work/4b" && "$nibble" quantize -q "$work/4b" "$work/4b.dat" || exit 1
    rm "$work"/4b/*.safetensors
    cp "$root/tests/golden/tokenizer/qwen/tokenizer.json" "$work/4b"
    set -- "$nibble" generate -q -m "$work/4b.dat" --model-dir "$work/4b" --raw --temp 0 \
        --ignore-eos --device cuda
    for i in 1 2 3; do
        begin=$(date +%s%N)
        try "first token, time $i" "$@" -p hello -n 1
        echo "     $((($(date +%s%N) - begin) / 1000000)) ms from the start of the process to its end"
    done
    memory "4,096 tokens of context" "$@" -p hello -n 2000 -c 4096
    sed -i 's/\("max_position_embeddings": *\)[0-9]*/\165536/' "$work/4b/config.json"
    # each character of this prompt is a token
    memory "64,000 tokens of context, f8" "$@" -c 64064 --kv-dtype f8 -n 64 \
        -p "$(seq 1 13000 | tr '\n' ' ' | head -c 64000)"
}

[ $# -gt 0 ] || set -- checks sanitizers figures limits
for part; do
    case $part in
    checks | sanitizers | figures | limits) $part ;;
    *)
        echo "run.sh: '$part' is none of checks, sanitizers, figures, limits" >&2
        exit 1
        ;;
    esac
done
[ "$failures" -eq 0 ] || exit 1
