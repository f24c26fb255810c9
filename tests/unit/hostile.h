/* hostile.h - shared by the test_hostile_* programs: a buffer to build corrupt files in, and checks
 * that an input is refused with a message that names the mistake. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "formats/store.h"

#define LENGTH(a) (sizeof(a) / sizeof *(a))

/* ---- building files ---- */

struct bytes {
    uint8_t *p;
    size_t len, cap;
};

static inline void put_bytes(struct bytes *b, const void *src, size_t n)
{
    if (b->len + n > b->cap) {
        b->cap = 2 * (b->len + n) + 64;
        b->p = realloc(b->p, b->cap);
        assert_non_null(b->p);
    }
    if (n)
        memcpy(b->p + b->len, src, n);
    b->len += n;
}

static inline void put_zeros(struct bytes *b, size_t n)
{
    const uint8_t zero = 0;
    while (n--)
        put_bytes(b, &zero, 1);
}

static inline void put_u8(struct bytes *b, uint8_t v)
{
    put_bytes(b, &v, 1);
}

static inline void put_u32(struct bytes *b, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        put_u8(b, (uint8_t)(v >> 8 * i));
}

static inline void put_u64(struct bytes *b, uint64_t v)
{
    put_u32(b, (uint32_t)v);
    put_u32(b, (uint32_t)(v >> 32));
}

static inline void put_f32(struct bytes *b, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_u32(b, bits);
}

static inline void put_text(struct bytes *b, const char *text)
{
    put_bytes(b, text, strlen(text));
}

/* A length-prefixed string, as in GGUF. */
static inline void put_string(struct bytes *b, const char *text)
{
    put_u64(b, strlen(text));
    put_text(b, text);
}

static inline void put_uleb(struct bytes *b, uint64_t v)
{
    for (; v > 0x7F; v >>= 7)
        put_u8(b, (uint8_t)(v | 0x80));
    put_u8(b, (uint8_t)v);
}

/* ---- checks ---- */

/* Checks the last error message. `what` identifies the row of a table. */
static inline void expect_message(const char *words, const char *what)
{
    if (strstr(nb_last_error(), words) == NULL)
        fail_msg("%s: '%s' expected in the message, it is: %s", what, words, nb_last_error());
}

/* Opens a copy of exactly n bytes, so that the sanitizer detects reads past the end. */
static inline enum nb_status open_exact(enum nbi_format format, const void *p, size_t n,
                                        struct nbi_store **store, uint8_t **copy)
{
    *copy = malloc(n ? n : 1);
    assert_non_null(*copy);
    if (n)
        memcpy(*copy, p, n);
    return nbi_store_open_memory(store, format, *copy, n);
}

/* Opening must fail with words in its message. Empties the buffer for the next case. */
static inline void refuse(enum nbi_format format, struct bytes *b, const char *words)
{
    struct nbi_store *store;
    uint8_t *copy;
    enum nb_status rc = open_exact(format, b->p, b->len, &store, &copy);
    if (rc == NB_OK)
        nbi_store_close(store);
    free(copy);
    free(b->p);
    *b = (struct bytes){0};
    if (rc == NB_OK)
        fail_msg("accepted; a message with '%s' was expected", words);
    expect_message(words, "open");
}

/* Opening must succeed, which shows that another case fails only for the reason it tests. */
static inline void accept(enum nbi_format format, struct bytes *b)
{
    struct nbi_store *store;
    uint8_t *copy;
    enum nb_status rc = open_exact(format, b->p, b->len, &store, &copy);
    if (rc == NB_OK)
        nbi_store_close(store);
    free(copy);
    free(b->p);
    *b = (struct bytes){0};
    if (rc != NB_OK)
        fail_msg("refused: %s", nb_last_error());
}
