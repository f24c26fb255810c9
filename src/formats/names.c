/* names.c - the table of names; a layer's tensors differ in the layer number only. */
#include "formats/names.h"

#include <string.h>

#include "base/str.h"

struct pair {
    const char *hf, *gguf;
};

static const struct pair global_names[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
};

static const struct pair layer_names[] = {
    {"input_layernorm.weight", "attn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
};

#define LEN(a) (sizeof(a) / sizeof *(a))

/* "PREFIX<digits>.REST": the digits and the rest, or false. Leading zeros are refused, so that a
 * layer has one name only. */
static bool split_layer(const char *name, const char *prefix, int *digits, const char **number,
                        const char **rest)
{
    if (!nbi_starts_with(name, prefix))
        return false;
    *number = name + strlen(prefix);
    size_t n = strspn(*number, "0123456789");
    if (n == 0 || n > 4 || (n > 1 && **number == '0') || (*number)[n] != '.')
        return false;
    *digits = (int)n;
    *rest = *number + n + 1;
    return true;
}

bool nbi_name_to_gguf(const char *hf, char *out, size_t size)
{
    int digits;
    const char *number, *rest;
    for (size_t i = 0; i < LEN(global_names); i++)
        if (strcmp(hf, global_names[i].hf) == 0) {
            snprintf(out, size, "%s", global_names[i].gguf);
            return true;
        }
    if (!split_layer(hf, "model.layers.", &digits, &number, &rest))
        return false;
    for (size_t i = 0; i < LEN(layer_names); i++)
        if (strcmp(rest, layer_names[i].hf) == 0) {
            snprintf(out, size, "blk.%.*s.%s", digits, number, layer_names[i].gguf);
            return true;
        }
    return false;
}

bool nbi_name_from_gguf(const char *gguf, char *out, size_t size)
{
    int digits;
    const char *number, *rest;
    for (size_t i = 0; i < LEN(global_names); i++)
        if (strcmp(gguf, global_names[i].gguf) == 0) {
            snprintf(out, size, "%s", global_names[i].hf);
            return true;
        }
    if (!split_layer(gguf, "blk.", &digits, &number, &rest))
        return false;
    for (size_t i = 0; i < LEN(layer_names); i++)
        if (strcmp(rest, layer_names[i].gguf) == 0) {
            snprintf(out, size, "model.layers.%.*s.%s", digits, number, layer_names[i].hf);
            return true;
        }
    return false;
}
