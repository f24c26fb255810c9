# Closed standard streams, and results that cannot be written.
# shellcheck shell=sh disable=SC2154 # $work, $failures and $nibble are lib.sh's
. "$(dirname "$0")/lib.sh"
model=models/nib

fail() {
    echo "FAIL $name: $1"
    failures=$((failures + 1))
}

check "chat without standard input" 0 sh -c 'exec "$@" <&-' - \
    "$nibble" chat -q -m "$model" -n 4 --log "$work/log.jsonl"
lines out 0
! grep -q '"role"' "$work/log.jsonl" || fail "somebody has said: $(grep -m 1 role "$work/log.jsonl")"

check "text of standard input without one" 0 sh -c 'exec "$@" <&-' - \
    "$nibble" tokenize -m "$model"
[ -z "$(cat "$work/out")" ] || fail "tokens of no text: $(head -c 200 "$work/out")"

echo hello >"$work/in"
name="chat without any output" code=0
"$nibble" chat -q -m "$model" -n 4 --log "$work/closed.jsonl" <"$work/in" >&- 2>&- || code=$?
[ "$code" -eq 1 ] || fail "exit code $code, 1 expected"
python3 -c 'import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    assert isinstance(json.loads(line), dict)' "$work/closed.jsonl" || fail "the log holds other things"

# A file that is written must not become standard output, nor be written to as if it were.
name="convert without any output" code=0
"$nibble" convert "$model" "$work/closed.dat" <&- >&- 2>&- || code=$?
check "convert" 0 "$nibble" convert -q "$model" "$work/open.dat"
cmp -s "$work/closed.dat" "$work/open.dat" || fail "the file is another one"

check "a result that cannot be written" 1 sh -c '"$0" eval identity -q -m "$1" --base "$1" \
    --name Ada --languages en --count 100 --questions 1 -n 1 >/dev/full' "$nibble" "$model"
says err "cannot write to standard output"

# A signal that comes while nobody reads ends the write, and is the reason to say.
for signal in INT HUP; do
    check "SIG$signal beside a full pipe" 0 python3 - "$nibble" "$model" "SIG$signal" <<'PY'
import signal
import subprocess
import sys
import time

nibble, model, name = sys.argv[1:4]
number = getattr(signal, name)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with subprocess.Popen([nibble, "tokenize", "-m", model, "--jsonl"], stdin=subprocess.PIPE,
                      stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
    try:
        p.stdin.write(b'{"text":"the cat sees a dog"}\n' * 2000)
        p.stdin.flush()
        time.sleep(0.3)
    finally:
        p.send_signal(number)
    code = p.wait()
    said = p.stderr.read().decode()
assert code == (130 if name == "SIGINT" else 129), (code, said)
assert "interrupted" in said and "standard output" not in said, said
PY
done
finish
