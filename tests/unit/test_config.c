/* test_config.c - configurations and the parameter list, against Qwen3's published sizes. */
#include "model/config.h"
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

static void test_config__older_form(void **state)
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

static void test_config__newer_form(void **state)
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

static void test_config__yarn(void **state)
{
    (void)state;
    struct nbi_config c;
    assert_ok(parse(&c, "{" SIZES ",\"max_position_embeddings\":131072,\"rope_scaling\":"
                        "{\"rope_type\":\"yarn\",\"factor\":4.0,"
                        "\"original_max_position_embeddings\":32768}}"));
    assert_true(c.yarn_factor == 4);
    assert_int_equal(c.yarn_original, 32768);
}

static void test_config__json_round_trip(void **state)
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
    assert_memory_equal(&a, &b, sizeof a);
}

/* Sizes of the published models: parameters and `.dat` entries of Qwen3-4B. */
static void test_params__count_and_order(void **state)
{
    (void)state;
    static const struct {
        const char *preset;
        int64_t tensors, values;
    } rows[] = {{"0.6b", 310, 596049920},
                {"1.7b", 310, 1720574976},
                {"4b", 398, 4022468096},
                {"8b", 399, 8190735360}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct nbi_config c;
        int64_t values = 0;
        assert_ok(nbi_config_preset(&c, rows[i].preset));
        assert_int_equal(nbi_param_count(&c), rows[i].tensors);
        for (int64_t k = 0; k < nbi_param_count(&c); k++) {
            struct nbi_param p;
            nbi_param_at(&c, k, &p);
            values += p.shape[0] * (p.ndim == 2 ? p.shape[1] : 1);
            assert_int_equal(nbi_param_index(&c, p.name), k);
        }
        assert_int_equal(values, rows[i].values);
    }
}

static void test_params__which_are_quantised(void **state)
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
    assert_string_equal(nbi_param_family(yes[1]), "down_proj");
    assert_string_equal(nbi_param_family(no[0]), "other");
}

static void test_params__index_refuses_strangers(void **state)
{
    (void)state;
    struct nbi_config c;
    assert_ok(nbi_config_preset(&c, "tiny"));
    assert_int_equal(nbi_param_index(&c, "model.layers.4.mlp.up_proj.weight"), -1);
    assert_int_equal(nbi_param_index(&c, "model.layers.00.mlp.up_proj.weight"), -1);
    assert_int_equal(nbi_param_index(&c, "model.layers.0.mlp.up_proj.bias"), -1);
    assert_int_equal(nbi_param_index(&c, "model.layers..mlp.up_proj.weight"), -1);
    assert_int_equal(nbi_param_index(&c, ""), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config__older_form),
        cmocka_unit_test(test_config__newer_form),
        cmocka_unit_test(test_config__yarn),
        cmocka_unit_test(test_config__json_round_trip),
        cmocka_unit_test(test_params__count_and_order),
        cmocka_unit_test(test_params__which_are_quantised),
        cmocka_unit_test(test_params__index_refuses_strangers),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
