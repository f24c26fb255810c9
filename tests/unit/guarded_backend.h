/* guarded_backend.h - the CPU backend with memory that faults when the host accesses it.
 *
 * All memory of the backend, weights included, is inaccessible except while one of its functions
 * runs. Code that works with it does not dereference device addresses, so it works on a GPU too.
 * There is one such backend at a time. */
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "backend/backend.h"
#include "backend/cpu/nvfp4_tile.h"
#include "backend/decode.h"
#include "backend/ops_train.h"

#define GUARDED_MAX 512

static struct {
    struct nbi_backend be, *inner;
    struct {
        struct nbi_ptr at;
        size_t bytes;
    } blocks[GUARDED_MAX];
    int count;
    int64_t calls; /* number of operations and copies */
} guarded;

static inline void guarded_set(struct nbi_ptr p, size_t bytes, int protection)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    assert_int_equal(p.at % page, 0);
    assert_int_equal(mprotect((void *)p.at, (bytes + page - 1) / page * page, protection), 0);
}

static inline void guarded_all(int protection)
{
    for (int i = 0; i < guarded.count; i++)
        guarded_set(guarded.blocks[i].at, guarded.blocks[i].bytes, protection);
}

static inline void guarded_begin(void)
{
    guarded_all(PROT_READ | PROT_WRITE);
    guarded.calls++;
}

static inline enum nb_status guarded_end(enum nb_status rc)
{
    guarded_all(PROT_NONE);
    return rc;
}

static inline void guarded_add(struct nbi_ptr p, int64_t bytes)
{
    if (!p.at || bytes == 0)
        return;
    assert_true(guarded.count < GUARDED_MAX);
    guarded.blocks[guarded.count].at = p;
    guarded.blocks[guarded.count++].bytes = (size_t)bytes;
    guarded_set(p, (size_t)bytes, PROT_NONE);
}

static inline void guarded_remove(struct nbi_ptr p)
{
    for (int i = 0; i < guarded.count; i++)
        if (guarded.blocks[i].at.at == p.at) {
            guarded_set(p, guarded.blocks[i].bytes, PROT_READ | PROT_WRITE);
            guarded.blocks[i] = guarded.blocks[--guarded.count];
            return;
        }
}

static inline enum nb_status guarded_alloc(struct nbi_backend *be, const char *what, int64_t bytes,
                                           struct nbi_ptr *out)
{
    (void)be;
    NBI_TRY(guarded.inner->alloc(guarded.inner, what, bytes, out));
    guarded_add(*out, bytes);
    return NB_OK;
}

static inline void guarded_free(struct nbi_backend *be, struct nbi_ptr p)
{
    (void)be;
    guarded_remove(p);
    guarded.inner->free(guarded.inner, p);
}

static inline void guarded_add_weight(const struct nbi_weight *w)
{
    int64_t bytes = w->layout == NBI_WEIGHT_TILES
                        ? nbi_tiles_bytes(w->rows, w->cols)
                        : (int64_t)nbi_dtype_bytes(w->dtype, w->rows * (w->cols ? w->cols : 1));
    if (w->borrowed)
        return;
    if (w->layout == NBI_WEIGHT_SCALES)
        guarded_add(w->scales, w->rows * w->cols / 16);
    else
        guarded_add(w->data, bytes);
    guarded_add(w->bf16, w->rows * w->cols * 2);
}

static inline int64_t guarded_weight_bytes(const struct nbi_backend *be, enum nbi_dtype dtype,
                                           int64_t rows, int64_t cols)
{
    (void)be;
    return guarded.inner->weight_bytes(guarded.inner, dtype, rows, cols);
}

static inline enum nb_status guarded_weight_new(struct nbi_backend *be,
                                                const struct nbi_weight_source *src,
                                                struct nbi_weight *out)
{
    (void)be;
    NBI_TRY(guarded.inner->weight_new(guarded.inner, src, out));
    guarded_add_weight(out);
    return NB_OK;
}

