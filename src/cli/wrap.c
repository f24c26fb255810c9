/* wrap.c - text on a terminal as it comes, wrapped between words. */
#include "cli/wrap.h"

#include <stdint.h>
#include <string.h>

#include "base/utf8.h"
#include "cli/char_width.h"

#define TAB 8

static void end_row(struct cli_wrap *w)
{
    putc('\n', w->out);
    w->column = w->blanks = 0;
}

/* Prints the word, or as much of it as there is. */
static void put_word(struct cli_wrap *w)
{
    size_t free = w->columns - w->column;
    if (w->len == 0)
        return;
    if (!w->splits && (w->blanks > free || w->width > free - w->blanks) && w->column > 0)
        end_row(w);
    for (; w->blanks > 0; w->blanks--, w->column++)
        putc(' ', w->out);
    fwrite(w->word, 1, w->len, w->out);
    w->column += w->width;
    while (w->column > w->columns) /* wrapped by the terminal */
        w->column -= w->columns;
    w->len = w->width = 0;
    w->whole = false;
}

static void end_word(struct cli_wrap *w)
{
    put_word(w);
    w->splits = false;
}

static void add(struct cli_wrap *w, const char *bytes, size_t len, size_t width)
{
    if (width > 0 && (w->whole || width > 1))
        end_word(w);
    if (w->len + len > CLI_WRAP_WORD) /* combining characters without end */
        put_word(w);
    memcpy(w->word + w->len, bytes, len);
    w->len += len;
    w->width += width;
    w->whole = w->whole || width > 1;
    if (w->splits || w->width > w->columns) {
        put_word(w);
        w->splits = true;
    }
}

static void add_blank(struct cli_wrap *w, char blank)
{
    end_word(w);
    if (blank == ' ') {
        w->blanks++;
    } else if (blank == '\n') {
        end_row(w);
    } else {
        size_t at = w->column + w->blanks, to = (at / TAB + 1) * TAB;
        w->blanks += to - at;
    }
}

void cli_wrap_begin(struct cli_wrap *w, FILE *out)
{
    w->out = out;
    w->columns = SIZE_MAX;
    w->column = w->blanks = w->len = w->width = 0;
    w->whole = w->splits = false;
}

void cli_wrap_resize(struct cli_wrap *w, size_t columns)
{
    w->columns = columns > 0 ? columns : SIZE_MAX;
    if (w->column > w->columns) /* some terminals wrap what is there anew, others cut it off */
        w->column %= w->columns;
}

void cli_wrap_text(struct cli_wrap *w, const char *text, size_t len)
{
    const char *end = text + len, *bytes;
    size_t shown;
    for (int n; text < end; text += n) {
        n = nbi_utf8_length(text, end);
        if (*text == ' ' || *text == '\n' || *text == '\t') {
            add_blank(w, *text);
        } else if (n == 0 || !nbi_utf8_printable(text, (size_t)n)) {
            add(w, "?", 1, 1);
            n = n > 0 ? n : 1;
        } else {
            size_t width = cli_char_width(text, (size_t)n, &bytes, &shown);
            add(w, bytes, shown, width);
        }
    }
}

void cli_wrap_sequence(struct cli_wrap *w, const char *sequence)
{
    add(w, sequence, strlen(sequence), 0);
}

void cli_wrap_end(struct cli_wrap *w)
{
    end_word(w);
    w->blanks = 0;
}
