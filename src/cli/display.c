/* display.c - draws a prompt and the text being edited on a terminal. */
#include "cli/display.h"

#include <string.h>

#include "base/utf8.h"
#include "cli/char_width.h"

#define TAB 8

#define CLEAR_BELOW  "\033[J"
#define CLEAR_SCREEN "\033[H\033[2J"

/* ---- positions of characters ---- */

/* A position. column equals the width of the window in a full row (pending wrap). */
struct place {
    size_t row, column;
};

/* A character and its position. */
struct cell {
    struct place at;
    size_t width;
    const char *bytes; /* what is written there */
    size_t len;
};

/* Places the character at p at *place, which advances; returns the bytes it takes. */
static size_t place_char(const char *p, const char *end, size_t columns, struct place *place,
                         struct cell *c)
{
    int length = nbi_utf8_length(p, end);
    size_t n = length > 0 ? (size_t)length : 1;
    bool full = place->column == columns;
    *c = (struct cell){.at = *place, .bytes = ""};
    if (*p == '\n') {
        *place = (struct place){place->row + 1, 0};
        return n;
    }
    if (*p == '\t') {
        size_t from = full ? 0 : place->column, to = (from / TAB + 1) * TAB;
        c->bytes = "        ";
        c->len = c->width = (to < columns ? to : columns) - from;
    } else if (length > 0) {
        c->width = cli_char_width(p, n, &c->bytes, &c->len);
    }
    if (c->width > columns) {
        c->bytes = "?";
        c->len = c->width = 1;
    }
    if (c->width > 0 && place->column + c->width > columns)
        c->at = (struct place){place->row + 1, 0};
    if (c->width == 0 && place->column == 0) /* nothing that it belongs to */
        c->len = 0;
    place->row = c->at.row;
    place->column = c->at.column + c->width;
    return n;
}

/* ---- the layout ---- */

struct layout {
    struct place cursor;
    size_t rows;      /* with the one of the cursor */
    size_t text_rows; /* without it, if nothing else is there */
};

/* Walks over prompt and text. */
struct walk {
    const struct cli_shown *s;
    size_t columns;
    const char *p, *end;
    bool in_text;
    struct place place;
};

static void walk_begin(struct walk *w, const struct cli_shown *s, size_t columns)
{
    *w = (struct walk){.s = s, .columns = columns, .p = s->prompt};
    w->end = s->prompt + strlen(s->prompt);
}

/* false: at the end of the text. *at: what of the text is before c; SIZE_MAX in the prompt. */
static bool walk_next(struct walk *w, struct cell *c, size_t *at)
{
    if (w->p == w->end && !w->in_text && w->s->len > 0) {
        w->in_text = true;
        w->p = w->s->text;
        w->end = w->p + w->s->len;
    }
    if (w->p == w->end)
        return false;
    *at = w->in_text ? (size_t)(w->p - w->s->text) : SIZE_MAX;
    w->p += place_char(w->p, w->end, w->columns, &w->place, c);
    return true;
}

static struct layout lay_out(const struct cli_display *d, const struct cli_shown *s)
{
    struct layout l = {0};
    struct walk w;
    struct cell c;
    size_t at;
    walk_begin(&w, s, d->columns);
    while (walk_next(&w, &c, &at))
        if (at == s->cursor) {
            l.cursor = c.at;
            if (l.cursor.column == d->columns) /* on a line end after a full row */
                l.cursor.column--;
        }
    l.rows = l.text_rows = w.place.row + 1;
    if (s->cursor >= s->len) {
        bool full = w.place.column == d->columns;
        l.cursor = full ? (struct place){w.place.row + 1, 0} : w.place;
        l.rows += full;
    }
    return l;
}

/* ---- drawing ---- */

/* Chooses the rows to show: the same as before if the cursor is among them. */
static void scroll(struct cli_display *d, const struct layout *l)
{
    size_t row = l->cursor.row, last = l->rows > d->rows ? l->rows - d->rows : 0;
    if (d->top + d->rows <= row)
        d->top = row - d->rows + 1;
    if (d->top > row)
        d->top = row;
    if (d->top > last)
        d->top = last;
}

static void move(struct nbi_str *out, size_t by, char how)
{
    if (by > 0)
        nbi_str_printf(out, "\033[%zu%c", by, how);
}

/* Moves to the first row drawn, which may be outside a window that has shrunk. */
static void rewind_rows(const struct cli_display *d, struct nbi_str *out)
{
    nbi_str_puts(out, "\r");
    move(out, d->cursor_row < d->rows ? d->cursor_row : d->rows - 1, 'A');
}

/* Rows from up to before `to`. */
static void put_rows(const struct cli_display *d, const struct cli_shown *s, size_t from, size_t to,
                     struct nbi_str *out)
{
    struct walk w;
    struct cell c;
    size_t at, row = from;
    walk_begin(&w, s, d->columns);
    while (walk_next(&w, &c, &at) && c.at.row < to) {
        for (; row < c.at.row; row++)
            nbi_str_puts(out, "\r\n");
        if (c.at.row >= from)
            nbi_str_append(out, c.bytes, c.len);
    }
    for (; row + 1 < to; row++)
        nbi_str_puts(out, "\r\n");
}

static void draw(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out)
{
    struct layout l = lay_out(d, s);
    scroll(d, &l);
    size_t end = l.rows - d->top < d->rows ? l.rows : d->top + d->rows;
    put_rows(d, s, d->top, end, out);
    move(out, end - 1 - l.cursor.row, 'A');
    nbi_str_puts(out, "\r");
    move(out, l.cursor.column, 'C');
    d->cursor_row = l.cursor.row - d->top;
}

void cli_display_resize(struct cli_display *d, size_t columns, size_t rows)
{
    d->columns = columns > 0 ? columns : 80;
    d->rows = rows > 0 ? rows : 24;
}

void cli_display_begin(struct cli_display *d)
{
    d->top = d->cursor_row = 0;
}

void cli_display_erase(struct cli_display *d, struct nbi_str *out)
{
    rewind_rows(d, out);
    nbi_str_puts(out, CLEAR_BELOW);
    cli_display_begin(d);
}

void cli_display_draw(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out)
{
    rewind_rows(d, out);
    nbi_str_puts(out, CLEAR_BELOW);
    draw(d, s, out);
}

void cli_display_clear(struct cli_display *d, const struct cli_shown *s, struct nbi_str *out)
{
    nbi_str_puts(out, CLEAR_SCREEN);
    draw(d, s, out);
}

void cli_display_leave(struct cli_display *d, const struct cli_shown *s, bool whole,
                       struct nbi_str *out)
{
    struct layout l = lay_out(d, s);
    size_t end = l.rows - d->top < d->rows ? l.rows : d->top + d->rows;
    if (whole && l.rows > d->rows) {
        rewind_rows(d, out);
        nbi_str_puts(out, CLEAR_BELOW);
        put_rows(d, s, 0, l.text_rows, out);
    } else {
        size_t last = l.text_rows < end ? l.text_rows : end;
        size_t row = d->top + d->cursor_row;
        move(out, row > last - 1 ? row - (last - 1) : 0, 'A');
        move(out, row < last - 1 ? last - 1 - row : 0, 'B');
    }
    cli_display_begin(d);
}
