/* engine.c - opens a model for inference: config, tokenizer, backend, then the weights. */
#include "infer/engine.h"

#include <string.h>

#include "base/json.h"
#include "base/str.h"
#include "base/sys.h"

static void add_eos(struct nb_engine *e, int64_t id)
{
    if (id >= 0 && id < e->config.vocab_size && !nbi_engine_is_eos(e, (int32_t)id) &&
        e->eos_count < 2 * NBI_MAX_EOS)
        e->eos[e->eos_count++] = (int32_t)id;
}

/* value: an id, or a list of ids. */
static enum nb_status read_eos(struct nb_engine *e, const json_t *value)
{
    size_t i;
    json_t *id;
    if (json_is_integer(value))
        add_eos(e, json_integer_value(value));
    else if (value && !json_is_array(value) && !json_is_null(value))
        return nbi_fail(NB_EFORMAT, "'eos_token_id' must be an id or a list of ids");
    json_array_foreach (value, i, id)
        add_eos(e, json_integer_value(id));
    return NB_OK;
}

bool nbi_engine_is_eos(const struct nb_engine *e, int32_t id)
{
    for (int i = 0; i < e->eos_count; i++)
        if (e->eos[i] == id)
            return true;
    return false;
}

enum nb_status nbi_engine_check_ids(const struct nb_engine *e, const int32_t *ids, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= e->config.vocab_size)
            return nbi_fail(NB_EVALUE, "token id %d is outside the vocabulary of %lld", ids[i],
                            (long long)e->config.vocab_size);
    return NB_OK;
}

enum nb_status nbi_engine_encode_question(const struct nb_engine *e, const char *question,
                                          int32_t **ids, size_t *count)
{
    const struct nb_message message = {NB_ROLE_USER, question, strlen(question)};
    char *text;
    size_t len;
    *ids = NULL;
    if (!e->tokenizer || !e->chat)
        return nbi_fail(NB_ENOTFOUND, "the model has no tokenizer, so it cannot talk");
    NBI_TRY(nb_chat_prompt(e->chat, &message, 1, false, &text, &len));
    enum nb_status rc = nb_tokenizer_encode(e->tokenizer, text, len, true, ids, count);
    free(text);
    return rc;
}

static const struct nb_sampling neutral = {.temperature = 1, .top_p = 1, .repeat_penalty = 1};

static enum nb_status parse_generation(struct nb_engine *e, const json_t *json)
{
    struct nb_sampling *d = &e->defaults;
    double k = 0;
    bool sample = true;
    NBI_TRY(nbi_json_bool(json, "do_sample", false, &sample));
    NBI_TRY(nbi_json_number(json, "temperature", false, 0, 100, &d->temperature));
    NBI_TRY(nbi_json_number(json, "top_p", false, 1e-9, 1, &d->top_p));
    NBI_TRY(nbi_json_number(json, "min_p", false, 0, 1, &d->min_p));
    NBI_TRY(nbi_json_number(json, "top_k", false, 0, 1e9, &k));
    NBI_TRY(nbi_json_number(json, "repetition_penalty", false, 1e-3, 1e3, &d->repeat_penalty));
    d->top_k = (int64_t)k;
    if (!sample)
        d->temperature = 0;
    return read_eos(e, json_object_get(json, "eos_token_id"));
}

/* Reads the sampling defaults and the end-of-turn ids. A model may have no such file. */
static enum nb_status read_generation(struct nb_engine *e, const char *dir)
{
    char *path = dir ? nbi_path_join(dir, "generation_config.json") : strdup("");
    json_t *json = NULL;
    e->defaults = neutral;
    if (!path)
        return NB_ENOMEM;
    enum nb_status rc = nbi_unless_absent(nbi_json_read_file(&json, path, NBI_CONFIG_FILE_MAX));
    if (rc == NB_OK && json)
        rc = nbi_context(parse_generation(e, json), "reading '%s'", path);
    json_decref(json);
    free(path);
    return rc;
}

static enum nb_status read_defaults(struct nb_engine *e, const char *dir)
{
    for (int i = 0; i < e->config.eos_count; i++)
        add_eos(e, e->config.eos[i]);
    return read_generation(e, dir);
}

