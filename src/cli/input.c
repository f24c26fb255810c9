/* input.c - whole texts and lines from a file or standard input.
 *
 * Standard output is flushed before a read that may wait: a program at the other end of two pipes
 * gets its answer. */
#include "cli/input.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

enum nb_status cli_input_open(struct cli_input *in, const char *file)
{
    in->name = file ? file : "standard input";
    in->at = in->len = 0;
    in->end = false;
    in->fd = file ? -1 : STDIN_FILENO;
    while (in->fd < 0) {
        in->fd = open(file, O_RDONLY | O_CLOEXEC); /* a pipe waits here for its writer */
        int cause = errno;
        if (in->fd >= 0)
            break;
        NBI_TRY(nbi_check_interrupt());
        if (cause != EINTR)
            return nbi_fail(cause == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot open '%s': %s", file,
                            strerror(cause));
    }
    return NB_OK;
}

void cli_input_close(struct cli_input *in)
{
    if (in->fd > STDIN_FILENO)
        close(in->fd);
}

/* Fills an empty buffer, or notes the end of the input. */
static enum nb_status input_fill(struct cli_input *in)
{
    if (in->at < in->len || in->end)
        return NB_OK;
    fflush(stdout);
    struct pollfd waited = {.fd = in->fd, .events = POLLIN};
    ssize_t n;
    do {
        int ready = poll(&waited, 1, 100);
        NBI_TRY(nbi_check_interrupt());
        n = -1;
        errno = EINTR;
        if (ready > 0)
            n = read(in->fd, in->buffer, sizeof in->buffer);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return nbi_fail(NB_EIO, "cannot read '%s': %s", in->name, strerror(errno));
    in->at = 0;
    in->len = (size_t)n;
    in->end = n == 0;
    return NB_OK;
}

static enum nb_status too_long(const struct nbi_str *text, const char *what)
{
    if (text->failed && text->len + (1 << 17) > NBI_STR_MAX)
        return nbi_fail(NB_EVALUE, "%s is longer than %zu MiB", what, NBI_STR_MAX >> 20);
    return nbi_str_status(text);
}

/* Appends bytes up to and including the next `last`, or all of them (last -1). *more false: nothing
 * was left. */
static enum nb_status input_take(struct cli_input *in, int last, struct nbi_str *out, bool *more)
{
    *more = false;
    for (;;) {
        NBI_TRY(input_fill(in));
        if (in->end)
            return NB_OK;
        *more = true;
        const char *p = in->buffer + in->at;
        const char *stop = last < 0 ? NULL : memchr(p, last, in->len - in->at);
        size_t n = stop ? (size_t)(stop - p) + 1 : in->len - in->at;
        nbi_str_append(out, p, n);
        NBI_TRY(too_long(out, last < 0 ? "it" : "the line"));
        in->at += n;
        if (stop)
            return NB_OK;
    }
}

enum nb_status cli_input_line(struct cli_input *in, struct nbi_str *line, bool *more)
{
    line->len = 0;
    NBI_TRY(input_take(in, '\n', line, more));
    if (line->len > 0 && line->p[line->len - 1] == '\n')
        line->p[--line->len] = 0;
    return NB_OK;
}

enum nb_status cli_read_all(const char *file, struct nbi_str *text)
{
    struct cli_input in;
    bool more;
    NBI_TRY(cli_input_open(&in, file));
    enum nb_status rc = input_take(&in, -1, text, &more);
    cli_input_close(&in);
    return rc == NB_EINTERRUPTED ? rc : nbi_context(rc, "reading '%s'", in.name);
}

static bool is_blank(const char *line, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!line[i] || !strchr(" \t\r", line[i]))
            return false;
    return true;
}

enum nb_status cli_read_lines(const char *file, cli_line_fn fn, void *ctx)
{
    struct cli_input in;
    struct nbi_str line = {0};
    bool more = true;
    NBI_TRY(cli_input_open(&in, file));
    enum nb_status rc = NB_OK;
    for (size_t number = 1; rc == NB_OK && !ferror(stdout); number++) {
        rc = cli_input_line(&in, &line, &more);
        if (rc == NB_OK && !more)
            break;
        if (rc == NB_OK && !is_blank(nbi_str_text(&line), line.len))
            rc = fn(ctx, line.p, line.len);
        if (rc != NB_OK && rc != NB_EINTERRUPTED)
            nbi_context(rc, "%s, line %zu", in.name, number);
    }
    nbi_str_release(&line);
    cli_input_close(&in);
    fflush(stdout);
    return rc;
}

enum nb_status cli_print_text_line(const char *text, size_t len)
{
    struct nbi_str line = {0};
    nbi_str_puts(&line, "{\"text\": ");
    nbi_jquote(&line, text, len);
    nbi_str_puts(&line, "}\n");
    enum nb_status rc = nbi_str_status(&line);
    if (rc == NB_OK)
        fwrite(line.p, 1, line.len, stdout);
    nbi_str_release(&line);
    return rc;
}
