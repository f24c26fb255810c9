/* test_line_editor.c - the text that keys make, and what a small terminal shows of it. The terminal
 * is written after the description of a VT100 and knows nothing of the editor; the rows that it has
 * to show are laid out here by hand-made widths. */
#include <sys/stat.h>

#include "base/utf8.h"
#include "cli/line_editor.h"
#include "unit/support.h"

/* ---- a terminal ---- */

#define ROWS_MAX    60
#define COLUMNS_MAX 200

struct screen {
    int rows, columns, y, x;
    bool wraps; /* the last column is written; the next character goes to the next row */
    /* Characters of a cell: up to 3 code points; the right half of a wide one has none. */
    uint32_t cell[ROWS_MAX][COLUMNS_MAX][3];
    char pending[32]; /* a sequence or a character that is not complete */
    size_t count;
};

static void screen_init(struct screen *s, int rows, int columns)
{
    memset(s, 0, sizeof *s);
    s->rows = rows;
    s->columns = columns;
}

static void erase(struct screen *s, int y, int from, int to)
{
    for (int x = from; x < to; x++)
        memset(s->cell[y][x], 0, sizeof s->cell[y][x]);
}

static void line_feed(struct screen *s)
{
    if (++s->y < s->rows)
        return;
    s->y = s->rows - 1;
    memmove(s->cell[0], s->cell[1], (ROWS_MAX - 1) * sizeof s->cell[0]);
    erase(s, ROWS_MAX - 1, 0, COLUMNS_MAX);
}

/* Widths of the characters that this test uses. */
static int width_by_hand(uint32_t c)
{
    if (c >= 0x300 && c < 0x370)
        return 0;
    return (c >= 0x4E00 && c < 0xA000) || (c >= 0x1F600 && c < 0x1F640) ? 2 : 1;
}

static void put_code(struct screen *s, uint32_t c)
{
    int width = width_by_hand(c);
    if (width == 0) {
        int x = s->wraps ? s->x : s->x - 1;
        while (x > 0 && !s->cell[s->y][x][0])
            x--;
        assert_true(x >= 0);
        uint32_t *cell = s->cell[s->y][x];
        cell[cell[1] ? 2 : 1] = c;
        return;
    }
    assert_true(width <= s->columns);
    if (s->wraps || s->x + width > s->columns) {
        s->x = 0;
        line_feed(s);
    }
    erase(s, s->y, s->x, s->x + width);
    s->cell[s->y][s->x][0] = c;
    s->wraps = s->x + width == s->columns;
    s->x += s->wraps ? width - 1 : width;
}

static void sequence(struct screen *s, const char *text)
{
    int n = (int)strtol(text + 2, NULL, 10);
    int by = n > 0 ? n : 1;
    char last = text[strlen(text) - 1];
    s->wraps = s->wraps && last != 'A' && last != 'B' && last != 'C' && last != 'H';
    switch (last) {
    case 'A':
        s->y = s->y > by ? s->y - by : 0;
        break;
    case 'B':
        s->y = s->y + by < s->rows ? s->y + by : s->rows - 1;
        break;
    case 'C':
        s->x = s->x + by < s->columns ? s->x + by : s->columns - 1;
        break;
    case 'H':
        s->x = s->y = 0;
        break;
    case 'J':
        for (int y = n == 2 ? 0 : s->y; y < s->rows; y++)
            erase(s, y, n == 2 || y > s->y ? 0 : s->x, COLUMNS_MAX);
        break;
    default:
        fail_msg("the terminal does not know '%s'", text + 1);
    }
}

static void screen_write(struct screen *s, const char *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        assert_true(s->count + 1 < sizeof s->pending);
        s->pending[s->count++] = bytes[i];
        s->pending[s->count] = 0;
        const char *p = s->pending;
        bool done = true;
        if (p[0] == '\033') {
            done = s->count > 2 && p[s->count - 1] >= '@';
            if (done)
                sequence(s, p);
        } else if (p[0] == '\r') {
            s->x = 0;
            s->wraps = false;
        } else if (p[0] == '\n') {
            s->wraps = false;
            line_feed(s);
        } else if (p[0] != '\a') {
            done = nbi_utf8_length(p, p + s->count) > 0;
            if (done)
                put_code(s, nbi_utf8_decode(p));
        }
        s->count = done ? 0 : s->count;
    }
}

