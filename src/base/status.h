/* status.h - how failures travel: a code in the return value, one line of text per thread.
 *
 * The deepest function that knows the cause calls nbi_fail; callers on the way up may put context
 * in front with nbi_context and never replace the message. No allocation, so it works when memory
 * has run out. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "nibble.h"

#define NBI_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* Stores the message for this thread and returns status. */
enum nb_status nbi_fail(enum nb_status status, const char *fmt, ...) NBI_PRINTF(2, 3);

/* Puts "CONTEXT: " in front of the message unless status is NB_OK. Returns status. */
enum nb_status nbi_context(enum nb_status status, const char *fmt, ...) NBI_PRINTF(2, 3);

/* For a step after the result got its place: puts "'TARGET' is in place" in front of the message.
 * An interruption may then not be said to have changed nothing. Returns status. */
enum nb_status nbi_in_place(enum nb_status status, const char *target);

/* "out of memory" for a named thing. */
enum nb_status nbi_fail_memory(const char *what, size_t bytes);

/* NB_EINTERRUPTED after nb_interrupt(), else NB_OK; long loops ask it. */
enum nb_status nbi_check_interrupt(void);

/* For what need not be there: NB_ENOTFOUND counts as NB_OK. */
static inline enum nb_status nbi_unless_absent(enum nb_status rc)
{
    return rc == NB_ENOTFOUND ? NB_OK : rc;
}

/* Leaves the enclosing function with the status of expr unless it is NB_OK. */
#define NBI_TRY(expr)                                                                              \
    do {                                                                                           \
        enum nb_status nbi_try_rc = (expr);                                                        \
        if (nbi_try_rc != NB_OK)                                                                   \
            return nbi_try_rc;                                                                     \
    } while (0)

/* A broken invariant of our own, never the user's input; active in release builds. */
#define NBI_BUG_IF(cond)                                                                           \
    do {                                                                                           \
        if (cond) {                                                                                \
            fprintf(stderr, "nibble: bug at %s:%d: %s\n", __FILE__, __LINE__, #cond);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)
