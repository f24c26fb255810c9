/* tokenizer.c - the public tokenizer: opens it from a model, encodes and decodes.
 *
 * The tables never change. Mutable state is in an encoder, and each call has one of its own: an
 * idle one, whose cache of words is already warm, or a new one. */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/array.h"
#include "base/utf8.h"
#include "tokenizer/bpe.h"
#include "tokenizer/tokenizer.h"

#define IDLE_MAX 16 /* encoders that are kept; about 2 MiB each */

struct nb_tokenizer {
    struct nbi_bpe *bpe;
    _Atomic(struct nbi_encoder *) idle[IDLE_MAX];
};

enum nb_status nbi_tokenizer_source(const char *model, const char *model_dir,
                                    struct nbi_tokenizer_source *out)
{
    enum nbi_format format = NBI_FORMATS;
    *out = (struct nbi_tokenizer_source){.kind = NBI_TOKENIZER_DIR};
    if (!nbi_path_exists(model))
        return nbi_fail(errno == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot open '%s': %s", model,
                        strerror(errno));
    if (model_dir && !nbi_path_is_dir(model_dir))
        return nbi_fail(NB_ENOTFOUND, "'%s' is not a directory", model_dir);
    if (model_dir || nbi_path_is_dir(model))
        out->path = strdup(model_dir ? model_dir : model);
    else if (nbi_has_extension(model, ".json"))
        out->path = strdup(model);
    else {
        NBI_TRY(nbi_format_detect(model, &format));
        out->path = format == NBI_FORMAT_GGUF ? strdup(model) : nbi_path_dir(model);
    }
    if (!nbi_path_is_dir(out->path ? out->path : ""))
        out->kind = format == NBI_FORMAT_GGUF ? NBI_TOKENIZER_GGUF : NBI_TOKENIZER_JSON;
    return out->path ? NB_OK : nbi_fail_memory("path", strlen(model));
}

static enum nb_status read_gguf(struct nbi_vocab *v, const char *path)
{
    struct nbi_store *store = NULL;
    NBI_TRY(nbi_store_open(&store, path));
    enum nb_status rc = nbi_context(nbi_vocab_read_gguf(v, store), "'%s'", path);
    nbi_store_close(store);
    return rc;
}

static enum nb_status read_model(struct nbi_vocab *v, const char *model, const char *model_dir)
{
    struct nbi_tokenizer_source source;
    nbi_vocab_init(v);
    NBI_TRY(nbi_tokenizer_source(model, model_dir, &source));
    enum nb_status rc = source.kind == NBI_TOKENIZER_DIR    ? nbi_vocab_read_dir(v, source.path)
                        : source.kind == NBI_TOKENIZER_JSON ? nbi_vocab_read_json(v, source.path)
                                                            : read_gguf(v, source.path);
    free(source.path);
    return rc;
}

enum nb_status nbi_tokenizer_new(struct nb_tokenizer **out, const struct nbi_vocab *v)
{
    struct nb_tokenizer *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t)
        return nbi_fail_memory("tokenizer", sizeof *t);
    enum nb_status rc = nbi_bpe_new(&t->bpe, v);
    if (rc == NB_OK)
        *out = t;
    else
        nb_tokenizer_close(t);
    return rc;
}

enum nb_status nb_tokenizer_open(struct nb_tokenizer **out, const char *model,
                                 const char *model_dir)
{
    struct nbi_vocab v;
    *out = NULL;
    NBI_TRY(read_model(&v, model, model_dir));
    enum nb_status rc = nbi_context(nbi_tokenizer_new(out, &v), "tokenizer of '%s'", model);
    nbi_vocab_release(&v);
    return rc;
}

void nb_tokenizer_close(struct nb_tokenizer *t)
{
    if (!t)
        return;
    for (int i = 0; i < IDLE_MAX; i++)
        nbi_encoder_free(atomic_load(&t->idle[i]));
    nbi_bpe_free(t->bpe);
    free(t);
}

const struct nbi_bpe *nbi_tokenizer_bpe(const struct nb_tokenizer *t)
{
    return t->bpe;
}

int64_t nb_tokenizer_size(const struct nb_tokenizer *t)
{
    return nbi_bpe_size(t->bpe);
}