/* As xterm has it: columns are cut off, rows go at the top until the cursor is in the window. Other
 * terminals move the rows in other ways, which `elsewhere` stands for. */
static void screen_resize(struct screen *s, int rows, int columns, int elsewhere)
{
    while (s->y >= rows) {
        s->rows = s->y + 1;
        line_feed(s);
        s->y--;
    }
    for (int y = 0; y < ROWS_MAX; y++)
        erase(s, y, y < rows ? columns : 0, COLUMNS_MAX);
    s->rows = rows;
    s->columns = columns;
    s->wraps = false;
    s->x = s->x < columns ? s->x : columns - 1;
    if (elsewhere >= 0)
        s->y = elsewhere % rows;
}

/* ---- what is to be seen ---- */

#define REFERENCE_MAX 4000

struct reference {
    uint32_t row[REFERENCE_MAX][COLUMNS_MAX][3];
    int rows, y, x;
};

static void add_row(struct reference *r)
{
    assert_true(r->rows < REFERENCE_MAX);
    memset(r->row[r->rows++], 0, sizeof r->row[0]);
}

/* Rows of the prompt and the text, a character after the other, and the place of the cursor. */
static void lay_out_by_hand(struct reference *r, const char *text, size_t len, size_t cursor,
                            int columns)
{
    const char *end = text + len;
    int x = 0;
    r->rows = 0;
    r->y = -1;
    add_row(r);
    for (const char *p = text; p < end;) {
        uint32_t c = nbi_utf8_decode(p);
        bool here = p == text + cursor, line_end = c == '\n', tab = c == '\t';
        int width = line_end ? 0 : tab ? 1 : width_by_hand(c);
        if (width > columns) {
            c = '?';
            width = 1;
        }
        if (width > 0 && x + width > columns) {
            add_row(r);
            x = 0;
        }
        if (here) {
            r->y = r->rows - 1;
            r->x = x < columns ? x : columns - 1;
        }
        if (line_end) {
            add_row(r);
            x = 0;
        } else if (tab) {
            do
                r->row[r->rows - 1][x++][0] = ' ';
            while (x < columns && x % 8 != 0);
        } else if (width > 0) {
            r->row[r->rows - 1][x][0] = c;
            x += width;
        } else if (x > 0) {
            int back = x - 1;
            while (back > 0 && !r->row[r->rows - 1][back][0])
                back--;
            uint32_t *cell = r->row[r->rows - 1][back];
            cell[cell[1] ? 2 : 1] = c;
        }
        p += nbi_utf8_length(p, end);
    }
    if (r->y >= 0)
        return;
    if (x == columns)
        add_row(r);
    r->y = r->rows - 1;
    r->x = x == columns ? 0 : x;
}

/* A blank cell may have been written or not. */
static uint32_t seen(const uint32_t cell[3])
{
    return cell[0] == ' ' ? 0 : cell[0];
}

static void check_row(const struct screen *s, int y, const struct reference *r, int from)
{
    static const uint32_t none[3];
    for (int x = 0; x < s->columns; x++) {
        const uint32_t *wanted = from < r->rows ? r->row[from][x] : none;
        const uint32_t *got = s->cell[y][x];
        if (seen(got) != seen(wanted) || (seen(wanted) && (got[1] != wanted[1])))
            fail_msg("%d x %d: row %d (%d of %d of the text), column %d: U+%04X, U+%04X expected",
                     s->rows, s->columns, y, from, r->rows, x, got[0], wanted[0]);
    }
}

