/* input.c - whole texts and lines from a file or standard input. */
#include "cli/input.h"

#include <errno.h>
#include <string.h>

struct input {
    FILE *stream;
    const char *name;
};

static enum nb_status input_open(struct input *in, const char *file)
{
    *in = (struct input){.stream = file ? fopen(file, "rb") : stdin,
                         .name = file ? file : "standard input"};
    if (in->stream)
        return NB_OK;
    return nbi_fail(errno == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot open '%s': %s", file,
                    strerror(errno));
}

/* After reading has ended: was it the end? */
static enum nb_status input_close(struct input *in)
{
    int cause = errno;
    enum nb_status rc = nbi_check_interrupt();
    if (rc == NB_OK && ferror(in->stream))
        rc = nbi_fail(NB_EIO, "cannot read '%s': %s", in->name, strerror(cause));
    if (in->stream != stdin)
        fclose(in->stream);
    return rc;
}

enum nb_status cli_read_all(const char *file, struct nbi_str *text)
{
    struct input in;
    char chunk[1 << 16];
    size_t n;
    NBI_TRY(input_open(&in, file));
    while ((n = fread(chunk, 1, sizeof chunk, in.stream)) > 0)
        nbi_str_append(text, chunk, n);
    enum nb_status rc = input_close(&in);
    return rc == NB_OK ? nbi_context(nbi_str_status(text), "reading '%s'", in.name) : rc;
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
    struct input in;
    char *line = NULL;
    size_t cap = 0, number = 0;
    ssize_t len;
    NBI_TRY(input_open(&in, file));
    enum nb_status rc = NB_OK;
    while (rc == NB_OK && !ferror(stdout) && (len = getline(&line, &cap, in.stream)) >= 0) {
        number++;
        if (len > 0 && line[len - 1] == '\n')
            len--;
        rc = nbi_check_interrupt();
        if (rc == NB_OK && !is_blank(line, (size_t)len))
            rc = nbi_context(fn(ctx, line, (size_t)len), "%s, line %zu", in.name, number);
    }
    free(line);
    fflush(stdout);
    enum nb_status end = rc == NB_OK ? input_close(&in) : rc;
    if (rc != NB_OK && in.stream != stdin)
        fclose(in.stream);
    return end;
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
