/* config.c - reads model configs, checks them and writes them.
 *
 * The limits below keep products of sizes far from overflowing 64 bits. */
#include "model/config.h"

#include <math.h>
#include <string.h>

#include "base/str.h"
#include "model/params.h"

#define MAX_LAYERS   512
#define MAX_DIM      (1 << 20)
#define MAX_VOCAB    (1 << 22)
#define MAX_HEADS    1024
#define MAX_HEAD_DIM 1024
#define MAX_POSITION (1 << 24)

/* ---- checks for all sources ---- */

static enum nb_status validate(const struct nbi_config *c)
{
    if (c->heads % c->kv_heads != 0)
        return nbi_fail(NB_EFORMAT,
                        "%lld attention heads are not a multiple of %lld key/value heads",
                        (long long)c->heads, (long long)c->kv_heads);
    if (c->head_dim < 2 || c->head_dim > MAX_HEAD_DIM || c->head_dim % 2 != 0)
        return nbi_fail(NB_EFORMAT, "head_dim %lld is not an even number from 2 to %d",
                        (long long)c->head_dim, MAX_HEAD_DIM);
    if (c->heads * c->head_dim > MAX_DIM)
        return nbi_fail(NB_EFORMAT, "%lld heads of %lld are too wide", (long long)c->heads,
                        (long long)c->head_dim);
    const int64_t ids[] = {c->bos, c->pad};
    for (int i = 0; i < 2; i++)
        if (ids[i] >= c->vocab_size)
            return nbi_fail(NB_EFORMAT, "token id %lld is outside the vocabulary of %lld",
                            (long long)ids[i], (long long)c->vocab_size);
    for (int i = 0; i < c->eos_count; i++)
        if (c->eos[i] >= c->vocab_size)
            return nbi_fail(NB_EFORMAT, "eos_token_id %lld is outside the vocabulary of %lld",
                            (long long)c->eos[i], (long long)c->vocab_size);
    return NB_OK;
}

static void set_defaults(struct nbi_config *c)
{
    *c = (struct nbi_config){.head_dim = 128,
                             .max_position = 32768,
                             .rms_eps = 1e-6,
                             .rope_theta = 10000,
                             .initializer_range = 0.02,
                             .bos = -1,
                             .pad = -1};
}

/* ---- config.json ---- */

/* Fails unless the key is absent, null or false: nibble does not implement what it turns on. */
static enum nb_status require_off(const json_t *json, const char *key)
{
    const json_t *v = json_object_get(json, key);
    if (!v || json_is_null(v) || json_is_false(v))
        return NB_OK;
    return nbi_fail(NB_EUNSUPPORTED, "'%s' is set, which is not supported", key);
}

static enum nb_status check_architecture(const json_t *json)
{
    const char *type = NULL, *act = "silu";
    NBI_TRY(nbi_json_string(json, "model_type", true, &type));
    if (strcmp(type, "qwen3") != 0)
        return nbi_fail(NB_EUNSUPPORTED, "model_type '%s' is not supported; dense 'qwen3' is",
                        type);
    NBI_TRY(nbi_json_string(json, "hidden_act", false, &act));
    if (strcmp(act, "silu") != 0)
        return nbi_fail(NB_EUNSUPPORTED, "hidden_act '%s' is not supported; 'silu' is", act);
    NBI_TRY(require_off(json, "attention_bias"));
    NBI_TRY(require_off(json, "use_sliding_window"));
    return NB_OK;
}

static enum nb_status check_layer_types(const json_t *json, int64_t layers)
{
    const json_t *types = json_object_get(json, "layer_types");
    size_t i;
    json_t *t;
    if (!types || json_is_null(types))
        return NB_OK;
    if (!json_is_array(types) || json_array_size(types) != (size_t)layers)
        return nbi_fail(NB_EFORMAT, "'layer_types' must be a list of %lld", (long long)layers);
    json_array_foreach (types, i, t)
        if (!json_is_string(t) || strcmp(json_string_value(t), "full_attention") != 0)
            return nbi_fail(NB_EUNSUPPORTED, "layer_types: layer %zu is not 'full_attention'", i);
    return NB_OK;
}

