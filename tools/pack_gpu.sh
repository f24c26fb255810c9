#!/bin/sh
# pack_gpu.sh - what the parts of tests/gpu/run.sh need of a build, small enough to be carried.
#
# usage: pack_gpu.sh BUILD OUT
set -eu
build=$1 out=$2
mkdir -p "$out/tests"
strip -o "$out/nibble" "$build/nibble"
strip -o "$out/tests/gpu_tests" "$build/tests/gpu_tests"
[ ! -e "$build/tests/libcmocka.so.0" ] || cp -L "$build/tests/libcmocka.so.0" "$out/tests"
"$out/nibble" --version
du -k "$out/nibble" "$out"/tests/*
