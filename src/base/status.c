/* status.c - the error message of each thread, and the wish to stop that it obeys. */
#include "base/status.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#define MESSAGE_MAX 1024

static _Thread_local char message[MESSAGE_MAX];

static _Thread_local struct nb_cancel *cancel; /* that this thread obeys; NULL: none */

/* Signal handlers set it. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "nb_cancel_set is called in signal handlers");

const char *nb_status_text(enum nb_status status)
{
    switch (status) {
#define X(name, text)                                                                              \
    case name:                                                                                     \
        return text;
        NB_STATUS_LIST(X)
#undef X
    }
    return "unknown status";
}

const char *nb_last_error(void)
{
    return message;
}

/* A message is one line of text, whatever the file it quotes contains: control characters, and with
 * them terminal escapes, become '?'. */
static void make_printable(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7F)
            *s = '?';
}

enum nb_status nbi_fail(enum nb_status status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    make_printable(message);
    return status;
}

enum nb_status nbi_context(enum nb_status status, const char *fmt, ...)
{
    if (status == NB_OK)
        return status;
    char old[MESSAGE_MAX];
    memcpy(old, message, sizeof old);
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    if (n >= 0 && (size_t)n < sizeof message)
        snprintf(message + n, sizeof message - (size_t)n, ": %.*s", MESSAGE_MAX - 3 - n, old);
    make_printable(message);
    return status;
}

enum nb_status nbi_in_place(enum nb_status status, const char *target)
{
    return nbi_context(status, "'%s' is in place, but a later step failed", target);
}

enum nb_status nbi_fail_memory(const char *what, size_t bytes)
{
    return nbi_fail(NB_ENOMEM, "out of memory: %zu bytes for %s", bytes, what);
}

void nb_cancel_set(struct nb_cancel *c)
{
    __atomic_store_n(&c->set, 1, __ATOMIC_SEQ_CST);
}

void nb_cancel_clear(struct nb_cancel *c)
{
    __atomic_store_n(&c->set, 0, __ATOMIC_SEQ_CST);
}

struct nb_cancel *nbi_cancel_enter(struct nb_cancel *c)
{
    struct nb_cancel *before = cancel;
    if (c)
        cancel = c;
    return before;
}

void nbi_cancel_leave(struct nb_cancel *const *before)
{
    cancel = *before;
}

void nbi_cancel_ignore(void)
{
    cancel = NULL;
}

struct nb_cancel *nbi_cancel_current(void)
{
    return cancel;
}

enum nb_status nbi_check_interrupt(void)
{
    return cancel && __atomic_load_n(&cancel->set, __ATOMIC_SEQ_CST)
               ? nbi_fail(NB_EINTERRUPTED, "interrupted")
               : NB_OK;
}

const char *nb_version(void)
{
    return NIBBLE_VERSION " (" NIBBLE_COMMIT ")"; /* both set by the build */
}
