/* params.c - the table of parameters, and the names, shapes and addresses made from it. */
#include "model/params.h"

#include <string.h>

#include "base/str.h"
#include "model/weights.h"

#define LAYER_PREFIX      "model.layers."
#define GGUF_LAYER_PREFIX "blk."

#define ROW(field, name, gguf, rows, cols, fuse, when, flags, of_layer, weights, grads)            \
    {                                                                                              \
        name, gguf, of_layer, NBI_DIM_##rows, NBI_DIM_##cols, NBI_FUSE_##fuse, NBI_WHEN_##when,    \
            flags, offsetof(struct weights, field), offsetof(struct grads, field)                  \
    }
#define OF_MODEL(field, name, gguf, rows, cols, fuse, when, flags)                                 \
    ROW(field, name, gguf, rows, cols, fuse, when, flags, false, nbi_weights, nbi_grads),
#define OF_LAYER(field, name, gguf, rows, cols, fuse, when, flags)                                 \
    ROW(field, name, gguf, rows, cols, fuse, when, flags, true, nbi_layer_weights, nbi_layer_grads),

const struct nbi_param_def nbi_param_defs[NBI_PARAM_ID_COUNT] = {
    NBI_PARAMS_BEFORE(OF_MODEL) NBI_PARAMS_OF_LAYER(OF_LAYER) NBI_PARAMS_AFTER(OF_MODEL)};

/* Rows [FIRST_OF_LAYER, FIRST_AFTER) are those of a layer. */
#define ONE(...)       +1
#define FIRST_OF_LAYER (0 NBI_PARAMS_BEFORE(ONE))
#define FIRST_AFTER    (FIRST_OF_LAYER NBI_PARAMS_OF_LAYER(ONE))

_Static_assert(sizeof(struct nbi_layer_weights) ==
                   (FIRST_AFTER - FIRST_OF_LAYER) * sizeof(struct nbi_weight),
               "every field of nbi_layer_weights is a row of the table");

/* ---- the parameters of a model ---- */

static bool model_has(const struct nbi_config *c, int id)
{
    switch (nbi_param_defs[id].when) {
    case NBI_WHEN_ALWAYS:
        return true;
    case NBI_WHEN_UNTIED:
        return !c->tied;
    }
    return false;
}

/* How many of the rows [first, end) the model has. */
static int64_t count_rows(const struct nbi_config *c, int first, int end)
{
    int64_t n = 0;
    for (int id = first; id < end; id++)
        n += model_has(c, id);
    return n;
}

/* Of the rows from `first` on that the model has, number n, counted from 0. */
static int nth_row(const struct nbi_config *c, int first, int64_t n)
{
    int id = first;
    while (!model_has(c, id) || n-- > 0)
        id++;
    NBI_BUG_IF(id >= NBI_PARAM_ID_COUNT);
    return id;
}

static int64_t size_of(const struct nbi_config *c, enum nbi_dim d)
{
    switch (d) {
    case NBI_DIM_VOCAB:
        return c->vocab_size;
    case NBI_DIM_HIDDEN:
        return c->hidden_size;
    case NBI_DIM_FFN:
        return c->intermediate_size;
    case NBI_DIM_Q:
        return c->heads * c->head_dim;
    case NBI_DIM_KV:
        return c->kv_heads * c->head_dim;
    case NBI_DIM_HEAD:
        return c->head_dim;
    case NBI_DIM_NONE:
        break;
    }
    return 0;
}

static void describe(const struct nbi_config *c, int id, int64_t layer, int64_t index,
                     struct nbi_param *p)
{
    const struct nbi_param_def *def = &nbi_param_defs[id];
    *p = (struct nbi_param){.ndim = def->cols == NBI_DIM_NONE ? 1 : 2,
                            .shape = {size_of(c, def->rows), size_of(c, def->cols)},
                            .layer = layer,
                            .index = index,
                            .def = def};
    nbi_param_name(p->name, (enum nbi_param_id)id, layer);
}

int64_t nbi_params_per_layer(const struct nbi_config *c)
{
    return count_rows(c, FIRST_OF_LAYER, FIRST_AFTER);
}

int64_t nbi_param_count(const struct nbi_config *c)
{
    return count_rows(c, 0, FIRST_OF_LAYER) + c->layers * nbi_params_per_layer(c) +
           count_rows(c, FIRST_AFTER, NBI_PARAM_ID_COUNT);
}

void nbi_param_at(const struct nbi_config *c, int64_t index, struct nbi_param *p)
{
    int64_t before = count_rows(c, 0, FIRST_OF_LAYER), per_layer = nbi_params_per_layer(c);
    int64_t after = before + c->layers * per_layer;
    if (index >= nbi_param_count(c))
        nbi_param_head(c, p);
    else if (index < before)
        describe(c, nth_row(c, 0, index), -1, index, p);
    else if (index < after)
        describe(c, nth_row(c, FIRST_OF_LAYER, (index - before) % per_layer),
                 (index - before) / per_layer, index, p);
    else
        describe(c, nth_row(c, FIRST_AFTER, index - after), -1, index, p);
}

void nbi_param_head(const struct nbi_config *c, struct nbi_param *p)
{
    describe(c, NBI_PARAM_head, -1, nbi_param_count(c) - !c->tied, p);
}

