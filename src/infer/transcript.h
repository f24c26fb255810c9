/* transcript.h - conversations and logs of them, as bytes in memory. */
#pragma once

#include "nibble.h"

/* What nb_transcript_read does with a file; name is for messages. */
enum nb_status nbi_transcript_parse(const char *bytes, size_t len, const char *name,
                                    nb_transcript_fn fn, void *ctx);
