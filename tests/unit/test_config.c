/* test_config.c - configs and the table of parameters, against Qwen3's published sizes. */
#include "model/transformer.h"
#include "unit/support.h"

static enum nb_status parse(struct nbi_config *c, const char *text)
{
    json_t *j;
    enum nb_status rc = nbi_json_parse(&j, text, strlen(text));
    if (rc == NB_OK)
        rc = nbi_config_parse(c, j);
    json_decref(j);
    return rc;
}

#define SIZES                                                                                      \
    "\"model_type\":\"qwen3\",\"vocab_size\":151936,\"hidden_size\":2560,"                         \
    "\"intermediate_size\":9728,\"num_hidden_layers\":36,\"num_attention_heads\":32,"              \
    "\"num_key_value_heads\":8,\"head_dim\":128"

#define FULL_6                                                                                     \
    "\"full_attention\",\"full_attention\",\"full_attention\",\"full_attention\","                 \
    "\"full_attention\",\"full_attention\""
#define FULL_36 FULL_6 "," FULL_6 "," FULL_6 "," FULL_6 "," FULL_6 "," FULL_6

static void test_config__reads_the_older_form(void **state)
{
    (void)state;
    struct nbi_config c;
    assert_ok(parse(&c, "{" SIZES ",\"rope_theta\":5000000,\"tie_word_embeddings\":true,"
                        "\"rms_norm_eps\":1e-06,\"max_position_embeddings\":262144,"
                        "\"rope_scaling\":null,\"sliding_window\":null,"
                        "\"use_sliding_window\":false,\"eos_token_id\":151645}"));
    assert_true(c.rope_theta == 5e6 && c.rms_eps == 1e-6);
    assert_true(c.tied);
    assert_int_equal(c.max_position, 262144);
    assert_int_equal(c.eos[0], 151645);
    assert_int_equal(c.bos, -1);
}

static void test_config__reads_the_newer_form(void **state)
{
    (void)state;
    struct nbi_config c;
    assert_ok(parse(&c, "{" SIZES ",\"rope_parameters\":{\"rope_theta\":1000000.0,"
                        "\"rope_type\":\"default\"},\"dtype\":\"bfloat16\","
                        "\"layer_types\":[" FULL_36 "],"
                        "\"eos_token_id\":[151645,151643]}"));
    assert_true(c.rope_theta == 1e6);
    assert_false(c.tied);
    assert_int_equal(c.eos_count, 2);
}

static void test_config__reads_yarn(void **state)
{
    (void)state;
    struct nbi_config c;
    assert_ok(parse(&c, "{" SIZES ",\"max_position_embeddings\":131072,\"rope_scaling\":"
                        "{\"rope_type\":\"yarn\",\"factor\":4.0,"
                        "\"original_max_position_embeddings\":32768}}"));
    assert_true(c.yarn_factor == 4);
    assert_int_equal(c.yarn_original, 32768);
}

static void test_config__survives_a_json_round_trip(void **state)
{
    (void)state;
    struct nbi_config a, b;
    json_t *j;
    assert_ok(nbi_config_preset(&a, "8b"));
    a.eos[0] = 3;
    a.eos[1] = 4;
    a.eos_count = 2;
    a.bos = 1;
    a.yarn_factor = 4;
    a.yarn_original = 1000;
    assert_ok(nbi_config_to_json(&a, &j));
    assert_ok(nbi_config_parse(&b, j));
    json_decref(j);
    /* All fields; what pads them is undefined. */
    size_t tied = offsetof(struct nbi_config, tied),
           yarn = offsetof(struct nbi_config, yarn_factor);
    assert_memory_equal(&a, &b, tied);
    assert_int_equal(a.tied, b.tied);
    assert_memory_equal(&a.yarn_factor, &b.yarn_factor,
                        offsetof(struct nbi_config, eos_count) - yarn);
    assert_int_equal(a.eos_count, b.eos_count);
}

/* Sizes of the published models: parameters and `.dat` entries of Qwen3-4B. */
static void test_params__count_is_that_of_the_published_models(void **state)
{
    (void)state;
    static const struct {
        const char *preset;
        int64_t tensors, values;
    } rows[] = {{"0.6b", 310, 596049920}, {"1.7b", 310, 1720574976}, {"4b", 398, 4022468096},
                {"8b", 399, 8190735360},  {"14b", 443, 14768307200}, {"32b", 707, 32762123264}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct nbi_config c;
        int64_t values = 0;
        assert_ok(nbi_config_preset(&c, rows[i].preset));
        assert_int_equal(nbi_param_count(&c), rows[i].tensors);
        for (int64_t k = 0; k < nbi_param_count(&c); k++) {
            struct nbi_param p, found;
            nbi_param_at(&c, k, &p);
            values += nbi_param_values(&p);
            assert_true(nbi_param_find(&c, p.name, &found));
            assert_int_equal(p.index, k);
            assert_int_equal(found.index, k);
            assert_string_equal(found.name, p.name);
            assert_ptr_equal(found.def, p.def);
            assert_int_equal(found.layer, p.layer);
        }
        assert_int_equal(values, rows[i].values);
    }
}