/* The screen shows the text: all of it, or a window full around the cursor. */
static void check_screen(const struct screen *s, const char *prompt, const struct cli_edit *e)
{
    static struct reference r;
    struct nbi_str all = {0};
    nbi_str_puts(&all, prompt);
    nbi_str_append(&all, e->text, e->len);
    lay_out_by_hand(&r, all.p, all.len, strlen(prompt) + e->cursor, s->columns);
    nbi_str_release(&all);
    int first = s->y - r.y; /* the row of the screen with the first row of the text */
    assert_int_equal(s->x, r.x);
    if (r.rows <= s->rows) {
        assert_true(first >= 0);
        assert_true(first + r.rows <= s->rows);
    } else {
        assert_true(first <= 0);
        assert_true(first + r.rows >= s->rows);
    }
    for (int y = first > 0 ? first : 0; y < s->rows; y++)
        check_row(s, y, &r, y - first);
}

/* ---- an editor with a terminal ---- */

struct fixture {
    struct cli_editor e;
    struct cli_history history;
    struct screen s;
};

static void flush_out(struct fixture *f)
{
    screen_write(&f->s, nbi_str_text(&f->e.out), f->e.out.len);
    f->e.out.len = 0;
}

static void refresh(struct fixture *f)
{
    assert_ok(cli_editor_refresh(&f->e));
    flush_out(f);
}

static struct fixture *begin(int rows, int columns)
{
    struct fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    screen_init(&f->s, rows, columns);
    cli_editor_resize(&f->e, (size_t)columns, (size_t)rows);
    cli_editor_begin(&f->e, ">>> ", &f->history);
    refresh(f);
    return f;
}

static void end(struct fixture *f)
{
    cli_editor_release(&f->e);
    cli_history_release(&f->history);
    free(f);
}

static enum cli_editor_event type_bytes(struct fixture *f, const char *bytes, size_t len)
{
    enum cli_editor_event event = CLI_EDITOR_GOES_ON;
    for (size_t i = 0; i < len && event == CLI_EDITOR_GOES_ON; i++)
        assert_ok(cli_editor_feed(&f->e, (unsigned char)bytes[i], &event));
    return event;
}

static enum cli_editor_event type(struct fixture *f, const char *text)
{
    return type_bytes(f, text, strlen(text));
}

/* text has a '|' where the cursor has to be. */
static void check_text(struct fixture *f, const char *keys, const char *text)
{
    const struct cli_edit *e = &f->e.edit;
    char got[512];
    snprintf(got, sizeof got, "%.*s|%.*s", (int)e->cursor, e->len ? e->text : "",
             (int)(e->len - e->cursor), e->len ? e->text + e->cursor : "");
    if (strcmp(got, text) != 0)
        fail_msg("%s: '%s', '%s' expected", keys, got, text);
}

static void resize(struct fixture *f, int rows, int columns, int elsewhere)
{
    screen_resize(&f->s, rows, columns, elsewhere);
    cli_editor_resize(&f->e, (size_t)columns, (size_t)rows);
}

/* ---- the text ---- */

