#!/bin/sh
# run.sh - tests that need a GPU, part by part (docs/GPU.md). Nothing is compiled: a build may come
# from another machine.
#
# usage: run.sh BUILD [list | PART...]     (default: all parts)
here=$(cd "$(dirname "$0")" && pwd)
exec python3 -B "$here/run.py" test "$@"