/* Fails unless a number has its default value, the only one that nibble implements. */
static enum nb_status require_default(const json_t *json, const char *key, double value)
{
    double v = value;
    NBI_TRY(nbi_json_number(json, key, false, -1e300, 1e300, &v));
    if (v != value)
        return nbi_fail(NB_EUNSUPPORTED, "'%s' is %g; only %g is supported", key, v, value);
    return NB_OK;
}

/* Reads rope_scaling (older files) or rope_parameters (newer ones, with rope_theta in it). */
static enum nb_status parse_rope(struct nbi_config *c, const json_t *json)
{
    const json_t *rope = json_object_get(json, "rope_parameters");
    if (!rope || json_is_null(rope))
        rope = json_object_get(json, "rope_scaling");
    NBI_TRY(nbi_json_number(json, "rope_theta", false, 1, 1e12, &c->rope_theta));
    if (!rope || json_is_null(rope))
        return NB_OK;
    if (!json_is_object(rope))
        return nbi_fail(NB_EFORMAT, "'rope_scaling' must be an object");
    NBI_TRY(nbi_json_number(rope, "rope_theta", false, 1, 1e12, &c->rope_theta));
    const char *type = "default";
    NBI_TRY(require_default(rope, "partial_rotary_factor", 1));
    NBI_TRY(nbi_json_string(rope, "type", false, &type));
    NBI_TRY(nbi_json_string(rope, "rope_type", false, &type));
    if (strcmp(type, "default") == 0)
        return NB_OK;
    if (strcmp(type, "yarn") != 0)
        return nbi_fail(NB_EUNSUPPORTED, "rope scaling '%s' is not supported; 'yarn' is", type);
    NBI_TRY(require_default(rope, "beta_fast", 32));
    NBI_TRY(require_default(rope, "beta_slow", 1));
    NBI_TRY(require_off(rope, "attention_factor"));
    NBI_TRY(nbi_json_number(rope, "factor", true, 1, 1024, &c->yarn_factor));
    c->yarn_original = c->max_position;
    return nbi_json_int(rope, "original_max_position_embeddings", false, 1, MAX_POSITION,
                        &c->yarn_original);
}

/* eos_token_id is an id, a list of ids, or absent. */
static enum nb_status parse_eos(struct nbi_config *c, const json_t *json)
{
    const json_t *v = json_object_get(json, "eos_token_id");
    if (!json_is_array(v)) {
        int64_t id = -1;
        NBI_TRY(nbi_json_int(json, "eos_token_id", false, 0, MAX_VOCAB, &id));
        if (id >= 0)
            c->eos[c->eos_count++] = id;
        return NB_OK;
    }
    size_t i;
    json_t *id;
    if (json_array_size(v) > NBI_MAX_EOS)
        return nbi_fail(NB_EFORMAT, "'eos_token_id' lists more than %d ids", NBI_MAX_EOS);
    json_array_foreach (v, i, id) {
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return nbi_fail(NB_EFORMAT, "'eos_token_id' must hold whole numbers");
        c->eos[c->eos_count++] = json_integer_value(id);
    }
    return NB_OK;
}

