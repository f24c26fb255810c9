/* outputs.h - what a failed call left in its outputs. Tests that include it are linked as failing.h
 * says. */
#pragma once

#include "unit/failing.h"
#include "unit/support.h"

static inline bool all_are(const void *p, size_t size, int byte)
{
    const unsigned char *bytes = p;
    for (size_t i = 0; i < size; i++)
        if (bytes[i] != byte)
            return false;
    return true;
}

#define MARK              0x5A
#define FILL(out)         memset(&(out), MARK, sizeof(out))
#define assert_kept(out)  assert_true(all_are(&(out), sizeof(out), MARK))
#define assert_empty(out) assert_true(all_are(&(out), sizeof(out), 0))

/* Calls `expr` with one of its allocations failing, a later one each time (all of the first
 * sixteen, then some), until it succeeds. Before each call `prepare` runs, after each failure
 * `check`. */
#define FOR_EACH_FAILED_ALLOCATION(prepare, expr, check)                                           \
    do {                                                                                           \
        enum nb_status each_rc = NB_ENOMEM;                                                        \
        long each = 0;                                                                             \
        for (; each_rc != NB_OK; each += 1 + each / 16) {                                          \
            prepare;                                                                               \
            allocations_left = each;                                                               \
            each_rc = (expr);                                                                      \
            allocations_left = -1;                                                                 \
            if (each_rc == NB_OK)                                                                  \
                break;                                                                             \
            assert_int_equal(each_rc, NB_ENOMEM);                                                  \
            assert_non_null(strstr(nb_last_error(), "out of memory"));                             \
            check;                                                                                 \
        }                                                                                          \
        assert_true(each > 0);                                                                     \
    } while (0)
