/* sharegpt.h - conversations in the form of ShareGPT. */
#pragma once

#include "base/jscan.h"

/* Finds the conversation of a JSONL line: *object is the line itself if it has "messages", or the
 * line's "conversations", [{"from": "human"|"gpt"|"system", "value": text}, ...], in the form of
 * "messages", made in *scratch, which has to outlive it. Absent if the line has neither. */
enum nb_status nbi_sharegpt_messages(struct nbi_jspan line, struct nbi_str *scratch,
                                     struct nbi_jspan *object);
