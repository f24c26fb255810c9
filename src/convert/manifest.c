/* manifest.c - builds the list of an output's tensors. */
#include "convert/manifest.h"

#include <string.h>

#include "base/log.h"
#include "base/str.h"
#include "base/utf8.h"
#include "tensor/half.h"

/* The inputs of the choices below. */
struct builder {
    struct nbi_manifest *list;
    const struct nbi_model *model;
    enum nbi_format target;
    const struct nb_convert_opts *opts;
    const struct nb_quantize_opts *quant;
    json_t *original_types; /* GGUF name -> type before the conversion to f32 */
};

/* ---- which tensors are quantised ---- */

/* Whether text occurs in name as whole components between dots: "layers.1" in "model.layers.1.mlp",
 * but not in "model.layers.10.mlp". */
static bool has_components(const char *name, const char *text)
{
    size_t len = strlen(text);
    for (const char *at = strstr(name, text); len && at; at = strstr(at + 1, text))
        if ((at == name || at[-1] == '.') && (at[len] == 0 || at[len] == '.'))
            return true;
    return false;
}

/* A pattern with wildcards must match the whole name, with or without ".weight". */
static bool matches(const char *pattern, const char *name)
{
    char stem[1100];
    snprintf(stem, sizeof stem, "%.*s", (int)nbi_stem_length(name), name);
    return has_components(name, pattern) || nbi_wildcard_match(pattern, name) ||
           nbi_wildcard_match(pattern, stem);
}

static bool should_quantize(const struct builder *b, const char *name, const struct nbi_entry *e)
{
    if (!b->quant || e->dtype == NBI_NVFP4 || !nbi_param_is_projection(name, e->ndim))
        return false;
    for (const char *const *p = b->quant->skip; p && *p; p++)
        if (matches(*p, name))
            return false;
    return true;
}

/* A pattern that matches nothing is probably a typing error. */
static void warn_unused_patterns(const struct builder *b)
{
    for (const char *const *p = b->quant ? b->quant->skip : NULL; p && *p; p++) {
        bool used = matches(*p, nbi_head_name());
        for (int64_t i = 0; i < b->list->count && !used; i++) {
            NBI_BUG_IF(!b->list->entries[i].out.name);
            used = matches(*p, b->list->entries[i].out.name);
        }
        if (!used)
            nbi_log(NB_LOG_WARN, "--skip '%s' matches no tensor", *p);
    }
}

/* ---- types ---- */

struct name_collector {
    json_t *names;
    enum nbi_dtype dtype;
};

static enum nb_status collect_name(void *ctx, uint64_t i, const char *text, size_t len)
{
    struct name_collector *n = ctx;
    char name[128];
    bool ok = true;
    (void)i;
    if (len >= sizeof name || !nbi_utf8_valid(text, len))
        return NB_OK; /* no tensor has such a name */
    snprintf(name, sizeof name, "%.*s", (int)len, text);
    nbi_json_set(n->names, name, json_integer(n->dtype), &ok);
    return ok ? NB_OK : nbi_fail_memory("names", len);
}

/* Reads which f32 tensors of a GGUF had a smaller type before. */
static enum nb_status read_original_types(struct builder *b)
{
    static const struct {
        const char *key;
        enum nbi_dtype dtype;
    } keys[] = {{NBI_KEY_FROM_BF16, NBI_BF16}, {NBI_KEY_FROM_F16, NBI_F16}};
    const struct nbi_store *store = b->model->store;
    if (store->format != NBI_FORMAT_GGUF)
        return NB_OK;
    b->original_types = json_object();
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        struct name_collector n = {.names = b->original_types, .dtype = keys[i].dtype};
        if (nbi_gguf_find(store, keys[i].key))
            NBI_TRY(nbi_gguf_each_string(store, keys[i].key, collect_name, &n));
    }
    return NB_OK;
}

static bool is_exact_in(const float *x, int64_t n, enum nbi_dtype to)
{
    for (int64_t i = 0; i < n; i++) {
        float rounded = to == NBI_BF16 ? nbi_bf16_to_f32(nbi_f32_to_bf16(x[i]))
                                       : nbi_f16_to_f32(nbi_f32_to_f16(x[i]));
        if (nbi_f32_bits(rounded) != nbi_f32_bits(x[i]))
            return false;
    }
    return true;
}