static void test_keys__change_the_text(void **state)
{
    static const struct {
        const char *keys, *text;
    } cases[] = {
        {"abc", "abc|"},
        {"abc\033[D\033OD\002x", "x|abc"},
        {"abc\001\033[C\006x", "abx|c"},
        {"abc\001x\005y", "xabcy|"},
        {"abc\033[Hx\033[Fy\033OHz\033OFw", "zxabcyw|"},
        {"abc\033[1~x\033[4~y\033[7~z\033[8~w", "zxabcyw|"},
        {"abc\177\010", "a|"},
        {"\177\033[3~\033[D\033[C|", "||"},
        {"abc\001\033[3~\004", "|c"},
        {"one two\033[D\013", "one tw|"},
        {"one two\033[D\013\031\031", "one twoo|"},
        {"one two\033[D\025", "|o"},
        {"one two\033[D\025\005\031", "oone tw|"},
        {"one two-x\027", "one |"},
        {"one two \027\027\031", "one two |"},
        {"one two \027x\027\031\031", "one xx|"},
        {"one two-x\033\177", "one two-|"},
        {"one two-x\033\010\033\010\031", "one two-x|"},
        {"one two-x\033b\033b!", "one !|two-x"},
        {"one two\001\033fx\033[1;5Cy\033[1;3Dz", "onex z|twoy"},
        {"one two\033[1;5D\033[1;5Dx\033[1;3Cy", "xoney| two"},
        {"one two-x\001\033d\033d\005\031", "-xone two|"},
        {"one two\001\033[3;5~", "| two"},
        {"abc\024", "acb|"},
        {"abc\002\024\024", "abc|"},
        {"abc\001\006\024", "ba|c"},
        {"a\024\001\024", "|a"},
        {"caf\303\251 \344\270\226\002\177", "caf\303\251|\344\270\226"},
        {"e\314\201x\002\002y", "y|e\314\201x"},
        {"xe\314\201\177", "x|"},
        {"a\303\251\024", "\303\251a|"},
        {"\360\237\207\251\360\237\207\252\360\237\207\253\360\237\207\267\177",
         "\360\237\207\251\360\237\207\252|"},
        {"a\tb\033[200~c\r\nd\te\rf\n\r\033[201~", "a\tb"
                                                   "c\nd\te\nf|"},
        {"\033[200~a\033[200~\033[201b\001\377\303\033[201~c", "a[200~[201bc|"},
        {"a\377\300\257b\303c\342\202d\355\240\200e", "abcde|"},
        {"a\033[99~b\033[1;2Pc\033[?1;2cd\033[[Ae\033OPf\033xg\033[<1;2;3Mh", "abcdefgh|"},
        {"a\033[1\033[Db", "b|a"},
        {"a\033\033[Db", "b|a"},
        {"\033[99999999999999999999;5Da", "a|"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture *f = begin(24, 80);
        assert_int_equal(type(f, cases[i].keys), CLI_EDITOR_GOES_ON);
        check_text(f, cases[i].keys, cases[i].text);
        refresh(f);
        end(f);
    }
}

static void test_keys__that_end_the_line(void **state)
{
    struct fixture *f = begin(24, 80);
    (void)state;
    assert_int_equal(type(f, "a\004\r"), CLI_EDITOR_ACCEPTED);
    cli_editor_begin(&f->e, ">>> ", &f->history);
    assert_int_equal(type(f, "a\177\004"), CLI_EDITOR_ENDED);
    assert_int_equal(type(f, "\n"), CLI_EDITOR_ACCEPTED);
    assert_int_equal(type(f, "\032"), CLI_EDITOR_SUSPEND);
    assert_int_equal(type(f, "\034"), CLI_EDITOR_QUIT);
    end(f);
}

static void test_history__keeps_the_line(void **state)
{
    struct fixture *f = begin(24, 80);
    (void)state;
    assert_ok(cli_history_add(&f->history, "first"));
    assert_ok(cli_history_add(&f->history, "two\nrows"));
    cli_editor_begin(&f->e, ">>> ", &f->history);
    type(f, "typed\033[A");
    check_text(f, "up", "two\nrows|");
    type(f, "\020\033[A");
    check_text(f, "up, up, up", "first|");
    type(f, "!\033OB");
    check_text(f, "down", "two\nrows|");
    type(f, "\016\016");
    check_text(f, "down, down, down", "typed|");
    end(f);
}

static void test_search(void **state)
{
    struct fixture *f = begin(24, 80);
    (void)state;
    assert_ok(cli_history_add(&f->history, "make test"));
    assert_ok(cli_history_add(&f->history, "make lint"));
    assert_ok(cli_history_add(&f->history, "other"));
    cli_editor_begin(&f->e, ">>> ", &f->history);
    type(f, "typed\002\022mak");
    check_text(f, "search", "make lint|");
    refresh(f);
    check_screen(&f->s, "(search 'mak') ", &f->e.edit);
    type(f, "\022");
    check_text(f, "search again", "make test|");
    type(f, "\022x");
    refresh(f);
    check_screen(&f->s, "(nothing has 'makx') ", &f->e.edit);
    type(f, "\177");
    check_text(f, "backspace", "make lint|");
    type(f, "\007");
    check_text(f, "cancelled", "type|d");
    type(f, "\022test\033[D!");
    check_text(f, "moved", "make tes!|t");
    type(f, "\022other\033");
    assert_ok(cli_editor_pause(&f->e));
    check_text(f, "Esc", "make tes!|t");
    type(f, "\033");
    assert_ok(cli_editor_pause(&f->e));
    type(f, "b");
    check_text(f, "Esc, later b", "make |tes!t");
    type(f, "\022make");
    assert_int_equal(type(f, "\r"), CLI_EDITOR_ACCEPTED);
    check_text(f, "accepted", "make test|");
    end(f);
}

static void test_paste__that_is_too_long(void **state)
{
    struct fixture *f = begin(5, 20);
    char *text = malloc(CLI_EDIT_MAX + 1);
    (void)state;
    assert_non_null(text);
    memset(text, 'x', CLI_EDIT_MAX + 1);
    type(f, "a\033[200~");
    type_bytes(f, text, CLI_EDIT_MAX + 1);
    type(f, "\033[201~b");
    check_text(f, "too long", "ab|");
    type(f, "\033[200~");
    type_bytes(f, text, CLI_EDIT_MAX - 1);
    type(f, "\033[201~");
    check_text(f, "too long together", "ab|");
    type(f, "\033[200~");
    type_bytes(f, text, CLI_EDIT_MAX - 2);
    type(f, "\033[201~");
    assert_int_equal(f->e.edit.len, CLI_EDIT_MAX);
    type(f, "c");
    assert_int_equal(f->e.edit.len, CLI_EDIT_MAX);
    refresh(f);
    free(text);
    end(f);
}

/* ---- the screen ---- */

static const char *row_text(const struct screen *s, int y)
{
    static char text[COLUMNS_MAX + 1];
    int len = 0;
    for (int x = 0; x < s->columns; x++) {
        text[x] = s->cell[y][x][0] ? (char)s->cell[y][x][0] : ' ';
        len = text[x] != ' ' ? x + 1 : len;
    }
    text[len] = 0;
    return text;
}

static void test_screen__of_a_wrapped_line(void **state)
{
    struct fixture *f = begin(4, 10);
    (void)state;
    screen_write(&f->s, "\rbefore\r\n", 9);
    cli_editor_draw_anew(&f->e);
    type(f, "abcdef");
    refresh(f);
    assert_string_equal(row_text(&f->s, 0), "before");
    assert_string_equal(row_text(&f->s, 1), ">>> abcdef");
    assert_int_equal(f->s.y, 2);
    assert_int_equal(f->s.x, 0);
    type(f, "gh\001");
    refresh(f);
    assert_string_equal(row_text(&f->s, 2), "gh");
    assert_int_equal(f->s.y, 1);
    assert_int_equal(f->s.x, 4);
    /* Leaving puts the cursor into the last row. */
    assert_ok(cli_editor_leave(&f->e, false));
    flush_out(f);
    screen_write(&f->s, "\r\nafter", 7);
    assert_string_equal(row_text(&f->s, 0), "before");
    assert_string_equal(row_text(&f->s, 2), "gh");
    assert_string_equal(row_text(&f->s, 3), "after");
    end(f);
}

/* A line that fills its last row is followed by no empty one. */
static void test_screen__of_a_full_row(void **state)
{
    struct fixture *f = begin(4, 10);
    (void)state;
    type(f, "abcdef");
    refresh(f);
    assert_ok(cli_editor_leave(&f->e, true));
    flush_out(f);
    screen_write(&f->s, "\r\nafter", 7);
    assert_string_equal(row_text(&f->s, 0), ">>> abcdef");
    assert_string_equal(row_text(&f->s, 1), "after");
    end(f);
}

/* A text that is longer than the window is there as a whole when it is accepted. */
static void test_screen__of_a_long_text(void **state)
{
    struct fixture *f = begin(3, 10);
    (void)state;
    type(f, "0123451234567890abcdefghijABCDEFGHIJklmno\001");
    refresh(f);
    assert_string_equal(row_text(&f->s, 0), ">>> 012345");
    assert_string_equal(row_text(&f->s, 2), "abcdefghij");
    f->s.rows = 6; /* more rows of the same screen, so that what scrolls can be seen */
    assert_ok(cli_editor_leave(&f->e, true));
    flush_out(f);
    screen_write(&f->s, "\r\nafter", 7);
    assert_string_equal(row_text(&f->s, 0), ">>> 012345");
    assert_string_equal(row_text(&f->s, 1), "1234567890");
    assert_string_equal(row_text(&f->s, 4), "klmno");
    assert_string_equal(row_text(&f->s, 5), "after");
    end(f);
}

static void test_screen__cleared(void **state)
{
    struct fixture *f = begin(4, 10);
    (void)state;
    screen_write(&f->s, "\rbefore\r\n", 9);
    cli_editor_draw_anew(&f->e);
    type(f, "abc\014");
    refresh(f);
    assert_string_equal(row_text(&f->s, 0), ">>> abc");
    assert_string_equal(row_text(&f->s, 1), "");
    end(f);
}

static void test_screen__of_a_window_that_shrinks(void **state)
{
    static const int sizes[][4] = {{24, 80, 2, 80}, {50, 80, 5, 80}, {24, 80, 1, 1},
                                   {24, 80, 24, 3}, {1, 1, 50, 200}, {5, 7, 5, 6}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct fixture *f = begin(sizes[i][0], sizes[i][1]);
        for (int n = 0; n < 900; n++)
            type(f, n % 7 ? "x" : "\344\270\226");
        refresh(f);
        check_screen(&f->s, ">>> ", &f->e.edit);
        resize(f, sizes[i][2], sizes[i][3], -1);
        refresh(f);
        check_screen(&f->s, ">>> ", &f->e.edit);
        type(f, "\001y");
        refresh(f);
        check_screen(&f->s, ">>> ", &f->e.edit);
        end(f);
    }
}

static void test_screen__of_an_unknown_size(void **state)
{
    struct cli_display d = {0};
    (void)state;
    cli_display_resize(&d, 0, 0);
    assert_int_equal(d.columns, 80);
    assert_int_equal(d.rows, 24);
}

/* What no terminal draws takes a column, as the character that stands for it. */
static void test_screen__of_characters_that_are_none(void **state)
{
    struct fixture *f = begin(4, 20);
    (void)state;
    type(f, "a\315\270b\342\200\250c"); /* U+0378, which is none, and a line separator */
    refresh(f);
    assert_int_equal(f->s.x, 9);
    assert_int_equal(f->s.cell[0][5][0], 0xFFFD);
    assert_int_equal(f->s.cell[0][6][0], 'b');
    assert_int_equal(f->s.cell[0][7][0], 0xFFFD);
    end(f);
}

static uint32_t draw_number(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

static void test_screen__after_anything(void **state)
{
    static const char *const keys[] = {
        "a",
        "b ",
        "word ",
        "\344\270\226",
        "\360\237\230\200",
        "e\314\201",
        "\314\202",
        "\t",
        "\177",
        "\033[D",
        "\033[C",
        "\001",
        "\005",
        "\013",
        "\025",
        "\027",
        "\031",
        "\033b",
        "\033f",
        "\033d",
        "\033[A",
        "\033[B",
        "\024",
        "\033[3~",
        "\033[200~one\rtwo\tthree\r\rfour\344\270\226\344\270\226\033[201~",
        "\033[200~0123456789012345678901234567890123456789012345678901234567890123\033[201~",
        "\377",
        "\033[1;",
        "\014",
        "\004x"};
    (void)state;
    for (uint64_t run = 0; run < 300; run++) {
        uint64_t seed = run;
        struct fixture *f =
            begin(1 + (int)(draw_number(&seed) % 12), 1 + (int)(draw_number(&seed) % 40));
        assert_ok(cli_history_add(&f->history, "an entry of the history that takes some rows"));
        assert_ok(cli_history_add(&f->history, "one\ntwo"));
        cli_editor_begin(&f->e, ">>> ", &f->history);
        for (int i = 0; i < 200; i++) {
            const char *key = keys[draw_number(&seed) % (sizeof keys / sizeof *keys)];
            type(f, key);
            uint32_t chance = draw_number(&seed);
            if (chance % 13 == 0)
                resize(f, 1 + (int)(draw_number(&seed) % 50), 1 + (int)(draw_number(&seed) % 120),
                       chance % 2 ? (int)(draw_number(&seed) % 50) : -1);
            if (chance % 3 > 0)
                continue;
            refresh(f);
            check_screen(&f->s, ">>> ", &f->e.edit);
            assert_true(nbi_utf8_valid(nbi_str_text(&f->e.typed), f->e.typed.len));
        }
        end(f);
    }
}

/* ---- the history's file ---- */

/* Both kinds of files; this one is libedit 3.1's own, byte for byte. */
static void test_history__of_libedit(void **state)
{
    static const char file[] = "_HiStOrY_V2_\n"
                               "hello\\040world\n"
                               "a\\134b\\040\\134n\\040\"q\"\n"
                               "one\\012two\\011x\n"
                               "caf\\M-C\\M-)\\040\\M-d\\M-8\\M^V\\040\\M-p\\M^_\\M^X\\M^@\n"
                               "e\\M-L\\M^A#%~{}\n"
                               "\\^A\\^?\\M-B\\M^E\\M-B\\240.\n"
                               "\\\\ \\x \\";
    static const char *const entries[] = {
        "hello world",    "a\\b \\n \"q\"",
        "one\ntwo\tx",    "caf\303\251 \344\270\226 \360\237\230\200",
        "e\314\201#%~{}", "\001\177\302\205\302\240.",
        "\\ \\x \\"};
    struct cli_history h = {0}, again = {0};
    struct nbi_str out = {0};
    (void)state;
    assert_ok(cli_history_parse(&h, file, sizeof file - 1));
    assert_int_equal(h.count, 7);
    for (size_t i = 0; i < 7; i++)
        assert_string_equal(h.entries[i], entries[i]);
    cli_history_print(&h, &out);
    assert_ok(cli_history_parse(&again, out.p, out.len));
    assert_int_equal(again.count, 7);
    for (size_t i = 0; i < 7; i++)
        assert_string_equal(again.entries[i], entries[i]);
    nbi_str_release(&out);
    cli_history_release(&h);
    cli_history_release(&again);
}

static void test_history__file(void **state)
{
    struct cli_history h = {0}, other = {0};
    char path[512], *text;
    size_t len;
    struct stat st;
    (void)state;
    snprintf(path, sizeof path, "%s/history", test_dir);
    cli_history_load(&h, path);
    cli_history_remember(&h, path, "a\\b\nc");
    cli_history_remember(&other, path, "of another chat");
    cli_history_remember(&h, path, "a\\b\nc");
    cli_history_remember(&h, path, "");
    assert_int_equal(h.count, 1);
    assert_ok(nbi_file_read(path, 1 << 20, &text, &len));
    assert_string_equal(text, "of another chat\na\\\\b\\nc\n");
    free(text);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    char line[32];
    for (int i = 0; i < 1200; i++) {
        snprintf(line, sizeof line, "%d", i);
        assert_ok(cli_history_add(&h, line));
    }
    assert_int_equal(h.count, CLI_HISTORY_ENTRIES);
    assert_string_equal(h.entries[0], "200");
    cli_history_remember(&h, NULL, "nowhere");
    cli_history_remember(&h, "/proc/none/history", "nowhere");
    cli_history_remember(&h, test_dir, "in a directory");
    assert_string_equal(h.entries[h.count - 1], "in a directory");
    cli_history_release(&h);
    cli_history_release(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keys__change_the_text),
        cmocka_unit_test(test_keys__that_end_the_line),
        cmocka_unit_test(test_history__keeps_the_line),
        cmocka_unit_test(test_search),
        cmocka_unit_test(test_paste__that_is_too_long),
        cmocka_unit_test(test_screen__of_a_wrapped_line),
        cmocka_unit_test(test_screen__of_a_full_row),
        cmocka_unit_test(test_screen__of_a_long_text),
        cmocka_unit_test(test_screen__cleared),
        cmocka_unit_test(test_screen__of_a_window_that_shrinks),
        cmocka_unit_test(test_screen__of_an_unknown_size),
        cmocka_unit_test(test_screen__of_characters_that_are_none),
        cmocka_unit_test(test_screen__after_anything),
        cmocka_unit_test(test_history__of_libedit),
        cmocka_unit_test(test_history__file),
    };
    return cmocka_run_group_tests(tests, make_test_dir, remove_test_dir);
}
