/* two_columns.c - two answers to a question, in two columns. */
#include "cli/two_columns.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/char_width.h"
#include "cli/terminal.h"

#define INDENT     2
#define GAP        3   /* between the columns */
#define MOST_BYTES 480 /* of a text */
#define WIDEST     130

int cli_terminal_width(void)
{
    size_t columns, rows;
    cli_terminal_size(STDOUT_FILENO, &columns, &rows);
    return columns < 40 ? 100 : columns < WIDEST ? (int)columns : WIDEST;
}

static int column_of(int width)
{
    return (width - INDENT - GAP) / 2;
}

/* A character's length in bytes, and the columns it takes. */
static int char_at(const char *p, const char *end, int *columns)
{
    int n = nbi_utf8_length(p, end);
    const char *bytes;
    size_t len;
    *columns = n > 0 ? (int)cli_char_width(p, (size_t)n, &bytes, &len) : 1;
    return n > 0 ? n : 1;
}

/* The length of the next line of *text, at most `limit` columns wide; advances *text past it. */
static int next_line(const char **text, int limit, int *columns)
{
    const char *begin = *text, *end = begin + strlen(begin), *p = begin, *cut = NULL;
    int used = 0, used_at_cut = 0, width = 0;
    while (p < end) {
        int n = char_at(p, end, &width);
        if (used + width > limit)
            break;
        if (*p == ' ') {
            cut = p;
            used_at_cut = used;
        }
        p += n;
        used += width;
        if (width == 2) {
            cut = p;
            used_at_cut = used;
        }
    }
    if (p < end && *p != ' ' && cut && cut > begin) {
        p = cut;
        used = used_at_cut;
    }
    *columns = used;
    *text = p + strspn(p, " ");
    return (int)(p - begin);
}

/* Copies text as a single printable line. */
static void flatten(char out[MOST_BYTES], const char *text, size_t len)
{
    char line[MOST_BYTES + 1]; /* one byte more, so that the copy shows that it was cut */
    size_t n = len < sizeof line ? len : sizeof line;
    for (size_t i = 0; i < n; i++)
        line[i] = text[i] == '\n' || text[i] == '\r' || text[i] == '\t' ? ' ' : text[i];
    nbi_printable_copy(out, MOST_BYTES, line, n);
}

static void print_columns(const char *left, const char *right, int width)
{
    int limit = column_of(width);
    do {
        const char *line[2] = {left, right};
        int used[2], len[2];
        len[0] = next_line(&left, limit, &used[0]);
        len[1] = next_line(&right, limit, &used[1]);
        printf("%*s%.*s%*s%.*s\n", INDENT, "", len[0], line[0],
               len[1] > 0 ? limit - used[0] + GAP : 0, "", len[1], line[1]);
    } while (*left || *right);
}

void cli_print_beside(const struct nb_ab_row *row, int width)
{
    char shown[2][MOST_BYTES], question[MOST_BYTES];
    for (int i = 0; i < 2; i++)
        flatten(shown[i], row->answer[i].text, row->answer[i].len);
    flatten(question, row->prompt.text, strlen(row->prompt.text));
    printf("\n%s\n", question);
    print_columns(shown[0], row->identical ? "(the same)" : shown[1], width);
}

/* Shortens a name to a column: whole characters of its end. */
static void shorten(char out[MOST_BYTES], const char *name, int limit)
{
    size_t len = strlen(name), keep = (size_t)limit;
    const char *from = len > keep ? name + len - keep + 3 : name;
    while (len > keep && ((unsigned char)*from & 0xC0) == 0x80)
        from++;
    char end[MOST_BYTES];
    flatten(end, from, strlen(from));
    snprintf(out, MOST_BYTES, "%s%.*s", len > keep ? "..." : "", MOST_BYTES - 4, end);
}

void cli_print_beside_names(const char *left, const char *right, int width)
{
    char shown[2][MOST_BYTES];
    shorten(shown[0], left, column_of(width));
    shorten(shown[1], right, column_of(width));
    print_columns(shown[0], shown[1], width);
}
