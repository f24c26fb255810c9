/* transcript.h - reads saved conversations and chat logs from memory. */
#pragma once

#include "nibble/text.h"

/* As nb_transcript_read() for the bytes of a file; name is its name in error messages. */
enum nb_status nbi_transcript_parse(const char *bytes, size_t len, const char *name,
                                    nb_transcript_fn fn, void *ctx);
