/* chat_log.h - the log of a chat: one JSON object per line.
 *
 * The lines are a transcript (nibble/text.h) with times, token counts and settings. An existing
 * file is appended to. */
#pragma once

#include "base/str.h"
#include "nibble/text.h"

struct cli_chat_log {
    const char *path; /* NULL: no log */
    int fd;
};

enum nb_status cli_chat_log_open(struct cli_chat_log *log, const char *path);
void cli_chat_log_close(struct cli_chat_log *log);

/* How a chat was asked to run, for {"event":"start"}. */
struct cli_chat_settings {
    const char *model;
    const struct nb_generate_opts *generate;
    int64_t context;
    bool think;
};

enum nb_status cli_chat_log_start(struct cli_chat_log *log, const struct cli_chat_settings *s);
enum nb_status cli_chat_log_reset(struct cli_chat_log *log);
enum nb_status cli_chat_log_load(struct cli_chat_log *log, const struct nb_conversation *c);
enum nb_status cli_chat_log_message(struct cli_chat_log *log, enum nb_role role, const char *text,
                                    size_t len);
enum nb_status cli_chat_log_answer(struct cli_chat_log *log, const struct nb_generate_result *r,
                                   bool interrupted);

/* The members of an answer, from "role" on, without braces. */
void cli_chat_put_answer(struct nbi_str *out, const struct nb_generate_result *r, bool interrupted);