/* The type that an f32 vector had before the conversion to GGUF, if its values still fit it. */
static enum nb_status original_dtype(const struct builder *b, const struct nbi_entry *e,
                                     enum nbi_dtype *dtype)
{
    char name[128];
    *dtype = e->dtype;
    if (!b->original_types || e->dtype != NBI_F32 || e->ndim != 1 ||
        !nbi_param_to_gguf(e->name, name, sizeof name))
        return NB_OK;
    const json_t *from = json_object_get(b->original_types, name);
    if (!from)
        return NB_OK;
    enum nbi_dtype original = (enum nbi_dtype)json_integer_value(from);
    float *x = malloc((size_t)e->count * sizeof *x + 1);
    if (!x)
        return nbi_fail_memory("tensor", (size_t)e->count * sizeof *x);
    enum nb_status rc = nbi_store_read_f32(b->model->store, e, 0, e->count, x);
    if (rc == NB_OK && is_exact_in(x, e->count, original))
        *dtype = original;
    free(x);
    return rc;
}

static enum nbi_dtype float_target(enum nb_out_dtype dtype, enum nbi_dtype keep)
{
    return dtype == NB_OUT_F32    ? NBI_F32
           : dtype == NB_OUT_F16  ? NBI_F16
           : dtype == NB_OUT_BF16 ? NBI_BF16
                                  : keep;
}

enum nbi_dtype nbi_float_dtype_for(enum nbi_format target, int ndim, enum nbi_dtype dtype)
{
    return target == NBI_FORMAT_GGUF && ndim == 1 ? NBI_F32 : dtype;
}

static enum nb_status choose_dtype(const struct builder *b, const struct nbi_entry *e,
                                   struct nbi_manifest_entry *item)
{
    enum nb_out_dtype wanted = b->opts->dtype;
    struct nbi_tensor_spec *out = &item->out;
    if (should_quantize(b, out->name, e)) {
        out->dtype = NBI_NVFP4;
        out->two_level = b->quant->two_level;
        return NB_OK;
    }
    if (e->dtype == NBI_NVFP4 && (wanted == NB_OUT_KEEP || b->quant)) {
        out->dtype = NBI_NVFP4;
        out->two_level = e->two_level;
        item->tensor_scale = e->tensor_scale;
        item->divisor = e->divisor;
        return NB_OK;
    }
    if (e->dtype == NBI_F64 && (wanted != NB_OUT_KEEP || b->target == NBI_FORMAT_GGUF))
        return nbi_fail(NB_EUNSUPPORTED, "tensor '%s' is f64, which is only copied, not converted",
                        e->name);
    NBI_TRY(original_dtype(b, e, &item->original_type));
    bool is_float = e->dtype == NBI_NVFP4 || nbi_dtype_is_float(e->dtype);
    out->dtype = e->dtype;
    if (is_float) /* GGUF metadata records the original types */
        out->dtype =
            nbi_float_dtype_for(b->target, out->ndim, float_target(wanted, item->original_type));
    return NB_OK;
}

static enum nb_status add_item(const struct builder *b, const char *name, const struct nbi_entry *e)
{
    struct nbi_manifest_entry *item = &b->list->entries[b->list->count];
    *item = (struct nbi_manifest_entry){
        .out = {.name = name, .ndim = e->ndim}, .src = e, .original_type = e->dtype, .amax = -1};
    memcpy(item->out.shape, e->shape, sizeof e->shape);
    NBI_TRY(choose_dtype(b, e, item));
    b->list->count++;
    return NB_OK;
}

/* ---- order ---- */