enum nb_status nbi_engine_borrow(struct nb_engine *e, const struct nbi_engine_parts *p)
{
    *e = (struct nb_engine){.be = p->be,
                            .config = *p->config,
                            .weights = *p->weights,
                            .tokenizer = p->tokenizer,
                            .chat = p->chat,
                            .threads = p->threads};
    return read_defaults(e, p->dir);
}

static enum nb_status read_text(struct nb_engine *e, const struct nb_engine_opts *opts)
{
    enum nb_status rc = nb_tokenizer_open(&e->tokenizer, opts->model, opts->model_dir);
    if (rc == NB_ENOTFOUND)
        return NB_OK; /* such a model can still be measured and compared */
    NBI_TRY(rc);
    return nb_chat_open(&e->chat, opts->model, opts->model_dir);
}

/* Opens everything but the weights' values. */
static enum nb_status open_files(struct nb_engine *e, const struct nb_engine_opts *opts)
{
    NBI_TRY(nbi_model_open(&e->files, opts->model, opts->model_dir));
    NBI_TRY(nbi_model_need_config(&e->files));
    e->config = e->files.config;
    NBI_TRY(read_defaults(e, e->files.dir));
    return read_text(e, opts);
}

static enum nb_status open_engine(struct nb_engine *e, const struct nb_engine_opts *opts)
{
    struct nbi_backend_opts on = {.device = opts->device, .threads = opts->threads};
    uint64_t seed = 0;
    struct nbi_weight_provider from = nbi_weights_from_seed(&seed);
    NBI_TRY(nbi_simd_parse(opts->simd, &on.level));
    e->level = on.level;
    e->threads = on.threads > 0 ? on.threads : nbi_cpu_count();
    if (opts->synthetic || opts->config) {
        e->defaults = neutral;
        NBI_TRY(nbi_config_synthetic(&e->config, opts->synthetic, opts->config));
    } else {
        NBI_TRY(open_files(e, opts));
        from = nbi_weights_from_store(e->files.store);
    }
    NBI_TRY(nbi_backend_open(&e->be, &on));
    return nbi_weights_load(&e->weights, e->be, &e->config, &from, opts->progress,
                            opts->progress_ctx);
}

enum nb_status nb_engine_open(struct nb_engine **out, const struct nb_engine_opts *opts)
{
    NBI_SCOPED struct nb_cancel *before = nbi_cancel_enter(opts->cancel);
    struct nb_engine *e = calloc(1, sizeof *e);
    *out = NULL;
    enum nb_status rc = e ? open_engine(e, opts) : nbi_fail_memory("engine", sizeof *e);
    if (rc == NB_OK)
        *out = e;
    else
        nb_engine_close(e);
    return rc;
}

void nb_engine_close(struct nb_engine *e)
{
    if (!e)
        return;
    nbi_weights_release(&e->weights);
    if (e->be)
        e->be->close(e->be);
    nb_tokenizer_close(e->tokenizer);
    nb_chat_close(e->chat);
    nbi_model_close(&e->files);
    free(e);
}

void nb_engine_info(const struct nb_engine *e, struct nb_engine_info *info)
{
    *info = (struct nb_engine_info){.vocab = e->config.vocab_size,
                                    .context = e->config.max_position,
                                    .layers = e->config.layers,
                                    .bytes_per_token = e->weights.bytes_per_token,
                                    .threads = e->threads,
                                    .device = e->be->name,
                                    .simd = nbi_simd_name(e->level),
                                    .sampling = e->defaults};
    for (int64_t i = 0; i < nbi_param_count(&e->config); i++) {
        struct nbi_param p;
        nbi_param_at(&e->config, i, &p);
        info->parameters += nbi_param_values(&p);
    }
    const struct nbi_store *store = e->files.store;
    for (int64_t i = 0; store && i < store->count; i++)
        info->weight_bytes += (int64_t)nbi_entry_bytes(&store->entries[i]);
}

struct nb_tokenizer *nb_engine_tokenizer(const struct nb_engine *e)
{
    return e->tokenizer;
}

const struct nb_chat *nb_engine_chat(const struct nb_engine *e)
{
    return e->chat;
}
