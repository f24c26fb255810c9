# guard: exit codes, limits, processes that hide, signals.
# shellcheck shell=sh disable=SC2154,SC2016,SC2086 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"
command -v python3 >/dev/null || exit 77

# hold MIB SECONDS: what a greedy child does.
cat >"$work/hold.py" <<'END'
import sys, time
data = bytearray(int(sys.argv[1]) << 20)
for i in range(0, len(data), 4096):
    data[i] = 1
print("held", flush=True)
time.sleep(float(sys.argv[2]))
END
hold="python3 -B $work/hold.py"

# gone WORD: no process has WORD in its command line. It may take a moment to vanish.
gone() {
    echo "$1" >"$work/word" # and not in grep's own command line
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        left=$(grep -l -a -F -f "$work/word" /proc/[0-9]*/cmdline 2>/dev/null || :)
        [ -n "$left" ] || return 0
        sleep 0.1
    done
    echo "FAIL $name: still there: $left"
    failures=$((failures + 1))
}

# The command's own code.
check "success" 0 "$nibble" guard --limit-gb 1 -- true
lines err 0
check "output" 0 "$nibble" guard --limit-gb 1 -- echo one -q --help --
says out "one -q --help --"
check "failure" 7 "$nibble" guard --limit-gb 1 -- sh -c 'exit 7'
check "a signal" 137 "$nibble" guard --limit-gb 1 -- sh -c 'kill -9 $$'
check "not found" 127 "$nibble" guard --limit-gb 1 -- "$work/none"
says err "cannot run '$work/none': No such file"
lines err 1
check "not to be run" 126 "$nibble" guard --limit-gb 1 -- "$work/hold.py"
says err "Permission denied"
check "aliases" 0 "$nibble" guard --gpu-limit-gb 1 --gpu-over-secs 1 --gpu-poll-secs 0.1 -- true

# Usage.
check "no limit" 2 "$nibble" guard -- true
says err "--limit-gb X is missing"
check "no command" 2 "$nibble" guard --limit-gb 1
says err "COMMAND... is missing"
check "polling too often" 2 "$nibble" guard --limit-gb 1 --poll-secs 0.01 -- true
check "no limit at all" 2 "$nibble" guard --limit-gb 0 -- true
check "json" 2 "$nibble" guard --limit-gb 1 --json -- true

# Limits. A sanitizer's own memory is none of the child's.
check "below the limit" 0 "$nibble" guard --limit-gb 0.5 --poll-secs 0.05 -- $hold 100 0.5
says out "held"
lines err 0
check "over the limit" 124 "$nibble" guard --limit-gb 0.2 --poll-secs 0.05 -- $hold 300 60
says err "is over the limit of 204.80 MiB; the largest is process"
says err "(python3)"
lines err 1
gone "$work/hold.py"
check "quiet too" 124 "$nibble" guard -q --limit-gb 0.2 --poll-secs 0.05 -- $hold 300 60
lines err 1
check "verbose" 0 "$nibble" guard -v --limit-gb 1 --poll-secs 0.05 -- $hold 10 0.2
says err "host memory"

# For a while is fine, for longer is not.
check "over for a moment" 0 "$nibble" guard --limit-gb 0.2 --over-secs 20 --poll-secs 0.05 -- \
    $hold 300 0.5
check "over for too long" 124 "$nibble" guard --limit-gb 0.2 --over-secs 0.5 --poll-secs 0.05 -- \
    $hold 300 60
says err " for 0."

# The sum counts, grandchildren too, and those that left their parent, group and session.
check "two of them" 124 "$nibble" guard --limit-gb 0.3 --poll-secs 0.05 -- \
    sh -c "$hold 200 60 & $hold 200 60; wait"
says err "ending 3 processes"
gone "$work/hold.py"
cat >"$work/daemon.py" <<END
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("python3", ["python3", "-B", "$work/hold.py", "300", "60"])
    os._exit(0)
time.sleep(60)
END
check "a daemon" 124 "$nibble" guard --limit-gb 0.2 --poll-secs 0.05 -- python3 -B "$work/daemon.py"
gone "$work/hold.py"
gone "$work/daemon.py"
check "shared pages count once" 0 "$nibble" guard --limit-gb 0.4 --poll-secs 0.05 -- \
    python3 -B -c 'import os, time
