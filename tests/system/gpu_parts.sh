#!/bin/sh
# gpu_parts.sh - the parts of tests/gpu/run.py and bench/gpu.sh with small sizes, on the CPU: that
# they run, and that they notice a result that is wrong.
. "$(dirname "$0")/../cli/lib.sh"
root=$(cd "$(dirname "$0")/../.." && pwd)
if sanitized; then
    echo "SKIP: no other than without a sanitizer, and slow"
    exit 77
fi
export NB_GPU_SMALL=1 NB_GPU_DEVICE=cpu NVIDIA_SMI="$work/smi"
printf '#!/bin/sh\necho 1000\n' >"$work/smi"
chmod +x "$work/smi"

check "the list of tests" 0 sh "$root/tests/gpu/run.sh" "$nibble" list
says out "sanitize-train"
check "the list of measurements" 0 sh "$root/bench/gpu.sh" "$nibble" list
says out "scale-nvfp4-int8-3"
check "tests" 0 sh "$root/tests/gpu/run.sh" "$nibble" kernels hf bits gradients resume overfit \
    whoami-4b long kills
says out "hf: ok   tied: logits"
says out "kills:      passed"
check "measurements" 0 sh "$root/bench/gpu.sh" "$nibble" train inference plan limits
says out "4B, 1 x 24:"
check "no such part" 1 sh "$root/tests/gpu/run.sh" "$nibble" everything
says err "there is no part 'everything'"

# A program that writes wrong gradients in bf16.
cat >"$work/nibble" <<SH
#!/bin/sh
"$nibble" "\$@" || exit
case "\$*" in
*bf16*)
    python3 -B - "\$@" <<PY
import sys

with open(sys.argv[sys.argv.index("--out") + 1], "r+b") as f:
    half = f.seek(0, 2) // 2
    f.seek(half // 4 * 4)
    f.write(bytes([60]) * (half - 8))
PY
    ;;
esac
SH
chmod +x "$work/nibble"
check "what is wrong" 1 sh "$root/tests/gpu/run.sh" "$work/nibble" gradients hf
says out "gradients: FAIL two layers of 4B, bf16"
says out "gradients:      FAILED, 1 of its lines"
says out "hf:      passed"
finish