bool nbi_param_find(const struct nbi_config *c, const char *name, struct nbi_param *p)
{
    int64_t layer, index;
    const struct nbi_param_def *def = nbi_param_parse(name, &layer);
    int id = (int)(def - nbi_param_defs);
    if (!def || layer >= c->layers || (!model_has(c, id) && id != NBI_PARAM_head))
        return false;
    if (id < FIRST_OF_LAYER)
        index = count_rows(c, 0, id);
    else if (id < FIRST_AFTER)
        index = count_rows(c, 0, FIRST_OF_LAYER) + layer * nbi_params_per_layer(c) +
                count_rows(c, FIRST_OF_LAYER, id);
    else
        index = count_rows(c, 0, FIRST_OF_LAYER) + c->layers * nbi_params_per_layer(c) +
                count_rows(c, FIRST_AFTER, id);
    describe(c, id, layer, index, p);
    return true;
}

int64_t nbi_param_values(const struct nbi_param *p)
{
    return p->shape[0] * (p->ndim == 2 ? p->shape[1] : 1);
}

bool nbi_param_fits(const struct nbi_param *p, const struct nbi_entry *e)
{
    return e->ndim == p->ndim && e->shape[0] == p->shape[0] &&
           (p->ndim == 1 || e->shape[1] == p->shape[1]);
}

/* ---- names ---- */

void nbi_param_name(char name[NBI_PARAM_NAME_MAX], enum nbi_param_id id, int64_t layer)
{
    if (nbi_param_defs[id].of_layer)
        snprintf(name, NBI_PARAM_NAME_MAX, LAYER_PREFIX "%lld.%s", (long long)layer,
                 nbi_param_defs[id].name);
    else
        snprintf(name, NBI_PARAM_NAME_MAX, "%s", nbi_param_defs[id].name);
}

/* Splits "PREFIX<number>.REST". Leading zeros are refused, so that each layer has only one name. */
static bool split_layer(const char *name, const char *prefix, int64_t *layer, const char **rest)
{
    if (!nbi_starts_with(name, prefix))
        return false;
    const char *digits = name + strlen(prefix);
    size_t n = strspn(digits, "0123456789");
    if (n == 0 || n > 4 || (n > 1 && digits[0] == '0') || digits[n] != '.')
        return false;
    *layer = strtol(digits, NULL, 10);
    *rest = digits + n + 1;
    return true;
}

static const struct nbi_param_def *parse(const char *name, bool gguf, int64_t *layer)
{
    const char *rest = name;
    *layer = -1;
    bool of_layer = split_layer(name, gguf ? GGUF_LAYER_PREFIX : LAYER_PREFIX, layer, &rest);
    for (int id = 0; id < NBI_PARAM_ID_COUNT; id++) {
        const struct nbi_param_def *def = &nbi_param_defs[id];
        if (def->of_layer == of_layer && strcmp(rest, gguf ? def->gguf : def->name) == 0)
            return def;
    }
    return NULL;
}

const struct nbi_param_def *nbi_param_parse(const char *name, int64_t *layer)
{
    return parse(name, false, layer);
}

bool nbi_param_to_gguf(const char *name, char *out, size_t size)
{
    int64_t layer;
    const struct nbi_param_def *def = parse(name, false, &layer);
    if (def && def->of_layer)
        snprintf(out, size, GGUF_LAYER_PREFIX "%lld.%s", (long long)layer, def->gguf);
    else if (def)
        snprintf(out, size, "%s", def->gguf);
    return def;
}

bool nbi_param_from_gguf(const char *gguf, char *out, size_t size)
{
    int64_t layer;
    const struct nbi_param_def *def = parse(gguf, true, &layer);
    if (def && def->of_layer)
        snprintf(out, size, LAYER_PREFIX "%lld.%s", (long long)layer, def->name);
    else if (def)
        snprintf(out, size, "%s", def->name);
    return def;
}

/* ---- projections ---- */

void nbi_param_family(const char *name, char family[NBI_PARAM_FAMILY_MAX])
{
    int64_t layer;
    const struct nbi_param_def *def = parse(name, false, &layer);
    if (!def || !(def->flags & NBI_QUANT)) {
        snprintf(family, NBI_PARAM_FAMILY_MAX, "other");
        return;
    }
    const char *end = strrchr(def->name, '.'), *start = end;
    while (start > def->name && start[-1] != '.')
        start--;
    snprintf(family, NBI_PARAM_FAMILY_MAX, "%.*s", (int)(end - start), start);
}

bool nbi_param_is_projection(const char *name, int ndim)
{
    int64_t layer;
    const struct nbi_param_def *def = parse(name, false, &layer);
    return def && def->flags & NBI_QUANT && ndim == 2;
}

/* ---- weights and gradients ---- */

struct nbi_weight *nbi_param_weight(const struct nbi_weights *w, const struct nbi_param *p)
{
    const void *base = p->def->of_layer ? (const void *)&w->layers[p->layer] : w;
    return (struct nbi_weight *)((uintptr_t)base + p->def->weight);
}

struct nbi_ptr *nbi_param_grad(const struct nbi_grads *g, const struct nbi_param *p)
{
    const void *base = p->def->of_layer ? (const void *)&g->layers[p->layer] : g;
    return (struct nbi_ptr *)((uintptr_t)base + p->def->grad);
}
