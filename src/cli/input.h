/* input.h - text that a command reads from a file or from standard input. */
#pragma once

#include "base/jscan.h"
#include "base/str.h"

struct cli_input {
    int fd;
    const char *name;
    char buffer[1 << 16];
    size_t at, len; /* unread bytes of the buffer: [at, len) */
    bool end;
};

/* file NULL is standard input. */
enum nb_status cli_input_open(struct cli_input *in, const char *file);
void cli_input_close(struct cli_input *in);

/* The next line without its line end; *more false: the input has ended. */
enum nb_status cli_input_line(struct cli_input *in, struct nbi_str *line, bool *more);

/* All of it; file NULL is standard input. The caller releases *text. */
enum nb_status cli_read_all(const char *file, struct nbi_str *text);

/* Calls fn for every line that is not blank, without its end. Stops at the first failure, whose
 * message then says which line it was; what was printed before stays. */
typedef enum nb_status (*cli_line_fn)(void *ctx, const char *line, size_t len);
enum nb_status cli_read_lines(const char *file, cli_line_fn fn, void *ctx);

/* Prints {"text": ...} as a line. */
enum nb_status cli_print_text_line(const char *text, size_t len);
