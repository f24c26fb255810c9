#!/bin/sh
# doctor_kernels.sh - the operations of the CPU against the scalar code, as text and as JSON.
. "$(dirname "$0")/lib.sh"

only=""
! sanitized || only=embed # test_check_kernels has the others
check "all operations" 0 "$nibble" doctor --kernels --device cpu ${only:+--only $only}
says out "on cpu ("
says out "agree with the scalar code"
operations="embed rope_table rmsnorm qkv_rope linear attention swiglu gather scatter topk xent
    l1 embed_bwd rmsnorm_bwd linear_bwd qkv_rope_bwd attention_bwd swiglu_bwd grad_stats
    update_plan amax requantize adamw batch"
for operation in ${only:-$operations}; do
    grep -q "^$operation  *.* ok " "$work/out" || { echo "FAIL no line for $operation"; failures=1; }
done
check "one of them, as JSON" 0 "$nibble" doctor --kernels --device cpu --only "adamw, nvfp4" --json
says out '"variant": "nvfp4 moments, f32 master"'
says out '"measure": "bytes"'
says out '"failed": 0'
check "an instruction set" 0 "$nibble" doctor --kernels --device cpu --simd scalar --only rmsnorm
says out "on cpu (scalar)"
check "larger tensors" 0 "$nibble" doctor --kernels --device cpu --only amax --elements 100000
lines out 4
check "none of that name" 1 "$nibble" doctor --kernels --device cpu --only nothing
says err "no operation of this device is called 'nothing'"
finish
