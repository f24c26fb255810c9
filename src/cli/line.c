/* line.c - lines through libedit on a terminal, and plain ones elsewhere. */
#include "cli/line.h"

#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "base/file.h"
#include "cli/input.h"

#define HISTORY_MAX 1000
#define PASTE_MAX   ((size_t)1 << 20) /* characters */
#define BLOCK       "\"\"\""

struct cli_lines {
    struct cli_input in; /* no terminal */
    EditLine *el;        /* NULL: no terminal */
    History *history;
    char *history_path; /* NULL: not kept */
    const char *prompt;
    struct winsize size;
    bool pastes; /* the terminal tells pasted text from typed */
    struct nbi_str line;
};

/* ---- history ---- */

/* $XDG_STATE_HOME/nibble/history, its directories made; NULL where there is no such place. */
static char *find_history(void)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    struct nbi_str path = {0};
    if (state && *state == '/')
        nbi_str_puts(&path, state);
    else if (home && *home == '/')
        nbi_str_printf(&path, "%s/.local/state", home);
    else
        return NULL;
    nbi_str_puts(&path, "/nibble/history");
    if (nbi_str_status(&path) != NB_OK) {
        nbi_str_release(&path);
        return NULL;
    }
    for (char *p = path.p + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = 0;
        mkdir(path.p, 0700); /* fails where it is there */
    }
    return path.p;
}

/* Nothing about the history is worth an error. */
static void load_history(struct cli_lines *l)
{
    HistEvent event;
    l->history_path = find_history();
    if (!l->history)
        return;
    history(l->history, &event, H_SETSIZE, HISTORY_MAX);
    history(l->history, &event, H_SETUNIQUE, 1);
    if (l->history_path && nbi_path_is_file(l->history_path))
        history(l->history, &event, H_LOAD, l->history_path);
    el_set(l->el, EL_HIST, history, l->history);
}

static void remember(struct cli_lines *l, const char *message)
{
    HistEvent event;
    if (!l->history || history(l->history, &event, H_ENTER, message) < 0 || !l->history_path)
        return;
    int fd = open(l->history_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
    if (nbi_path_is_file(l->history_path))
        history(l->history, &event, H_SAVE, l->history_path);
}

/* ---- the terminal ---- */

static char *give_prompt(EditLine *el)
{
    struct cli_lines *l = NULL;
    el_get(el, EL_CLIENTDATA, &l);
    return (char *)l->prompt;
}

/* Waits for a key. A signal may come just before the waiting begins, and so may a new size of the
 * window: both are looked at now and then. */
static enum nb_status await_key(EditLine *el)
{
    struct cli_lines *l = NULL;
    struct pollfd key = {.fd = STDIN_FILENO, .events = POLLIN};
    struct winsize size = {0};
    el_get(el, EL_CLIENTDATA, &l);
    for (;;) {
        NBI_TRY(nbi_check_interrupt());
        if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
            (size.ws_col != l->size.ws_col || size.ws_row != l->size.ws_row)) {
            l->size = size;
            el_resize(el);
        }
        int n = poll(&key, 1, 100);
        if (n > 0)
            return NB_OK;
        if (n < 0 && errno != EINTR)
            return nbi_fail(NB_EIO, "cannot read the terminal: %s", strerror(errno));
    }
}

/* One character for libedit: 1, 0 at the end, or -1. What is no UTF-8 is passed over. */
static int read_key(EditLine *el, wchar_t *out)
{
    mbstate_t state = {0};
    for (;;) {
        char byte;
        if (await_key(el) != NB_OK)
            return -1;
        ssize_t n = read(STDIN_FILENO, &byte, 1);
        if (n == 0)
            return 0;
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return -1;
        size_t used = n < 0 ? (size_t)-2 : mbrtowc(out, &byte, 1, &state);
        if (used <= 1)
            return 1;
        if (used == (size_t)-1)
            state = (mbstate_t){0};
    }
}

/* Reads pasted text up to its end mark. Line ends are '\n'; control characters are left out.
 * false: too much of it. */
static bool read_paste(EditLine *el, wchar_t *text)
{
    static const wchar_t end[] = L"\033[201~";
    size_t count = 0, matched = 0;
    wchar_t c;
    while (end[matched] && el_wgetc(el, &c) == 1) {
        matched = c == end[matched] ? matched + 1 : c == end[0];
        c = c == L'\r' ? L'\n' : c;
        if ((c >= 32 && c != 127) || c == L'\n' || c == L'\t')
            text[count++ % PASTE_MAX] = c;
    }
    if (count > PASTE_MAX)
        return false;
    /* Of the mark, all but the escape has been taken for text. */
    count -= end[matched] ? 0 : matched - 1;
    while (count > 0 && text[count - 1] == L'\n')
        count--;
    text[count] = 0;
    return true;
}

static unsigned char paste(EditLine *el, int key)
{
    (void)key;
    wchar_t *text = calloc(PASTE_MAX + 1, sizeof *text);
    bool ok = text && read_paste(el, text) && (!*text || el_winsertstr(el, text) == 0);
    free(text);
    return ok ? CC_REFRESH : CC_ERROR;
}

