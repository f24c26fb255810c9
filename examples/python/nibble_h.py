"""nibble_h.py - what nibble.py needs of nibble.h, for ctypes.

ctypes cannot read a header, and a mistake in this copy would corrupt memory: tests/system/python.py
compares all of it with what a C compiler says of the installed header.
"""
from __future__ import annotations

import ctypes as c
import os
from typing import Any, Optional

VERSION = "0.1."  # of the library whose declarations these are

TextFn = c.CFUNCTYPE(c.c_uint, c.c_void_p, c.c_void_p, c.c_size_t)
WarnFn = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p)
Strings = c.POINTER(c.c_char_p)  # NULL-terminated

TYPES: dict[str, Any] = {
    "bool": c.c_bool, "int": c.c_int, "enum": c.c_uint, "u32": c.c_uint32, "i64": c.c_int64,
    "u64": c.c_uint64, "size": c.c_size_t, "f64": c.c_double, "device": c.c_char * 16,
    "ptr": c.c_void_p, "str": c.c_char_p, "strs": Strings, "text_fn": TextFn, "warn_fn": WarnFn}

# The names of enumerators, in order, by the member of nb_train_opts that takes them.
ENUMS = {"loss": "ce scalar", "schedule": "constant linear cosine wsd",
         "precision": "bf16 f32 nvfp4", "compute": "auto f32 bf16",
         "weight_store": "auto bf16 codes scales", "moment_type": "f32 bf16 int8 nvfp4"}

# A line is 'struct: type member...; type member...'.
STRUCTS = """
nb_cancel: int set
nb_engine_opts: str model model_dir synthetic config device simd; int threads;
  ptr progress progress_ctx cancel
nb_session_opts: i64 context chunk; enum kv mode; bool exact; ptr cancel
nb_message: enum role; str text; size len
nb_sampling: f64 temperature; i64 top_k; f64 top_p min_p repeat_penalty presence_penalty
  frequency_penalty; u64 seed; ptr bias; int bias_count
nb_engine_info: i64 vocab context layers parameters weight_bytes bytes_per_token; int threads;
  str device simd; nb_sampling sampling
nb_generate_opts: nb_sampling sampling; i64 max_tokens; strs stop; bool ignore_eos check_logits;
  text_fn text; ptr ctx cancel
nb_generate_result: ptr text; size len; ptr ids; size count; i64 prompt_tokens reused_tokens;
  f64 prompt_seconds seconds; enum finish; u32 logits_crc
nb_train_opts: str model model_dir synthetic config device; bool random_tokens; strs data eval_data;
  str out; bool from_scratch overwrite; enum loss; f64 kl_base; str replay; f64 replay_share;
  i64 steps epochs seq_len batch_size grad_accum; f64 lr final_lr_frac; enum schedule; i64 warmup;
  f64 beta1 beta2 eps weight_decay grad_clip; bool clip_by_layer bf16_master bf16_gradients;
  enum precision compute weight_store moment_type; i64 step_chunk_rows train_last_layers;
  bool recompute fused_step sequential head_slices; u64 seed; i64 eval_every;
  f64 stop_if_ppl_rises; i64 save_every; f64 save_minutes; str checkpoint_dir; int keep;
  bool resume; str log test_prompts memory_report simd; int threads;
  ptr stage stage_progress started progress evaluated answered; warn_fn warn; ptr ctx cancel
nb_train_progress: i64 step steps; f64 loss lr grad_norm; i64 tokens; f64 tokens_per_s seconds_left;
  u64 resident_bytes device_bytes; i64 skipped; f64 kl
nb_train_eval: i64 step tokens; f64 loss master_loss
nb_train_plan: i64 masters moments gradients weights activations scratch prompts tables rounding
  context host total parameters; f64 flops_per_token layer_flops_per_token head_flops_per_token;
  enum compute; bool gpu
nb_train_result: nb_train_progress last; nb_train_eval eval; nb_train_plan plan; u64 peak_bytes;
  bool interrupted exported stopped; i64 result_step; device device
"""

# 'result function parameter...'; an enum is nb_status.
FUNCTIONS = """
str nb_version
str nb_last_error
void nb_cancel_set ptr
enum nb_engine_open ptr ptr
void nb_engine_close ptr
void nb_engine_info ptr ptr
ptr nb_engine_tokenizer ptr
ptr nb_engine_chat ptr
enum nb_session_open ptr ptr ptr
void nb_session_close ptr
enum nb_chat_prompt ptr ptr size bool ptr ptr
enum nb_tokenizer_encode ptr ptr size bool ptr ptr
enum nb_generate ptr ptr size ptr ptr
void nb_generate_result_release ptr
void nb_train_defaults ptr
enum nb_trainer_open ptr ptr
enum nb_trainer_step ptr ptr
void nb_trainer_status ptr ptr
enum nb_trainer_save ptr
enum nb_trainer_finish ptr ptr
void nb_trainer_close ptr
"""


class NibbleError(Exception):
    """A call that failed, with the text of nb_last_error()."""


def _define() -> dict[str, Any]:
    """Makes a class of each structure, which is a type of others as well."""
    structs = {}
    for line in STRUCTS.strip().replace("\n  ", " ").splitlines():
        tag, _, members = line.partition(": ")
        fields = [(name, TYPES[kind]) for kind, *names in map(str.split, members.split(";"))
                  for name in names]
        TYPES[tag] = structs[tag] = type(tag, (c.Structure,), {"_fields_": fields})
    return structs


def load(path: Optional[str] = None) -> Any:
    """The library: path, or $NIBBLE_LIBRARY, or where the loader finds it. Its functions raise
    NibbleError; the message is the calling thread's, so it is fetched there."""
    lib = c.CDLL(path or os.environ.get("NIBBLE_LIBRARY") or "libnibble.so.0")

    def check(status: int, *_: Any) -> None:
        if status != 0:
            raise NibbleError(lib.nb_last_error().decode(errors="replace"))

    for result, name, *parameters in map(str.split, FUNCTIONS.strip().splitlines()):
        function = getattr(lib, name)
        function.restype = None if result == "void" else TYPES[result]
        function.argtypes = [TYPES[p] for p in parameters]
        if result == "enum":
            function.errcheck = check
    version = lib.nb_version().decode()
    if not version.startswith(VERSION):
        raise NibbleError(f"libnibble is {version}, and this module is for {VERSION}x")
    return lib


def fill(struct: Any, values: dict[str, Any]) -> Any:
    """Sets members by name: texts, paths, lists of them, numbers, names of enumerators."""
    types = dict(struct._fields_)
    for name, value in values.items():
        if name not in types:
            raise TypeError(f"struct {type(struct).__name__} has no member '{name}'")
        if name in ENUMS:
            value = ENUMS[name].split().index(value)
        elif types[name] is c.c_char_p and value is not None:
            value = os.fsencode(value)
        elif types[name] is Strings:
            value = (c.c_char_p * (len(value) + 1))(*map(os.fsencode, value))
        setattr(struct, name, value)
    return struct


def members(struct: Any) -> dict[str, Any]:
    """The values of a structure by name."""
    values = {name: getattr(struct, name) for name, _ in struct._fields_}
    return {n: v.decode() if isinstance(v, bytes) else v for n, v in values.items()}


S = _define()