enum nb_status nbi_config_parse(struct nbi_config *c, const json_t *json)
{
    set_defaults(c);
    if (!json_is_object(json))
        return nbi_fail(NB_EFORMAT, "the config is not a JSON object");
    NBI_TRY(check_architecture(json));
    NBI_TRY(nbi_json_int(json, "vocab_size", true, 1, MAX_VOCAB, &c->vocab_size));
    NBI_TRY(nbi_json_int(json, "hidden_size", true, 1, MAX_DIM, &c->hidden_size));
    NBI_TRY(nbi_json_int(json, "intermediate_size", true, 1, MAX_DIM, &c->intermediate_size));
    NBI_TRY(nbi_json_int(json, "num_hidden_layers", true, 1, MAX_LAYERS, &c->layers));
    NBI_TRY(nbi_json_int(json, "num_attention_heads", true, 1, MAX_HEADS, &c->heads));
    NBI_TRY(check_layer_types(json, c->layers));
    c->kv_heads = c->heads;
    NBI_TRY(nbi_json_int(json, "num_key_value_heads", false, 1, MAX_HEADS, &c->kv_heads));
    NBI_TRY(nbi_json_int(json, "head_dim", false, 2, MAX_HEAD_DIM, &c->head_dim));
    NBI_TRY(
        nbi_json_int(json, "max_position_embeddings", false, 1, MAX_POSITION, &c->max_position));
    NBI_TRY(nbi_json_number(json, "rms_norm_eps", false, 1e-30, 0.1, &c->rms_eps));
    NBI_TRY(nbi_json_number(json, "initializer_range", false, 0, 10, &c->initializer_range));
    NBI_TRY(nbi_json_bool(json, "tie_word_embeddings", false, &c->tied));
    NBI_TRY(parse_rope(c, json));
    NBI_TRY(nbi_json_int(json, "bos_token_id", false, 0, MAX_VOCAB, &c->bos));
    NBI_TRY(nbi_json_int(json, "pad_token_id", false, 0, MAX_VOCAB, &c->pad));
    NBI_TRY(parse_eos(c, json));
    return validate(c);
}

static json_t *eos_json(const struct nbi_config *c)
{
    if (c->eos_count == 0)
        return json_null();
    if (c->eos_count == 1)
        return json_integer(c->eos[0]);
    json_t *list = json_array();
    bool ok = true;
    for (int i = 0; i < c->eos_count; i++)
        nbi_json_append(list, json_integer(c->eos[i]), &ok);
    if (!ok) {
        json_decref(list);
        return NULL; /* json_pack() then fails as well */
    }
    return list;
}

enum nb_status nbi_config_to_json(const struct nbi_config *c, json_t **out)
{
    json_t *scaling =
        c->yarn_factor > 0
            ? json_pack("{s:s,s:f,s:I}", "rope_type", "yarn", "factor", c->yarn_factor,
                        "original_max_position_embeddings", (json_int_t)c->yarn_original)
            : json_null();
    *out = json_pack(
        "{s:[s],s:s,s:b,s:f,s:o,s:I,s:s,s:I,s:f,s:I,s:I,s:I,s:I,s:I,s:f,s:o,s:f,s:b,s:b,s:I}",
        "architectures", "Qwen3ForCausalLM", "model_type", "qwen3", "attention_bias", 0,
        "attention_dropout", 0.0, "eos_token_id", eos_json(c), "head_dim", (json_int_t)c->head_dim,
        "hidden_act", "silu", "hidden_size", (json_int_t)c->hidden_size, "initializer_range",
        c->initializer_range, "intermediate_size", (json_int_t)c->intermediate_size,
        "max_position_embeddings", (json_int_t)c->max_position, "num_attention_heads",
        (json_int_t)c->heads, "num_hidden_layers", (json_int_t)c->layers, "num_key_value_heads",
        (json_int_t)c->kv_heads, "rms_norm_eps", c->rms_eps, "rope_scaling", scaling, "rope_theta",
        c->rope_theta, "tie_word_embeddings", c->tied, "use_cache", 1, "vocab_size",
        (json_int_t)c->vocab_size);
    if (!*out)
        return nbi_fail_memory("config", 0);
    bool ok = true;
    if (c->bos >= 0)
        nbi_json_set(*out, "bos_token_id", json_integer(c->bos), &ok);
    if (c->pad >= 0)
        nbi_json_set(*out, "pad_token_id", json_integer(c->pad), &ok);
    if (ok)
        return NB_OK;
    json_decref(*out);
    *out = NULL;
    return nbi_fail_memory("config", 0);
}

/* ---- GGUF ---- */

/* The shortest decimal that rounds to a stored f32: 1e-6, not 9.9999999747e-07. */
static double shortest(double stored)
{
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, stored);
        if (strtof(text, NULL) == (float)stored)
            break;
    }
    return strtod(text, NULL);
}

static enum nb_status gguf_float(const struct nbi_store *store, const char *key, double min,
                                 double max, double *v)
{
    double f;
    NBI_TRY(nbi_gguf_float(store, key, &f));
    if (!(f >= min && f <= max))
        return nbi_fail(NB_EFORMAT, "metadata '%s' is %g, outside %g to %g", key, f, min, max);
    *v = shortest(f);
    return NB_OK;
}

