/* params.c - the list of a Qwen3's parameters: names, shapes, order. */
#include <string.h>

#include "base/str.h"
#include "model/config.h"

#define EMBEDDING "model.embed_tokens.weight"

/* Dimensions by letter: rows and columns of a weight; a norm has rows only. */
enum dim { NONE, HIDDEN, FFN, QUERY, KEY_VALUE, HEAD };

static const struct {
    const char *name;
    enum dim rows, cols;
} layer_params[] = {
    {"self_attn.q_proj.weight", QUERY, HIDDEN},
    {"self_attn.k_proj.weight", KEY_VALUE, HIDDEN},
    {"self_attn.v_proj.weight", KEY_VALUE, HIDDEN},
    {"self_attn.o_proj.weight", HIDDEN, QUERY},
    {"self_attn.q_norm.weight", HEAD, NONE},
    {"self_attn.k_norm.weight", HEAD, NONE},
    {"mlp.gate_proj.weight", FFN, HIDDEN},
    {"mlp.up_proj.weight", FFN, HIDDEN},
    {"mlp.down_proj.weight", HIDDEN, FFN},
    {"input_layernorm.weight", HIDDEN, NONE},
    {"post_attention_layernorm.weight", HIDDEN, NONE},
};

#define PER_LAYER ((int64_t)(sizeof layer_params / sizeof *layer_params))

static int64_t dim_size(const struct nbi_config *c, enum dim d)
{
    switch (d) {
    case HIDDEN:
        return c->hidden_size;
    case FFN:
        return c->intermediate_size;
    case QUERY:
        return c->heads * c->head_dim;
    case KEY_VALUE:
        return c->kv_heads * c->head_dim;
    case HEAD:
        return c->head_dim;
    case NONE:
        break;
    }
    return 0;
}

int64_t nbi_param_count(const struct nbi_config *c)
{
    return 1 + c->layers * PER_LAYER + 1 + (c->tied ? 0 : 1);
}

void nbi_param_at(const struct nbi_config *c, int64_t index, struct nbi_param *p)
{
    int64_t last = 1 + c->layers * PER_LAYER;
    if (index >= 1 && index < last) {
        int64_t layer = (index - 1) / PER_LAYER, i = (index - 1) % PER_LAYER;
        snprintf(p->name, sizeof p->name, "model.layers.%lld.%s", (long long)layer,
                 layer_params[i].name);
        p->ndim = layer_params[i].cols == NONE ? 1 : 2;
        p->shape[0] = dim_size(c, layer_params[i].rows);
        p->shape[1] = dim_size(c, layer_params[i].cols);
    } else if (index == last) {
        *p = (struct nbi_param){"model.norm.weight", 1, {c->hidden_size, 0}};
    } else {
        *p = (struct nbi_param){"", 2, {c->vocab_size, c->hidden_size}};
        snprintf(p->name, sizeof p->name, "%s", index == 0 ? EMBEDDING : "lm_head.weight");
    }
}

bool nbi_param_is_embedding(const char *name)
{
    return strcmp(name, EMBEDDING) == 0;
}

int64_t nbi_param_index(const struct nbi_config *c, const char *name)
{
    if (nbi_param_is_embedding(name))
        return 0;
    if (strcmp(name, "model.norm.weight") == 0)
        return 1 + c->layers * PER_LAYER;
    if (strcmp(name, "lm_head.weight") == 0)
        return 2 + c->layers * PER_LAYER;
    if (!nbi_starts_with(name, "model.layers."))
        return -1;
    const char *digits = name + strlen("model.layers.");
    size_t n = strspn(digits, "0123456789");
    if (n == 0 || n > 4 || (n > 1 && digits[0] == '0') || digits[n] != '.')
        return -1;
    long layer = strtol(digits, NULL, 10);
    for (int64_t i = 0; i < PER_LAYER && layer < c->layers; i++)
        if (strcmp(digits + n + 1, layer_params[i].name) == 0)
            return 1 + layer * PER_LAYER + i;
    return -1;
}

static const char *const projections[] = {"q_proj",    "k_proj",  "v_proj",    "o_proj",
                                          "gate_proj", "up_proj", "down_proj", "lm_head"};

const char *nbi_param_family(const char *name)
{
    for (size_t i = 0; i < sizeof projections / sizeof *projections; i++)
        if (strstr(name, projections[i]))
            return projections[i];
    return "other";
}

bool nbi_param_is_projection(const char *name, int ndim)
{
    return ndim == 2 && nbi_ends_with(name, ".weight") && !strstr(name, "embed_tokens") &&
           !strstr(name, "norm") && strcmp(nbi_param_family(name), "other") != 0;
}
