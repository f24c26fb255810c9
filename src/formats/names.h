/* names.h - tensor names of a Qwen3 in Hugging Face form and in GGUF form. */
#pragma once

#include "base/status.h"

#define NBI_GGUF_NAME_MAX 63 /* ggml keeps 64 bytes with the terminator */

/* Both return false for a name the other side has no word for; out holds at most size bytes. */
bool nbi_name_to_gguf(const char *hf, char *out, size_t size);
bool nbi_name_from_gguf(const char *gguf, char *out, size_t size);
