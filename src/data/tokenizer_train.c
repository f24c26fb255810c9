/* tokenizer_train.c - nb_tokenizer_train: trains a tokenizer on data files. */
#include <string.h>

#include "base/log.h"
#include "base/str.h"
#include "data/dataset.h"
#include "nibble/data.h"
#include "tokenizer/bpe_train.h"

static enum nb_status count_text(void *ctx, const char *text, size_t len)
{
    return nbi_bpe_trainer_add(ctx, text, len);
}

struct counting {
    struct nbi_bpe_trainer *trainer;
    struct nbi_example_encoder check; /* rejects lines that training would reject */
    struct nbi_example example;
};

static enum nb_status count_record(void *ctx, enum nbi_data_kind kind,
                                   const struct nbi_record *record, const char *text)
{
    struct counting *c = ctx;
    NBI_TRY(nbi_example_make(&c->check, kind, text, record->len, record->ends, &c->example));
    return nbi_example_texts(kind, text, record->len, count_text, c->trainer);
}

static enum nb_status count_files(struct nbi_bpe_trainer *t, const char *const *files)
{
    struct counting c = {.trainer = t, .check = {.chat = NBI_CHAT_QWEN3}};
    struct nbi_walk walk = {.fn = count_record, .ctx = &c};
    enum nb_status rc = NB_OK;
    for (; *files && rc == NB_OK; files++) {
        struct nbi_source *src = NULL;
        rc = nbi_source_open(&src, *files);
        if (rc == NB_OK)
            rc = nbi_walk(&walk, src);
        nbi_source_close(src);
    }
    nbi_example_encoder_release(&c.check);
    nbi_example_release(&c.example);
    return rc;
}

/* Checks the output path before anything is read: it must not replace an input. */
static enum nb_status check_target(const struct nb_tokenizer_train_opts *opts)
{
    if (!nbi_has_extension(opts->out, ".json") || nbi_path_is_dir(opts->out))
        return nbi_fail(NB_EINVAL, "'%s' is no name for a tokenizer.json", opts->out);
    for (const char *const *file = opts->files; *file; file++)
        if (nbi_path_same(opts->out, *file))
            return nbi_fail(NB_EINVAL, "'%s' would replace a text it is made from", opts->out);
    return NB_OK;
}

/* An existing tokenizer_config.json stays: it may hold more than the one written here. */
static enum nb_status write_settings(const struct nbi_vocab *v, const char *tokenizer)
{
    char *dir = nbi_path_dir(tokenizer);
    char *path = dir ? nbi_path_join(dir, "tokenizer_config.json") : NULL;
    enum nb_status rc = path ? NB_OK : NB_ENOMEM;
    if (rc == NB_OK && nbi_path_exists(path))
        nbi_log(NB_LOG_INFO, "'%s' exists already and is left unchanged", path);
    else if (rc == NB_OK)
        rc = nbi_vocab_write_config(v, path);
    free(dir);
    free(path);
    return rc;
}

enum nb_status nb_tokenizer_train(const struct nb_tokenizer_train_opts *opts)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nbi_bpe_trainer *t = NULL;
    struct nbi_vocab v;
    nbi_vocab_init(&v);
    NBI_TRY(nbi_bpe_trainer_check(opts->vocab));
    NBI_TRY(check_target(opts));
    NBI_TRY(nbi_bpe_trainer_new(&t));
    enum nb_status rc = count_files(t, opts->files);
    if (rc == NB_OK && nbi_bpe_trainer_words(t) == 0)
        rc = nbi_fail(NB_EFORMAT, "there is no text to learn from");
    const struct nbi_bpe_trainer_opts run = {.vocab = opts->vocab,
                                             .min_count = opts->min_count,
                                             .progress = opts->progress,
                                             .progress_ctx = opts->progress_ctx};
    if (rc == NB_OK)
        rc = nbi_bpe_trainer_run(t, &run, &v);
    if (rc == NB_OK && v.count < opts->vocab)
        nbi_log(NB_LOG_WARN, "the texts give only %lld entries; more text gives more",
                (long long)v.count);
    v.chat_template = nbi_chatml_template;
    if (rc == NB_OK)
        rc = nbi_vocab_write_json(&v, opts->out);
    if (rc == NB_OK)
        rc = nbi_in_place(write_settings(&v, opts->out), opts->out);
    nbi_vocab_release(&v);
    nbi_bpe_trainer_free(t);
    return rc;
}
