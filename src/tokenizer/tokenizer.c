/* tokenizer.c - the tokenizer as the public header has it: found in a model, shared, used. */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/utf8.h"
#include "tokenizer/bpe.h"
#include "tokenizer/handle.h"

/* Tables that several tokenizers use. */
struct shared {
    struct nbi_bpe *bpe;
    atomic_int users;
};

struct nb_tokenizer {
    struct shared *shared;
    struct nbi_encoder *encoder;
};

enum nb_status nbi_text_place(const char *model, const char *model_dir, struct nbi_text_place *out)
{
    *out = (struct nbi_text_place){.kind = NBI_TEXT_DIR};
    if (!nbi_path_exists(model))
        return nbi_fail(errno == ENOENT ? NB_ENOTFOUND : NB_EIO, "cannot open '%s': %s", model,
                        strerror(errno));
    if (model_dir && !nbi_path_is_dir(model_dir))
        return nbi_fail(NB_ENOTFOUND, "'%s' is not a directory", model_dir);
    if (model_dir || nbi_path_is_dir(model))
        out->path = strdup(model_dir ? model_dir : model);
    else if (nbi_has_extension(model, ".gguf") || nbi_has_extension(model, ".json"))
        out->path = strdup(model);
    else if (nbi_has_extension(model, ".dat") || nbi_has_extension(model, ".safetensors"))
        out->path = nbi_path_dir(model);
    else
        return nbi_fail(NB_EUNSUPPORTED,
                        "cannot tell what '%s' is: a model is a directory or ends in .dat, "
                        ".safetensors or .gguf",
                        model);
    if (!nbi_path_is_dir(out->path ? out->path : ""))
        out->kind = nbi_has_extension(model, ".gguf") ? NBI_TEXT_GGUF : NBI_TEXT_JSON;
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
    struct nbi_text_place place;
    nbi_vocab_init(v);
    NBI_TRY(nbi_text_place(model, model_dir, &place));
    enum nb_status rc = place.kind == NBI_TEXT_DIR    ? nbi_vocab_read_dir(v, place.path)
                        : place.kind == NBI_TEXT_JSON ? nbi_vocab_read_json(v, place.path)
                                                      : read_gguf(v, place.path);
    free(place.path);
    return rc;
}

static void release_shared(struct shared *s)
{
    if (!s || atomic_fetch_sub(&s->users, 1) > 1)
        return;
    nbi_bpe_free(s->bpe);
    free(s);
}

/* A tokenizer over tables that it becomes a user of. */
static enum nb_status new_user(struct nb_tokenizer **out, struct shared *s)
{
    struct nb_tokenizer *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t)
        return nbi_fail_memory("tokenizer", sizeof *t);
    enum nb_status rc = nbi_encoder_new(&t->encoder, s->bpe);
    if (rc != NB_OK) {
        free(t);
        return rc;
    }
    atomic_fetch_add(&s->users, 1);
    t->shared = s;
    *out = t;
    return NB_OK;
}

enum nb_status nbi_tokenizer_new(struct nb_tokenizer **out, const struct nbi_vocab *v)
{
    struct shared *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return nbi_fail_memory("tokenizer", sizeof *s);
    atomic_init(&s->users, 1);
    enum nb_status rc = nbi_bpe_new(&s->bpe, v);
    if (rc == NB_OK)
        rc = new_user(out, s);
    release_shared(s);
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

enum nb_status nb_tokenizer_share(struct nb_tokenizer **out, const struct nb_tokenizer *t)
{
    return new_user(out, t->shared);
}

void nb_tokenizer_close(struct nb_tokenizer *t)
{
    if (!t)
        return;
    nbi_encoder_free(t->encoder);
    release_shared(t->shared);
    free(t);
}

const struct nbi_bpe *nbi_tokenizer_bpe(const struct nb_tokenizer *t)
{
    return t->shared->bpe;
}

struct nbi_encoder *nbi_tokenizer_encoder(struct nb_tokenizer *t)
{
    return t->encoder;
}

int64_t nb_tokenizer_size(const struct nb_tokenizer *t)
{
    return nbi_bpe_size(t->shared->bpe);
}

enum nb_status nb_tokenizer_encode(struct nb_tokenizer *t, const char *text, size_t len,
                                   bool special, int32_t **ids, size_t *count)
{
    struct nbi_ids out = {0};
    *ids = NULL;
    *count = 0;
    enum nb_status rc = nbi_ids_reserve(&out, len / 3 + 16);
    if (rc == NB_OK)
        rc = nbi_encode(t->encoder, text, len, special, &out);
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
        const char *bytes = nbi_bpe_token(t->shared->bpe, ids[i], &n);
        if (bytes)
            nbi_str_append(&out, bytes, n);
        missing += !bytes;
    }
    if (unknown)
        *unknown = missing;
    nbi_str_append(&out, "", 0); /* room for the NUL, also of nothing */
    enum nb_status rc = nbi_str_status(&out);
    if (rc != NB_OK) {
        nbi_str_release(&out);
        return rc;
    }
    *text = out.p;
    *len = out.len;
    return NB_OK;
}

/* ---- token by token ---- */

static enum nb_status decoder_room(struct nb_decoder *d, size_t bytes)
{
    if (d->capacity >= bytes)
        return NB_OK;
    char *p = realloc(d->buffer, bytes);
    if (!p)
        return nbi_fail_memory("decoder", bytes);
    d->buffer = p;
    d->capacity = bytes;
    return NB_OK;
}

enum nb_status nb_decoder_next(struct nb_decoder *d, const struct nb_tokenizer *t, int32_t id,
                               const char **text, size_t *len)
{
    size_t n = 0, total, used = 0;
    const char *bytes = id < 0 ? NULL : nbi_bpe_token(t->shared->bpe, id, &n);
    *text = "";
    *len = 0;
    total = (size_t)d->count + n;
    /* What is held, then the token; each byte becomes at most the three of U+FFFD. */
    NBI_TRY(decoder_room(d, 4 * total + 4));
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
            if (cut && id >= 0) { /* the rest may come with the next token */
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