/* `.dat` files and random streams depend on this order. */
static void test_params__order_and_offsets_are_fixed(void **state)
{
    (void)state;
    static const struct {
        const char *name, *gguf;
        size_t weight, grad;
        int64_t rows, cols;
    } of_layer[] = {
#define ROW(name, gguf, field, rows, cols)                                                         \
    {name ".weight",                                                                               \
     gguf ".weight",                                                                               \
     offsetof(struct nbi_layer_weights, field),                                                    \
     offsetof(struct nbi_layer_grads, field),                                                      \
     rows,                                                                                         \
     cols}
        ROW("self_attn.q_proj", "attn_q", q, 64, 24),
        ROW("self_attn.k_proj", "attn_k", k, 32, 24),
        ROW("self_attn.v_proj", "attn_v", v, 32, 24),
        ROW("self_attn.o_proj", "attn_output", o, 24, 64),
        ROW("self_attn.q_norm", "attn_q_norm", q_norm, 16, 0),
        ROW("self_attn.k_norm", "attn_k_norm", k_norm, 16, 0),
        ROW("mlp.gate_proj", "ffn_gate", gate, 48, 24),
        ROW("mlp.up_proj", "ffn_up", up, 48, 24),
        ROW("mlp.down_proj", "ffn_down", down, 24, 48),
        ROW("input_layernorm", "attn_norm", input_norm, 24, 0),
        ROW("post_attention_layernorm", "ffn_norm", post_norm, 24, 0),
#undef ROW
    };
    const int64_t per_layer = sizeof of_layer / sizeof *of_layer;
    struct nbi_layer_weights weights[3];
    struct nbi_layer_grads grads[3];
    const struct nbi_weights w = {.layers = weights};
    const struct nbi_grads g = {.layers = grads};
    struct nbi_config c = {.vocab_size = 99,
                           .hidden_size = 24,
                           .intermediate_size = 48,
                           .layers = 3,
                           .heads = 4,
                           .kv_heads = 2,
                           .head_dim = 16};
    char name[128], gguf[128], back[128];
    struct nbi_param p;
    assert_int_equal(nbi_params_per_layer(&c), per_layer);
    assert_int_equal(nbi_param_count(&c), 3 + 3 * per_layer);
    for (int64_t i = 0; i < 3 * per_layer; i++) {
        int64_t layer = i / per_layer, k = i % per_layer;
        snprintf(name, sizeof name, "model.layers.%d.%s", (int)layer, of_layer[k].name);
        snprintf(gguf, sizeof gguf, "blk.%d.%s", (int)layer, of_layer[k].gguf);
        nbi_param_at(&c, 1 + i, &p);
        assert_string_equal(p.name, name);
        assert_true(nbi_param_to_gguf(name, back, sizeof back));
        assert_string_equal(back, gguf);
        assert_true(nbi_param_from_gguf(gguf, back, sizeof back));
        assert_string_equal(back, name);
        assert_int_equal(p.shape[0], of_layer[k].rows);
        assert_int_equal(p.shape[1], of_layer[k].cols);
        assert_ptr_equal(nbi_param_weight(&w, &p), (char *)&weights[layer] + of_layer[k].weight);
        assert_ptr_equal(nbi_param_grad(&g, &p), (char *)&grads[layer] + of_layer[k].grad);
    }
    nbi_param_at(&c, 0, &p);
    assert_string_equal(p.name, "model.embed_tokens.weight");
    assert_ptr_equal(nbi_param_weight(&w, &p), &w.embed);
    nbi_param_at(&c, 1 + 3 * per_layer, &p);
    assert_string_equal(p.name, "model.norm.weight");
    assert_ptr_equal(nbi_param_grad(&g, &p), &g.norm);
    for (int tied = 0; tied < 2; tied++) {
        c.tied = tied;
        assert_int_equal(nbi_param_count(&c), 3 - tied + 3 * per_layer);
        nbi_param_at(&c, 2 + 3 * per_layer, &p);
        assert_string_equal(p.name, "lm_head.weight");
        assert_int_equal(p.index, 2 + 3 * per_layer);
        assert_ptr_equal(nbi_param_weight(&w, &p), &w.head);
    }
}

static void test_params__projections_are_quantised(void **state)
{
    (void)state;
    static const char *const yes[] = {"model.layers.3.self_attn.q_proj.weight",
                                      "model.layers.3.mlp.down_proj.weight", "lm_head.weight"};
    static const char *const no[] = {
        "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        assert_true(nbi_param_is_projection(yes[i], 2));
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        assert_false(nbi_param_is_projection(no[i], 2));
    assert_false(nbi_param_is_projection(yes[0], 1));
    char family[NBI_PARAM_FAMILY_MAX];
    nbi_param_family(yes[1], family);
    assert_string_equal(family, "down_proj");
    nbi_param_family(yes[2], family);
    assert_string_equal(family, "lm_head");
    nbi_param_family(no[0], family);
    assert_string_equal(family, "other");
}

static void test_params__unknown_names_are_not_found(void **state)
{
    (void)state;
    struct nbi_config c;
    struct nbi_param p;
    assert_ok(nbi_config_preset(&c, "tiny"));
    assert_false(nbi_param_find(&c, "model.layers.4.mlp.up_proj.weight", &p));
    assert_false(nbi_param_find(&c, "model.layers.00.mlp.up_proj.weight", &p));
    assert_false(nbi_param_find(&c, "model.layers.0.mlp.up_proj.bias", &p));
    assert_false(nbi_param_find(&c, "model.layers..mlp.up_proj.weight", &p));
    assert_false(nbi_param_find(&c, "", &p));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config__reads_the_older_form),
        cmocka_unit_test(test_config__reads_the_newer_form),
        cmocka_unit_test(test_config__reads_yarn),
        cmocka_unit_test(test_config__survives_a_json_round_trip),
        cmocka_unit_test(test_params__count_is_that_of_the_published_models),
        cmocka_unit_test(test_params__order_and_offsets_are_fixed),
        cmocka_unit_test(test_params__projections_are_quantised),
        cmocka_unit_test(test_params__unknown_names_are_not_found),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
