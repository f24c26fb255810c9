#!/bin/sh
# debug_hf_bf16.sh - gradients of a pass in bf16 point where those in f32 point.
. "$(dirname "$0")/lib.sh"
root=$(cd "$(dirname "$0")/../.." && pwd)
compare=$root/tests/gpu/compare.py

for model in tied untied; do
    golden=$root/tests/golden/hf/$model.golden.safetensors
    for type in f32 bf16; do
        check "$model in $type" 0 "$nibble" debug hf -q --device cpu -m "$root/tests/golden/hf/$model" \
            --in "$golden" --compute-dtype $type --out "$work/$type.safetensors"
    done
    check "f32 as Hugging Face" 0 python3 -B "$compare" "$golden" "$work/f32.safetensors" \
        logits:2e-5 grad.:2e-5 adamw3.:2e-4
    says out "worst grad."
    check "bf16 as f32" 0 python3 -B "$compare" "$work/f32.safetensors" "$work/bf16.safetensors" \
        logits:0 grad.:c0.999
    check "but not the same" 1 python3 -B "$compare" "$work/f32.safetensors" \
        "$work/bf16.safetensors" grad.:1e-4
    says out "FAIL grad."
done
finish