static int by_order(const void *a, const void *b)
{
    const struct nbi_manifest_entry *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

/* Sorts entries in the order of a `.dat`. Names unknown to the model come last, in their original
 * order. A file of the same format keeps its order. */
static void sort_items(const struct builder *b)
{
    struct nbi_manifest *list = b->list;
    const struct nbi_model *m = b->model;
    struct nbi_config inferred;
    const struct nbi_config *config = m->has_config ? &m->config : NULL;
    if (!config && nbi_config_infer(&inferred, m->store) == NB_OK)
        config = &inferred;
    bool keep = m->store->format == b->target && b->target != NBI_FORMAT_SAFETENSORS;
    for (int64_t i = 0; i < list->count; i++) {
        struct nbi_param p;
        bool known = config && !keep && nbi_param_find(config, list->entries[i].out.name, &p);
        list->entries[i].order = known ? p.index : INT32_MAX + i;
    }
    qsort(list->entries, (size_t)list->count, sizeof *list->entries, by_order);
}

/* ---- the list ---- */

static enum nb_status fill(struct builder *b)
{
    struct nbi_manifest *list = b->list;
    const struct nbi_store *store = b->model->store;
    list->store = store;
    list->entries = calloc((size_t)store->count + 1, sizeof *list->entries);
    list->where = calloc((size_t)store->count, sizeof *list->where);
    if (!list->entries || !list->where)
        return nbi_fail_memory("tensor list", (size_t)store->count * sizeof *list->entries);
    NBI_TRY(read_original_types(b));
    for (int64_t i = 0; i < store->count; i++)
        NBI_TRY(add_item(b, store->entries[i].name, &store->entries[i]));
    /* A quantised model has its own head, made from the embedding if the two were tied. */
    const struct nbi_entry *embed = nbi_store_find(store, nbi_embedding_name());
    bool tied = !b->model->has_config || b->model->config.tied;
    if (embed && tied && !nbi_store_find(store, nbi_head_name()) &&
        nbi_dtype_is_float(embed->dtype) && should_quantize(b, nbi_head_name(), embed))
        NBI_TRY(add_item(b, nbi_head_name(), embed));
    warn_unused_patterns(b);
    sort_items(b);
    for (int64_t i = 0; i < list->count; i++)
        if (list->entries[i].out.name == list->entries[i].src->name)
            list->where[list->entries[i].src - store->entries] = i;
    return NB_OK;
}

enum nb_status nbi_manifest_init(struct nbi_manifest *list, const struct nbi_model *m,
                                 enum nbi_format target, const struct nb_convert_opts *opts,
                                 const struct nb_quantize_opts *quant)
{
    struct builder b = {.list = list, .model = m, .target = target, .opts = opts, .quant = quant};
    memset(list, 0, sizeof *list);
    enum nb_status rc = fill(&b);
    json_decref(b.original_types);
    return rc;
}

void nbi_manifest_release(struct nbi_manifest *list)
{
    free(list->entries);
    free(list->where);
    memset(list, 0, sizeof *list);
}

bool nbi_manifest_quantized_here(const struct nbi_manifest_entry *item)
{
    return item->out.dtype == NBI_NVFP4 && item->src->dtype != NBI_NVFP4;
}

/* ---- fusion ---- */

int nbi_manifest_fused(struct nbi_manifest *list, struct nbi_manifest_entry *item,
                       struct nbi_manifest_entry *group[3])
{
    int64_t layer;
    int n = 0;
    const struct nbi_param_def *own = nbi_param_parse(item->out.name, &layer);
    for (int id = 0; own && own->fuse != NBI_FUSE_NONE && id < NBI_PARAM_ID_COUNT; id++) {
        char name[NBI_PARAM_NAME_MAX];
        if (nbi_param_defs[id].fuse != own->fuse)
            continue;
        nbi_param_name(name, (enum nbi_param_id)id, layer);
        const struct nbi_entry *e = nbi_store_find(list->store, name);
        if (e)
            group[n++] = &list->entries[list->where[e - list->store->entries]];
    }
    if (n == 0)
        group[n++] = item;
    return n;
}

void nbi_manifest_warn_unequal(struct nbi_manifest *list)
{
    for (int64_t i = 0; i < list->count; i++) {
        struct nbi_manifest_entry *group[3], *item = &list->entries[i];
        int n = nbi_manifest_fused(list, item, group);
        for (int k = 1; k < n && group[0] == item; k++) {
            const struct nbi_manifest_entry *other = group[k];
            if (item->out.dtype == other->out.dtype &&
                (item->out.dtype != NBI_NVFP4 || item->tensor_scale == other->tensor_scale))
                continue;
            nbi_log(NB_LOG_WARN,
                    "'%s' and '%s' differ in type or tensor scale; programs that fuse them (vLLM) "
                    "will compute wrong values",
                    item->out.name, other->out.name);
            return;
        }
    }
}