static enum nb_status open_terminal(struct cli_lines *l)
{
    const char *term = getenv("TERM");
    setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1)
        setlocale(LC_CTYPE, "C.UTF-8");
    l->el = el_init("nibble", stdin, stdout, stderr);
    if (!l->el)
        return nbi_fail(NB_EIO, "cannot edit lines on this terminal");
    l->history = history_init();
    el_set(l->el, EL_CLIENTDATA, l);
    el_set(l->el, EL_PROMPT, give_prompt);
    el_set(l->el, EL_EDITOR, "emacs");
    el_set(l->el, EL_SIGNAL, 1);
    el_set(l->el, EL_GETCFN, read_key);
    load_history(l);
    /* The narrow function leaks copies of both texts. */
    el_wset(l->el, EL_ADDFN, L"nibble-paste", L"insert pasted text", paste);
    el_set(l->el, EL_BIND, "\\e[200~", "nibble-paste", NULL);
    el_source(l->el, NULL); /* ~/.editrc */
    l->pastes = term && strcmp(term, "dumb") != 0;
    return NB_OK;
}

static void tell_paste(const struct cli_lines *l, bool on)
{
    if (l->pastes)
        fputs(on ? "\033[?2004h" : "\033[?2004l", stdout);
    fflush(stdout);
}

static enum nb_status edit_line(struct cli_lines *l, bool *more)
{
    int count = 0;
    tell_paste(l, true);
    errno = 0;
    const char *text = el_gets(l->el, &count);
    int cause = errno;
    tell_paste(l, false);
    l->line.len = 0;
    *more = text && count > 0;
    if (!*more) {
        putchar('\n');
        fflush(stdout);
        NBI_TRY(nbi_check_interrupt());
        return count < 0 && cause
                   ? nbi_fail(NB_EIO, "cannot read the terminal: %s", strerror(cause))
                   : NB_OK;
    }
    nbi_str_append(&l->line, text, (size_t)count - (text[count - 1] == '\n'));
    return nbi_str_status(&l->line);
}

/* ---- life ---- */

enum nb_status cli_lines_open(struct cli_lines **out, bool terminal)
{
    struct cli_lines *l = *out = calloc(1, sizeof *l);
    if (!l)
        return nbi_fail_memory("lines", sizeof *l);
    enum nb_status rc = terminal ? open_terminal(l) : cli_input_open(&l->in, NULL);
    if (rc != NB_OK) {
        cli_lines_close(l);
        *out = NULL;
    }
    return rc;
}

void cli_lines_close(struct cli_lines *l)
{
    if (!l)
        return;
    if (l->el)
        el_end(l->el);
    if (l->history)
        history_end(l->history);
    free(l->history_path);
    nbi_str_release(&l->line);
    free(l);
}

/* ---- messages ---- */

/* The next line without its end, in l->line. */
static enum nb_status next_line(struct cli_lines *l, bool goes_on, bool *more)
{
    l->prompt = goes_on ? "... " : ">>> ";
    if (l->el)
        return edit_line(l, more);
    NBI_TRY(cli_input_line(&l->in, &l->line, more));
    if (l->line.len > 0 && l->line.p[l->line.len - 1] == '\r')
        l->line.p[--l->line.len] = 0;
    return NB_OK;
}

/* An odd number of them at the end: an even one may be meant. */
static bool ends_in_backslash(const char *text, size_t len)
{
    size_t n = 0;
    while (n < len && text[len - 1 - n] == '\\')
        n++;
    return n % 2 == 1;
}

struct assembly {
    struct nbi_str *message;
    bool started, block, whole;
};

/* A line of a block, without the marks; true if it is not the last. */
static bool take_block_line(struct assembly *a, const char *text, size_t len, bool first)
{
    const size_t mark = strlen(BLOCK);
    bool last = len >= mark && memcmp(text + len - mark, BLOCK, mark) == 0;
    len -= last ? mark : 0;
    if (len == 0 && last && a->message->len > 0) /* the line end before the mark is not text */
        a->message->len--;
    nbi_str_append(a->message, text, len);
    if (!last && !(first && len == 0))
        nbi_str_puts(a->message, "\n");
    return !last;
}

/* Takes a line into the message; true if another one belongs to it. */
static bool take_line(struct assembly *a, const char *text, size_t len)
{
    const size_t mark = strlen(BLOCK);
    bool first = !a->started;
    a->started = true;
    if (first && memchr(text, '\n', len)) { /* pasted */
        a->whole = false;
        nbi_str_append(a->message, text, len);
        return false;
    }
    if (first && len >= mark && memcmp(text, BLOCK, mark) == 0) {
        a->block = true;
        a->whole = false;
        text += mark;
        len -= mark;
    }
    if (a->block)
        return take_block_line(a, text, len, first);
    bool on = ends_in_backslash(text, len);
    nbi_str_append(a->message, text, len - on);
    if (on) {
        nbi_str_puts(a->message, "\n");
        a->whole = false;
    }
    return on;
}

static bool is_blank(const struct nbi_str *s)
{
    for (size_t i = 0; i < s->len; i++)
        if (!s->p[i] || !strchr(" \t\r\n", s->p[i]))
            return false;
    return true;
}

static enum nb_status read_message(struct cli_lines *l, struct nbi_str *message, bool *whole,
                                   bool *more)
{
    struct assembly a = {.message = message, .whole = true};
    message->len = 0;
    for (bool goes_on = true; goes_on;) {
        NBI_TRY(next_line(l, a.started, more));
        if (!*more)
            return a.started && !l->el
                       ? nbi_fail(NB_EFORMAT, "standard input ends inside of a message")
                       : NB_OK;
        goes_on = take_line(&a, nbi_str_text(&l->line), l->line.len);
        NBI_TRY(nbi_str_status(message));
    }
    *whole = a.whole;
    return NB_OK;
}

enum nb_status cli_lines_next(struct cli_lines *l, struct nbi_str *message, bool *whole, bool *more)
{
    do {
        NBI_TRY(read_message(l, message, whole, more));
    } while (*more && is_blank(message));
    if (*more && l->el)
        remember(l, nbi_str_text(message));
    return NB_OK;
}
