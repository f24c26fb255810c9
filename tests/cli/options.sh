# Options, help and exit codes, through the binary.
. "$(dirname "$0")/lib.sh"

check "no command" 2 "$nibble"
says err "usage: nibble COMMAND"
check "help" 0 "$nibble" help
says out "quantize"
check "each group once" 0 sh -c '! "$0" help | grep "^[a-z ]*:$" | sort | uniq -d | grep .' "$nibble"
check "version" 0 "$nibble" --version
says out "nibble 0."
check "help of a command" 0 "$nibble" help convert
says out "--layout keep|modelopt|compressed-tensors"
check "--help" 0 "$nibble" convert --help
says out "usage: nibble convert SRC DST"
check "unknown command" 2 "$nibble" quantise
says err "did you mean 'quantize'?"
check "help of an unknown command" 2 "$nibble" help inspct
says err "did you mean 'inspect'?"

check "unknown option" 2 "$nibble" quantize a b --metod rtn
says err "did you mean '--method'?"
lines err 1
check "unknown option with a value" 2 "$nibble" quantize a b --metod=rtn
says err "did you mean '--method'?"
check "unknown letter" 2 "$nibble" inspect a -z
says err "unknown option '-z'"
check "missing value" 2 "$nibble" quantize a b --method
says err "--method needs a value"
check "bad choice" 2 "$nibble" quantize a b --method best
says err "--method takes rtn|4over6|sweep, not 'best'"
check "bad choice with =" 2 "$nibble" quantize a b --method=best
says err "not 'best'"
check "number out of range" 2 "$nibble" inspect a --threads 0
says err "--threads takes a whole number from 1 to 4096, not '0'"
check "no number" 2 "$nibble" inspect a --threads 2x
says err "not '2x'"
check "empty number" 2 "$nibble" inspect a --threads=
check "value for a flag" 2 "$nibble" inspect a --verify=yes
says err "--verify takes true or false, not 'yes'"
check "missing argument" 2 "$nibble" convert a
says err "DST is missing"
check "one argument too many" 2 "$nibble" inspect a b
says err "unexpected argument 'b'"
check "bad device" 2 "$nibble" doctor --device gpu
says err "--device takes auto, cpu, cuda or cuda:N"
check "bad number of a device" 2 "$nibble" doctor --device cuda:-1
check "no number of a device" 2 "$nibble" doctor --device cuda:
check "device that is not there" 1 "$nibble" doctor --device cuda:7
lines err 1
check "dashes end options" 1 "$nibble" inspect -- --verify
says err "cannot open '--verify'"

check "help with too much" 2 "$nibble" help inspect extra
check "layout where there is none" 2 "$nibble" convert a b.gguf --layout modelopt
says err "--layout does not apply to 'b.gguf'"
check "shards where there are none" 2 "$nibble" convert a b.dat --shard-mb 5
check "--model and all arguments" 2 "$nibble" inspect -m x y
check "report over the result" 2 "$nibble" quantize a b.dat --report b.dat
says err "would overwrite"
check "a report that cannot be written" 1 "$nibble" quantize a b.dat --report no/such/dir/r.json
says err "no/such/dir"
check "a size that there is not" 2 "$nibble" synth 3b "$work/x"
check "the target has no name" 1 "$nibble" convert a ""
check "doctor" 0 "$nibble" doctor
says out "NVFP4 quantise"
says out "NVFP4 products"
says out "train bf16 batch-invariant"
says out "jansson $(pkg-config --modversion jansson)"
says out "pcre2 $(pkg-config --modversion libpcre2-8)"
says out "utf8proc "
check "doctor as JSON" 0 "$nibble" doctor --json
says out '"problems"'
says out '"capabilities": "train bf16 batch-invariant"'
check "output that cannot be written" 1 sh -c '"$0" help >/dev/full' "$nibble"
says err "cannot write to standard output"
finish