#define GGUF_ROPE_TYPE    "qwen3.rope.scaling.type"
#define GGUF_ROPE_FACTOR  "qwen3.rope.scaling.factor"
#define GGUF_ROPE_CONTEXT "qwen3.rope.scaling.original_context_length"

static enum nb_status gguf_rope_scaling(struct nbi_config *c, const struct nbi_store *store)
{
    char *type = NULL;
    enum nb_status rc = nbi_gguf_string(store, GGUF_ROPE_TYPE, &type);
    if (rc != NB_OK)
        return nbi_unless_absent(rc);
    if (strcmp(type, "none") == 0)
        rc = NB_OK;
    else if (strcmp(type, "yarn") != 0)
        rc = nbi_fail(NB_EUNSUPPORTED, "rope scaling '%s' is not supported; 'yarn' is", type);
    else {
        c->yarn_original = c->max_position;
        rc = gguf_float(store, GGUF_ROPE_FACTOR, 1, 1024, &c->yarn_factor);
        if (rc == NB_OK)
            rc = nbi_unless_absent(
                nbi_gguf_int(store, GGUF_ROPE_CONTEXT, 1, MAX_POSITION, &c->yarn_original));
    }
    free(type);
    return rc;
}

static enum nb_status gguf_tokens(struct nbi_config *c, const struct nbi_store *store)
{
    int64_t eos = -1;
    NBI_TRY(
        nbi_unless_absent(nbi_gguf_int(store, "tokenizer.ggml.eos_token_id", 0, MAX_VOCAB, &eos)));
    NBI_TRY(nbi_unless_absent(
        nbi_gguf_int(store, "tokenizer.ggml.bos_token_id", 0, MAX_VOCAB, &c->bos)));
    NBI_TRY(nbi_unless_absent(
        nbi_gguf_int(store, "tokenizer.ggml.padding_token_id", 0, MAX_VOCAB, &c->pad)));
    if (eos >= 0)
        c->eos[c->eos_count++] = eos;
    return NB_OK;
}

/* WRITE_ONLY: other programs read it, and nibble does not. */
enum presence { REQUIRED, OPTIONAL, WRITE_ONLY };

/* The metadata keys of a config, in the order in which they are written. */
static const struct {
    const char *key;
    size_t field; /* of struct nbi_config, an int64_t or a double */
    enum presence presence;
    bool is_float;
    double min, max;
} gguf_keys[] = {
#define AT(field) offsetof(struct nbi_config, field)
    {"qwen3.context_length", AT(max_position), REQUIRED, false, 1, MAX_POSITION},
    {"qwen3.embedding_length", AT(hidden_size), REQUIRED, false, 1, MAX_DIM},
    {"qwen3.block_count", AT(layers), REQUIRED, false, 1, MAX_LAYERS},
    {"qwen3.feed_forward_length", AT(intermediate_size), REQUIRED, false, 1, MAX_DIM},
    {"qwen3.attention.head_count", AT(heads), REQUIRED, false, 1, MAX_HEADS},
    {"qwen3.attention.head_count_kv", AT(kv_heads), OPTIONAL, false, 1, MAX_HEADS},
    {"qwen3.attention.key_length", AT(head_dim), OPTIONAL, false, 2, MAX_HEAD_DIM},
    {"qwen3.attention.value_length", AT(head_dim), WRITE_ONLY, false, 0, 0},
    {"qwen3.attention.layer_norm_rms_epsilon", AT(rms_eps), REQUIRED, true, 1e-30, 0.1},
    {"qwen3.rope.freq_base", AT(rope_theta), OPTIONAL, true, 1, 1e12},
#undef AT
};

#define GGUF_KEYS (sizeof gguf_keys / sizeof *gguf_keys)

enum nb_status nbi_config_knows_gguf(const struct nbi_store *store, bool *known)
{
    char *arch = NULL;
    enum nb_status rc = nbi_gguf_string(store, NBI_GGUF_ARCHITECTURE_KEY, &arch);
    *known = rc == NB_OK && strcmp(arch, NBI_GGUF_ARCHITECTURE) == 0;
    free(arch);
    return rc == NB_EFORMAT ? NB_OK
                            : nbi_unless_absent(rc); /* not a string: another kind of file */
}

