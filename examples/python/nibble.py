"""nibble.py - generates and trains with libnibble. Python 3.9 or later, with nibble_h.py."""
from __future__ import annotations

import contextlib
import ctypes
import queue
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_size_t, c_void_p
from typing import Any, Callable, Iterator, Optional, Sequence

import nibble_h
from nibble_h import NibbleError, S, fill, members

__all__ = ["Model", "NibbleError", "load", "train"]
NB_ROLE_USER = 1
_free = ctypes.CDLL(None).free
_free.argtypes = [c_void_p]
_lib: Any = None


def load(path: Optional[str] = None) -> Any:
    """Loads the library: path, or $NIBBLE_LIBRARY, or what the loader finds. Models and training
    runs load it, too; to choose a path, call this before them."""
    global _lib
    _lib = _lib or nibble_h.load(path)
    return _lib


class _Caller:
    """Makes calls on a thread of its own, so that Ctrl-C reaches Python while they run."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.cancel = S["nb_cancel"]()
        self.pointer = ctypes.addressof(self.cancel)

    def __call__(self, function: Any, *args: Any) -> None:
        """Calls and waits. Ctrl-C cancels the call, and goes on once it has returned."""
        call = self.thread.submit(function, *args)
        try:
            call.result()
        except KeyboardInterrupt:
            self.stop(call)
            raise

    def stop(self, call: Future[None]) -> None:
        """Cancels a call and waits for its end."""
        load().nb_cancel_set(self.pointer)
        call.exception()


class Model:
    """A loaded model. Any number of threads may use it; it is closed when nobody does any more."""

    def __init__(self, path: str, **options: Any) -> None:
        """options: members of struct nb_engine_opts."""
        lib, call, self._engine = load(), _Caller(), c_void_p()
        opts = fill(S["nb_engine_opts"](), {**options, "model": path, "cancel": call.pointer})
        weakref.finalize(self, lib.nb_engine_close, self._engine)
        call(lib.nb_engine_open, byref(self._engine), byref(opts))

    def info(self) -> dict[str, Any]:
        """The members of struct nb_engine_info."""
        load().nb_engine_info(self._engine, byref(info := S["nb_engine_info"]()))
        return members(info)

    def _encode(self, prompt: bytes, raw: bool) -> tuple[c_void_p, c_size_t]:
        """The ids of a message in the chat template, or of a text. The caller frees them."""
        lib, ids, count, text, size = load(), c_void_p(), c_size_t(), c_void_p(), c_size_t()
        tokenizer = lib.nb_engine_tokenizer(self._engine)
        if not tokenizer:
            raise NibbleError("the model has no tokenizer")
        if not raw:
            message = S["nb_message"](NB_ROLE_USER, prompt, len(prompt))
            lib.nb_chat_prompt(lib.nb_engine_chat(self._engine), byref(message), 1, False,
                               byref(text), byref(size))
        try:
            lib.nb_tokenizer_encode(tokenizer, *((prompt, len(prompt)) if raw else (text, size)),
                                    not raw, byref(ids), byref(count))
        finally:
            _free(text)
        return ids, count

    def generate(self, prompt: str, *, raw: bool = False, max_tokens: int = 0,
                 stop: Sequence[str] = (), **sampling: Any) -> Iterator[str]:
        """Yields the answer to a message as it grows; raw: what follows a text. Leaving the loop
        over it ends the answer. max_tokens 0: until the context is full. sampling: members of
        struct nb_sampling, in place of what the model asks for."""
        lib, call, session, pieces = load(), _Caller(), c_void_p(), queue.SimpleQueue()
        result = S["nb_generate_result"]()

        def put(_ctx: Any, text: int, size: int) -> int:
            pieces.put(ctypes.string_at(text, size).decode())
            return 0  # NB_OK

        opts = fill(S["nb_generate_opts"](text=nibble_h.TextFn(put), cancel=call.pointer),
                    {"max_tokens": max_tokens, "stop": stop})
        lib.nb_engine_info(self._engine, byref(info := S["nb_engine_info"]()))
        opts.sampling = fill(info.sampling, sampling)
        ids, count = self._encode(prompt.encode(), raw)
        try:
            lib.nb_session_open(byref(session), self._engine, byref(S["nb_session_opts"]()))
            running = call.thread.submit(lib.nb_generate, session, ids, count, byref(opts),
                                         byref(result))
            running.add_done_callback(lambda _: pieces.put(None))
            try:
                yield from iter(pieces.get, None)
                running.result()
            finally:
                call.stop(running)
        finally:
            lib.nb_generate_result_release(byref(result))
            lib.nb_session_close(session)
            _free(ids)


def train(model: str, data: Sequence[str], out: Optional[str] = None,
          each: Optional[Callable[[dict[str, Any]], Any]] = None, **options: Any) -> dict[str, Any]:
    """Trains on the files of data, writes the result to out and returns the last progress.

    each: gets the members of struct nb_train_progress after every step. If it returns true, the run
    ends there, and the result is written. If it raises, or with Ctrl-C, there is only a checkpoint,
    in checkpoint_dir. options: members of struct nb_train_opts; by default as in the program."""
    lib, call, trainer, done = load(), _Caller(), c_void_p(), ctypes.c_bool()
    opts, result = S["nb_train_opts"](), S["nb_train_result"]()
    lib.nb_train_defaults(byref(opts))
    fill(opts, {"device": "auto", "seq_len": 512, "batch_size": 4, "grad_accum": 1,
                "schedule": "cosine", "final_lr_frac": 0.1, "precision": "nvfp4",
                "bf16_master": True, "moment_type": "int8", **options, "model": model,
                "data": data, "out": out, "cancel": call.pointer,
                "warn": nibble_h.WarnFn(lambda _ctx, text: warnings.warn(text.decode()))})
    try:
        call(lib.nb_trainer_open, byref(trainer), byref(opts))
        while not done:
            call(lib.nb_trainer_step, trainer, byref(done))
            lib.nb_trainer_status(trainer, byref(result))
            if each and each(members(result.last)):
                break
        call(lib.nb_trainer_finish, trainer, byref(result))
        return members(result.last)
    except BaseException:
        with contextlib.suppress(NibbleError):  # without a directory, or saved already
            if trainer:
                call(lib.nb_trainer_save, trainer)
        raise
    finally:
        lib.nb_trainer_close(trainer)
