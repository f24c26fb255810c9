/* terminal.c - a terminal in raw mode. */
#include "cli/terminal.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/syscall.h"

#define POLL_MS   100
#define PASTE_ON  "\033[?2004h"
#define PASTE_OFF "\033[?2004l"

/* ---- modes ---- */

static enum nb_status failed(const char *what)
{
    return nbi_fail(NB_EIO, "cannot %s the terminal: %s", what, strerror(errno));
}

static enum nb_status set_mode(const struct termios *mode)
{
    int rc;
    NBI_RETRY(rc, tcsetattr(STDIN_FILENO, TCSADRAIN, mode));
    return rc == 0 ? NB_OK : failed("set up");
}

static enum nb_status set_raw(struct cli_terminal *t, struct termios mode)
{
    mode.c_iflag &= (tcflag_t) ~(ICRNL | INLCR | IGNCR | ISTRIP | IXON);
    mode.c_lflag &= (tcflag_t) ~(ICANON | ECHO | IEXTEN);
    mode.c_lflag |= ISIG | NOFLSH; /* Ctrl-C must not throw away what was drawn */
    mode.c_cc[VMIN] = 1;
    mode.c_cc[VTIME] = 0;
    mode.c_cc[VSUSP] = mode.c_cc[VQUIT] = _POSIX_VDISABLE;
    NBI_TRY(set_mode(&mode));
    t->raw = true;
    return NB_OK;
}

/* Writes without reporting failures. */
static void write_text(const char *text)
{
    struct nbi_str out = {0};
    nbi_str_puts(&out, text);
    if (nbi_str_status(&out) == NB_OK && cli_terminal_write(&out) != NB_OK) {
        /* the next writer finds out */
    }
    nbi_str_release(&out);
}

enum nb_status cli_terminal_enter(struct cli_terminal *t)
{
    fflush(stdout);
    if (tcgetattr(STDIN_FILENO, &t->before) != 0)
        return failed("set up");
    NBI_TRY(set_raw(t, t->before));
    write_text(PASTE_ON);
    return NB_OK;
}

void cli_terminal_leave(struct cli_terminal *t, bool end_row)
{
    if (!t->raw)
        return;
    write_text(end_row ? PASTE_OFF "\n" : PASTE_OFF);
    t->raw = false;
    if (set_mode(&t->before) != NB_OK) {
        /* it is gone */
    }
}

enum nb_status cli_terminal_check(struct cli_terminal *t, bool *changed)
{
    struct termios mode;
    *changed = false;
    if (tcgetattr(STDIN_FILENO, &mode) != 0 || !(mode.c_lflag & ICANON))
        return NB_OK; /* if it is gone, reading says so */
    *changed = true;
    t->before = mode;
    NBI_TRY(set_raw(t, mode));
    write_text(PASTE_ON);
    return NB_OK;
}

bool cli_terminal_is_dumb(void)
{
    const char *term = getenv("TERM");
    return !term || !*term || strcmp(term, "dumb") == 0;
}

bool cli_terminal_begin_output(struct termios *before)
{
    if (tcgetattr(STDIN_FILENO, before) != 0)
        return false;
    struct termios mode = *before;
    mode.c_lflag &= (tcflag_t)~ECHO;
    mode.c_lflag |= NOFLSH;
    return set_mode(&mode) == NB_OK;
}

void cli_terminal_end_output(const struct termios *before)
{
    if (set_mode(before) != NB_OK) {
        /* it is gone */
    }
}

void cli_terminal_forget_keys(void)
{
    tcflush(STDIN_FILENO, TCIFLUSH);
}

void cli_terminal_size(int fd, size_t *columns, size_t *rows)
{
    struct winsize size = {0};
    if (ioctl(fd, TIOCGWINSZ, &size) != 0)
        size = (struct winsize){0};
    *columns = size.ws_col;
    *rows = size.ws_row;
}

enum nb_status cli_terminal_signal(struct cli_terminal *t, int signal)
{
    cli_terminal_leave(t, true);
    kill(0, signal);
    poll(NULL, 0, 20); /* another thread may be the one that takes it */
    return cli_terminal_enter(t);
}

/* ---- bytes ---- */

enum nb_status cli_terminal_write(struct nbi_str *out)
{
    NBI_TRY(nbi_str_status(out));
    for (size_t at = 0; at < out->len;) {
        struct pollfd room = {.fd = STDOUT_FILENO, .events = POLLOUT};
        ssize_t n = write(STDOUT_FILENO, out->p + at, out->len - at);
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return failed("write to");
        if (n < 0 && errno == EAGAIN)
            poll(&room, 1, POLL_MS);
        if (n < 0)
            NBI_TRY(nbi_check_interrupt());
        at += n > 0 ? (size_t)n : 0;
    }
    out->len = 0;
    return NB_OK;
}

enum nb_status cli_terminal_wait(struct cli_terminal *t, enum cli_terminal_input *input)
{
    struct pollfd key = {.fd = STDIN_FILENO, .events = POLLIN};
    *input = CLI_TERMINAL_BYTES;
    /* A signal may come just before the waiting begins, hence the limit. */
    NBI_TRY(nbi_check_interrupt());
    if (t->at < t->len)
        return NB_OK;
    int ready = poll(&key, 1, POLL_MS);
    NBI_TRY(nbi_check_interrupt());
    if (ready < 0 && errno != EINTR)
        return failed("read");
    *input = CLI_TERMINAL_PAUSE;
    if (ready <= 0)
        return NB_OK;
    ssize_t n = read(STDIN_FILENO, t->buffer, sizeof t->buffer);
    if (n < 0 && errno != EINTR && errno != EAGAIN) {
        enum nb_status rc = failed("read");
        NBI_TRY(nbi_check_interrupt()); /* which may be why */
        return rc;
    }
    t->at = 0;
    t->len = n > 0 ? (size_t)n : 0;
    if (n >= 0)
        *input = n > 0 ? CLI_TERMINAL_BYTES : CLI_TERMINAL_END;
    return NB_OK;
}