static enum nb_status check_gguf_architecture(const struct nbi_store *store)
{
    char *arch = NULL;
    NBI_TRY(nbi_gguf_string(store, NBI_GGUF_ARCHITECTURE_KEY, &arch));
    enum nb_status rc =
        strcmp(arch, NBI_GGUF_ARCHITECTURE) == 0
            ? NB_OK
            : nbi_fail(NB_EUNSUPPORTED, "architecture '%s' is not supported; '%s' is", arch,
                       NBI_GGUF_ARCHITECTURE);
    free(arch);
    return rc;
}

static enum nb_status read_gguf_sizes(struct nbi_config *c, const struct nbi_store *store)
{
    for (size_t i = 0; i < GGUF_KEYS; i++) {
        if (gguf_keys[i].presence == WRITE_ONLY)
            continue;
        void *field = (char *)c + gguf_keys[i].field;
        enum nb_status rc =
            gguf_keys[i].is_float
                ? gguf_float(store, gguf_keys[i].key, gguf_keys[i].min, gguf_keys[i].max, field)
                : nbi_gguf_int(store, gguf_keys[i].key, (int64_t)gguf_keys[i].min,
                               (int64_t)gguf_keys[i].max, field);
        NBI_TRY(gguf_keys[i].presence == OPTIONAL ? nbi_unless_absent(rc) : rc);
    }
    return NB_OK;
}

enum nb_status nbi_config_from_gguf(struct nbi_config *c, const struct nbi_store *s)
{
    set_defaults(c);
    c->head_dim = 0; /* like kv_heads: 0 means that the key was absent */
    NBI_TRY(check_gguf_architecture(s));
    NBI_TRY(read_gguf_sizes(c, s));
    if (c->kv_heads == 0)
        c->kv_heads = c->heads;
    if (c->head_dim == 0)
        c->head_dim = c->hidden_size / c->heads;
    NBI_TRY(gguf_rope_scaling(c, s));
    NBI_TRY(gguf_tokens(c, s));
    const struct nbi_entry *embed = nbi_store_find(s, nbi_embedding_name());
    if (!embed || embed->ndim != 2 || embed->shape[0] < 1 || embed->shape[0] > MAX_VOCAB)
        return nbi_fail(NB_EFORMAT, "'%s' is missing or has no vocabulary",
                        nbi_param_defs[NBI_PARAM_embed].gguf);
    c->vocab_size = embed->shape[0];
    c->tied = nbi_store_find(s, nbi_head_name()) == NULL;
    return validate(c);
}

void nbi_config_to_gguf(const struct nbi_config *c, struct nbi_gguf_meta *meta)
{
    for (size_t i = 0; i < GGUF_KEYS; i++) {
        const void *field = (const char *)c + gguf_keys[i].field;
        if (gguf_keys[i].is_float)
            nbi_gguf_meta_f32(meta, gguf_keys[i].key, (float)*(const double *)field);
        else
            nbi_gguf_meta_u32(meta, gguf_keys[i].key, (uint32_t) * (const int64_t *)field);
    }
    if (c->yarn_factor > 0) {
        nbi_gguf_meta_string(meta, GGUF_ROPE_TYPE, "yarn");
        nbi_gguf_meta_f32(meta, GGUF_ROPE_FACTOR, (float)c->yarn_factor);
        nbi_gguf_meta_u32(meta, GGUF_ROPE_CONTEXT, (uint32_t)c->yarn_original);
    }
}

/* ---- from shapes ---- */

/* A dimension of a parameter, in layer 0 if it belongs to a layer. */
static enum nb_status dim_of(const struct nbi_store *store, enum nbi_param_id id, int axis,
                             int64_t max, int64_t *v)
{
    char name[NBI_PARAM_NAME_MAX];
    nbi_param_name(name, id, 0);
    const struct nbi_entry *e = nbi_store_find(store, name);
    int ndim = nbi_param_defs[id].cols == NBI_DIM_NONE ? 1 : 2;
    if (!e)
        return nbi_fail(NB_EFORMAT, "tensor '%s' is missing", name);
    if (e->ndim != ndim || e->shape[axis] < 1 || e->shape[axis] > max)
        return nbi_fail(NB_EFORMAT, "tensor '%s' does not have the shape of a Qwen3's", name);
    *v = e->shape[axis];
    return NB_OK;
}

