#!/bin/sh
# gpu.sh - measurements on a GPU, part by part (docs/GPU.md), beside their ceilings and targets.
# Nothing is compiled: a build may come from another machine.
#
# usage: gpu.sh BUILD [list | PART...]     (default: all parts but those of scale)
here=$(cd "$(dirname "$0")" && pwd)
exec python3 -B "$here/../tests/gpu/run.py" bench "$@"