data = bytearray(200 << 20)
data[::4096] = b"x" * len(data[::4096])
for i in range(4):
    if os.fork() == 0:
        time.sleep(0.7)
        os._exit(0)
for i in range(4):
    os.wait()'

# One that does not mind SIGTERM, and one that cleans up.
check "stubborn" 124 "$nibble" guard --limit-gb 0.2 --poll-secs 0.05 --grace-secs 0.3 -- \
    sh -c "trap '' TERM; $hold 300 60"
gone "$work/hold.py"
check "polite" 124 "$nibble" guard --limit-gb 0.1 --poll-secs 0.05 --grace-secs 20 -- \
    python3 -B -c '
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *a: (print("cleaned up", flush=True), sys.exit(0)))
def pss():
    with open("/proc/self/smaps_rollup") as f:
        return sum(int(line.split()[1]) for line in f if line.startswith("Pss:")) * 1024
held = []
while pss() < 0.101 * 2**30: # much more, and there is no grace
    held.append(bytearray(b"x") * 2**20)
while True:
    time.sleep(1)'
says out "cleaned up"

# A driver made up for the test: one GPU, where the process in the file "gpu" has the bytes there.
cat >"$work/nvml.c" <<'END'
#include <stdio.h>
#include <stdlib.h>
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned a, b; };
static struct process now(void)
{
    struct process p = {0};
    FILE *f = fopen(getenv("FAKE_GPU"), "r");
    if (f && fscanf(f, "%u %llu", &p.pid, &p.used) != 2)
        p.used = 0;
    if (f)
        fclose(f);
    return p;
}
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = NULL; return i; }
int nvmlDeviceGetName(void *d, char *s, unsigned n) { return d || !s || !n; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) { *a = *b = 0; return d != NULL; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { return !s || !n; }
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m) { m->used = now().used; return d != NULL; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, struct process *p)
{
    p[0] = now();
    *n = p[0].used > 0;
    return d != NULL;
}
END
if cc -w -shared -fPIC -o "$work/libnvidia-ml.so.1" "$work/nvml.c" 2>/dev/null; then
    export FAKE_GPU="$work/gpu" LD_LIBRARY_PATH="$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    check "GPU memory below" 0 "$nibble" guard --limit-gb 3.5 --poll-secs 0.05 -- \
        sh -c 'echo $$ 3221225472 >"$FAKE_GPU"; sleep 0.3'
    rm "$work/gpu"
    check "GPU memory over" 124 "$nibble" guard --limit-gb 2.5 --poll-secs 0.05 -- \
        sh -c 'echo $$ 3221225472 >"$FAKE_GPU"; sleep 60'
    says err "GPU memory of 3.00 GiB is over the limit of 2.50 GiB"
    rm "$work/gpu"
    if [ "$(readlink /proc/self/ns/pid)" = "pid:[4026531836]" ]; then # else nobody can tell whose
        check "GPU memory of others" 0 "$nibble" guard --limit-gb 2.5 --poll-secs 0.05 -- \
            sh -c 'echo 1 3221225472 >"$FAKE_GPU"; sleep 0.3'
    fi
    unset FAKE_GPU LD_LIBRARY_PATH
fi

# Signals are passed on, once.
counter='n=0; trap "n=\$((n + 1))" INT; sleep 1 & wait; sleep 0.3; echo "$n signals"'
"$nibble" guard --limit-gb 1 -- sh -c "$counter" >"$work/out" 2>"$work/err" &
pid=$!
sleep 0.4
kill -INT $pid
name="SIGINT passed on"
code=0
wait $pid || code=$?
[ $code -eq 0 ] || { echo "FAIL $name: exit code $code"; failures=$((failures + 1)); }
says out "1 signals"
check "SIGTERM" 143 timeout -s TERM --preserve-status 0.5 "$nibble" guard --limit-gb 1 -- sleep 77.25
gone 77.25

# Without its guard a command is asked to end.
"$nibble" guard --limit-gb 1 -- sleep 77.5 &
pid=$!
sleep 0.4
kill -9 $pid
wait $pid 2>/dev/null || :
name="a killed guard"
gone 77.5

# No zombie stays while the command runs: ten orphans end before it does.
check "zombies" 0 "$nibble" guard --limit-gb 1 -- sh -c '
    for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.05 & exit 0); done
    sleep 0.5
    cat /proc/[0-9]*/stat 2>/dev/null | grep -c ") Z $PPID " || :'
says out "0"
finish