enum nb_status nbi_config_infer(struct nbi_config *c, const struct nbi_store *store)
{
    int64_t q, kv;
    set_defaults(c);
    NBI_TRY(dim_of(store, NBI_PARAM_embed, 0, MAX_VOCAB, &c->vocab_size));
    NBI_TRY(dim_of(store, NBI_PARAM_embed, 1, MAX_DIM, &c->hidden_size));
    NBI_TRY(dim_of(store, NBI_PARAM_q_norm, 0, MAX_HEAD_DIM, &c->head_dim));
    NBI_TRY(dim_of(store, NBI_PARAM_q, 0, MAX_DIM, &q));
    NBI_TRY(dim_of(store, NBI_PARAM_k, 0, MAX_DIM, &kv));
    NBI_TRY(dim_of(store, NBI_PARAM_up, 0, MAX_DIM, &c->intermediate_size));
    c->heads = q / c->head_dim;
    c->kv_heads = kv / c->head_dim;
    if (c->heads < 1 || c->kv_heads < 1 || q % c->head_dim || kv % c->head_dim)
        return nbi_fail(NB_EFORMAT,
                        "projections of %lld and %lld rows do not divide into heads "
                        "of %lld",
                        (long long)q, (long long)kv, (long long)c->head_dim);
    char name[NBI_PARAM_NAME_MAX];
    do {
        nbi_param_name(name, NBI_PARAM_input_norm, ++c->layers);
    } while (c->layers < MAX_LAYERS && nbi_store_find(store, name));
    c->tied = nbi_store_find(store, nbi_head_name()) == NULL;
    return validate(c);
}

/* ---- presets ---- */

enum nb_status nbi_config_preset(struct nbi_config *c, const char *name)
{
    static const char *const names[] = {NB_PRESET_LIST(NB_ENUM_NAME)};
    static const struct {
        int64_t hidden, ffn, layers, heads, kv_heads, head_dim, vocab;
        bool tied;
    } presets[] = {
        [NB_PRESET_TINY] = {128, 384, 4, 4, 2, 64, 2048, true},
        [NB_PRESET_0_6B] = {1024, 3072, 28, 16, 8, 128, 151936, true},
        [NB_PRESET_1_7B] = {2048, 6144, 28, 16, 8, 128, 151936, true},
        [NB_PRESET_4B] = {2560, 9728, 36, 32, 8, 128, 151936, true},
        [NB_PRESET_8B] = {4096, 12288, 36, 32, 8, 128, 151936, false},
        [NB_PRESET_14B] = {5120, 17408, 40, 40, 8, 128, 151936, false},
        [NB_PRESET_32B] = {5120, 25600, 64, 64, 8, 128, 151936, false},
    };
    set_defaults(c);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], name) != 0)
            continue;
        c->hidden_size = presets[i].hidden;
        c->intermediate_size = presets[i].ffn;
        c->layers = presets[i].layers;
        c->heads = presets[i].heads;
        c->kv_heads = presets[i].kv_heads;
        c->head_dim = presets[i].head_dim;
        c->vocab_size = presets[i].vocab;
        c->tied = presets[i].tied;
        c->max_position = 40960;
        c->rope_theta = 1e6;
        return NB_OK;
    }
#define X(id, text) " " text
    return nbi_fail(NB_EINVAL, "there is no size '%s', only" NB_PRESET_LIST(X), name);
#undef X
}

enum nb_status nbi_config_synthetic(struct nbi_config *c, const char *size, const char *path)
{
    json_t *json = NULL;
    if (!path)
        return nbi_config_preset(c, size);
    NBI_TRY(nbi_json_read_file(&json, path, NBI_CONFIG_FILE_MAX));
    enum nb_status rc = nbi_config_parse(c, json);
    json_decref(json);
    return nbi_context(rc, "reading '%s'", path);
}
