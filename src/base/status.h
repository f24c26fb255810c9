/* status.h - error handling: a status code as the return value, one message per thread.
 *
 * The deepest function that knows the cause calls nbi_fail. Callers may put context in front with
 * nbi_context and never replace the message. Nothing here allocates, so it works when memory has
 * run out. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "nibble/core.h"

#define NBI_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* Stores the message for this thread and returns status. */
enum nb_status nbi_fail(enum nb_status status, const char *fmt, ...) NBI_PRINTF(2, 3);

/* Puts "CONTEXT: " in front of the message unless status is NB_OK. Returns status. */
enum nb_status nbi_context(enum nb_status status, const char *fmt, ...) NBI_PRINTF(2, 3);

/* For failures after the result was renamed into place: puts "'TARGET' is in place" in front of the
 * message, since it is no longer true that nothing has changed. Returns status. */
enum nb_status nbi_in_place(enum nb_status status, const char *target);

/* "out of memory: N bytes for WHAT" */
enum nb_status nbi_fail_memory(const char *what, size_t bytes);

/* The wish to stop that a public call obeys is the thread's until the call returns:
 *
 *     NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
 *
 * NULL leaves that of the call around it in force. */
#define NBI_SCOPED __attribute__((cleanup(nbi_cancel_leave), unused))
struct nb_cancel *nbi_cancel_enter(struct nb_cancel *cancel);
void nbi_cancel_leave(struct nb_cancel *const *before);

/* What follows, up to the end of the scope, is not stopped any more: saving what is there. */
void nbi_cancel_ignore(void);

/* For threads that work for this one. */
struct nb_cancel *nbi_cancel_current(void);

/* Returns NB_EINTERRUPTED once the thread's wish to stop is set, else NB_OK. Long loops call it. */
enum nb_status nbi_check_interrupt(void);

/* For optional things: turns NB_ENOTFOUND into NB_OK. */
static inline enum nb_status nbi_unless_absent(enum nb_status rc)
{
    return rc == NB_ENOTFOUND ? NB_OK : rc;
}

/* Returns from the enclosing function if expr is not NB_OK. */
#define NBI_TRY(expr)                                                                              \
    do {                                                                                           \
        enum nb_status nbi_try_rc = (expr);                                                        \
        if (nbi_try_rc != NB_OK)                                                                   \
            return nbi_try_rc;                                                                     \
    } while (0)

/* A broken invariant of the library, never caused by input. Also checked in release builds. */
#define NBI_BUG_IF(cond)                                                                           \
    do {                                                                                           \
        if (cond) {                                                                                \
            fprintf(stderr, "nibble: bug at %s:%d: %s\n", __FILE__, __LINE__, #cond);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)