static inline enum nb_status guarded_weight_alloc(struct nbi_backend *be, enum nbi_dtype dtype,
                                                  int64_t rows, int64_t cols,
                                                  enum nb_weight_store store,
                                                  const struct nbi_weight_memory *memory,
                                                  struct nbi_weight *out)
{
    (void)be;
    NBI_TRY(guarded.inner->weight_alloc(guarded.inner, dtype, rows, cols, store, memory, out));
    guarded_add_weight(out);
    return NB_OK;
}

static inline enum nb_status guarded_weight_read(struct nbi_backend *be, const struct nbi_weight *w,
                                                 int64_t first, int64_t count, void *data,
                                                 void *scales)
{
    (void)be;
    guarded_begin();
    return guarded_end(guarded.inner->weight_read(guarded.inner, w, first, count, data, scales));
}

static inline void guarded_weight_free(struct nbi_backend *be, struct nbi_weight *w)
{
    (void)be;
    if (w->borrowed) {
        guarded.inner->weight_free(guarded.inner, w);
        return;
    }
    guarded_remove(w->data);
    guarded_remove(w->scales);
    guarded_remove(w->bf16);
    guarded.inner->weight_free(guarded.inner, w);
}

static inline enum nb_status guarded_stream_new(struct nbi_backend *be,
                                                const struct nbi_stream_limits *limits,
                                                struct nbi_stream **out)
{
    (void)be;
    return guarded.inner->stream_new(guarded.inner, limits, out);
}

static inline enum nb_status guarded_upload(struct nbi_stream *s, struct nbi_ptr dst,
                                            const void *src, int64_t bytes)
{
    guarded_begin();
    return guarded_end(guarded.inner->upload(s, dst, src, bytes));
}

static inline enum nb_status guarded_download(struct nbi_stream *s, void *dst, struct nbi_ptr src,
                                              int64_t bytes)
{
    guarded_begin();
    return guarded_end(guarded.inner->download(s, dst, src, bytes));
}

static inline enum nb_status guarded_copy(struct nbi_stream *s, struct nbi_ptr dst,
                                          struct nbi_ptr src, int64_t bytes)
{
    guarded_begin();
    return guarded_end(guarded.inner->copy(s, dst, src, bytes));
}

static inline enum nb_status guarded_clear(struct nbi_stream *s, struct nbi_ptr dst, int64_t bytes)
{
    guarded_begin();
    return guarded_end(guarded.inner->clear(s, dst, bytes));
}

#define X(op)                                                                                      \
    static inline enum nb_status guarded_##op(struct nbi_stream *s, const struct nbi_op_##op *a)   \
    {                                                                                              \
        guarded_begin();                                                                           \
        return guarded_end(guarded.inner->op(s, a));                                               \
    }
NBI_OP_LIST(X)
#undef X

static inline void guarded_close(struct nbi_backend *be)
{
    (void)be;
    guarded.inner->close(guarded.inner);
    guarded.inner = NULL;
}

/* Takes ownership of the inner backend. */
static inline struct nbi_backend *guarded_open(struct nbi_backend *inner)
{
    assert_null(guarded.inner);
    guarded.inner = inner;
    guarded.count = 0;
    guarded.calls = 0;
    guarded.be = (struct nbi_backend){.name = "guarded",
                                      .caps = inner->caps,
                                      .chunk = 512,
                                      .close = guarded_close,
                                      .alloc = guarded_alloc,
                                      .free = guarded_free,
                                      .weight_bytes = guarded_weight_bytes,
                                      .weight_new = guarded_weight_new,
                                      .weight_alloc = guarded_weight_alloc,
                                      .weight_read = guarded_weight_read,
                                      .weight_free = guarded_weight_free,
                                      .weight_rows = inner->weight_rows,
                                      .stream_new = guarded_stream_new,
                                      .stream_free = inner->stream_free,
                                      .sync = inner->sync,
                                      .upload = guarded_upload,
                                      .download = guarded_download,
                                      .copy = guarded_copy,
                                      .clear = guarded_clear};
#define X(op) guarded.be.op = inner->op ? guarded_##op : NULL;
    NBI_OP_LIST(X)
#undef X
    return &guarded.be;
}
