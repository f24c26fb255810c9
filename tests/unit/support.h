/* support.h - shared by unit tests: a temporary directory, files in it, assertions. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dirs.h"
#include "base/file.h"
#include "base/sanitized.h"
#include "nibble.h"
#include "runner.h"

/* EMULATED: kernels run on the host (tests/emulated), on four multiprocessors and slowly. Then
 * cases are fewer and smaller. */
#ifndef EMULATED
#define EMULATED 0
#endif

/* Skips a test if there is no GPU. */
static inline void need_gpu(void)
{
    if (without_gpu_cases())
        fail_msg("a case that needs a GPU has 'gpu' or 'cuda' in its name");
    if (nb_gpu_check(0) != NB_OK)
        skip("%s", nb_last_error());
}

#define assert_ok(expr)                                                                            \
    do {                                                                                           \
        enum nb_status assert_ok_rc = (expr);                                                      \
        if (assert_ok_rc != NB_OK)                                                                 \
            fail_msg("%s: %s", #expr, nb_last_error());                                            \
    } while (0)

/* Expects that status, and words in the message. */
#define assert_fails(expr, status, words)                                                          \
    do {                                                                                           \
        enum nb_status assert_fails_rc = (expr);                                                   \
        if (assert_fails_rc != (status))                                                           \
            fail_msg("%s: status %d, %d expected", #expr, (int)assert_fails_rc, (int)(status));    \
        if (!strstr(nb_last_error(), words))                                                       \
            fail_msg("%s: '%s' lacks '%s'", #expr, nb_last_error(), words);                        \
    } while (0)

static char test_dir[256];

static inline int make_test_dir(void **state)
{
    const char *base = getenv("TMPDIR");
    (void)state;
    snprintf(test_dir, sizeof test_dir, "%s/nibble-test-XXXXXX", base ? base : "/tmp");
    return mkdtemp(test_dir) ? 0 : -1;
}

static inline int remove_test_dir(void **state)
{
    (void)state;
    nbi_remove_tree(test_dir);
    return 0;
}

/* A path in the test directory. The last sixteen results stay valid. */
static inline const char *test_path(const char *name)
{
    static char paths[16][512];
    static int next;
    char *p = paths[next++ & 15];
    snprintf(p, sizeof paths[0], "%s/%s", test_dir, name);
    return p;
}

/* Writes a text file into the test directory. */
static inline void put(const char *name, const char *text)
{
    assert_ok(nbi_file_write(test_path(name), text, strlen(text)));
}

static inline void assert_content(const char *name, const char *text)
{
    char *bytes;
    size_t len;
    assert_ok(nbi_file_read(test_path(name), 1000, &bytes, &len));
    assert_string_equal(bytes, text);
    assert_int_equal(len, strlen(text));
    free(bytes);
}

/* Counts entries of the test directory with temporary names. */
static inline int temporaries(void)
{
    DIR *d = opendir(test_dir);
    struct dirent *e;
    int n = 0;
    while ((e = readdir(d)))
        n += strstr(e->d_name, ".nibble-") != NULL;
    closedir(d);
    return n;
}