static enum nb_status acquire_encoder(struct nb_tokenizer *t, struct nbi_encoder **e)
{
    for (int i = 0; i < IDLE_MAX; i++)
        if (atomic_load_explicit(&t->idle[i], memory_order_relaxed) &&
            (*e = atomic_exchange(&t->idle[i], NULL)))
            return NB_OK;
    return nbi_encoder_new(e, t->bpe);
}

/* Keeps the encoder for a later call. After a failure it is freed instead, because its buffers may
 * remember the failure. */
static void release_encoder(struct nb_tokenizer *t, struct nbi_encoder *e, bool failed)
{
    for (int i = 0; i < IDLE_MAX && !failed; i++) {
        struct nbi_encoder *none = NULL;
        if (atomic_compare_exchange_strong(&t->idle[i], &none, e))
            return;
    }
    nbi_encoder_free(e);
}

enum nb_status nbi_tokenizer_encode(struct nb_tokenizer *t, const char *text, size_t len,
                                    bool special, struct nbi_ids *ids)
{
    struct nbi_encoder *e;
    NBI_TRY(acquire_encoder(t, &e));
    enum nb_status rc = nbi_encode(e, text, len, special, ids);
    release_encoder(t, e, rc != NB_OK);
    return rc;
}

enum nb_status nb_tokenizer_encode(struct nb_tokenizer *t, const char *text, size_t len,
                                   bool special, int32_t **ids, size_t *count)
{
    struct nbi_ids out = {0};
    *ids = NULL;
    *count = 0;
    enum nb_status rc = nbi_ids_reserve(&out, len / 3 + 16);
    if (rc == NB_OK)
        rc = nbi_tokenizer_encode(t, text, len, special, &out);
    if (rc != NB_OK) {
        nbi_ids_release(&out);
        return rc;
    }
    *ids = out.p;
    *count = out.count;
    return NB_OK;
}

enum nb_status nb_tokenizer_decode(const struct nb_tokenizer *t, const int32_t *ids, size_t count,
                                   char **text, size_t *len, size_t *unknown)
{
    struct nbi_str out = {0};
    size_t missing = 0;
    *text = NULL;
    *len = 0;
    for (size_t i = 0; i < count; i++) {
        size_t n;
        const char *bytes = nbi_bpe_token(t->bpe, ids[i], &n);
        if (bytes)
            nbi_str_append(&out, bytes, n);
        missing += !bytes;
    }
    nbi_str_append(&out, "", 0); /* allocates even for an empty text */
    enum nb_status rc = nbi_str_status(&out);
    if (rc != NB_OK) {
        nbi_str_release(&out);
        return rc;
    }
    *text = out.p;
    *len = out.len;
    if (unknown)
        *unknown = missing;
    return NB_OK;
}

/* ---- token by token ---- */

enum nb_status nb_decoder_next(struct nb_decoder *d, const struct nb_tokenizer *t, int32_t id,
                               const char **text, size_t *len)
{
    size_t n = 0, total, used = 0;
    const char *bytes = id < 0 ? NULL : nbi_bpe_token(t->bpe, id, &n);
    *text = "";
    *len = 0;
    total = (size_t)d->count + n;
    /* Input: the held bytes and the token, at the end of the buffer. Output: at its start; each
     * input byte becomes at most U+FFFD, three bytes. */
    NBI_TRY(NBI_ARRAY_RESERVE(d->buffer, d->capacity, 4 * total + 4, "decoder"));
    char *in = d->buffer + 3 * total + 3, *p = in, *end = in + total;
    memcpy(in, d->held, (size_t)d->count);
    if (n > 0)
        memcpy(in + d->count, bytes, n);
    d->count = 0;
    while (p < end) {
        bool cut = false;
        int size = nbi_utf8_length(p, end);
        if (size > 0) {
            memmove(d->buffer + used, p, (size_t)size);
            used += (size_t)size;
        } else {
            size = nbi_utf8_bad_length(p, end, &cut);
            if (cut && id >= 0) { /* the next token may complete the character */
                d->count = (int)(end - p);
                memcpy(d->held, p, (size_t)d->count);
                break;
            }
            used += (size_t)nbi_utf8_encode(d->buffer + used, 0xFFFD);
        }
        p += size;
    }
    *text = d->buffer;
    *len = used;
    return NB_OK;
}

void nb_decoder_release(struct nb_decoder *d)
{
    free(d->buffer);
    *d = (struct nb_decoder){0};
}
