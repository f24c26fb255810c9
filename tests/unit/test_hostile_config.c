/* test_hostile_config.c - config.json with one mistake each, and the variants that must be
 * accepted. */
#include "base/json.h"
#include "model/config.h"
#include "unit/hostile.h"

/* The fields of a small model; a case replaces one of them or adds some. */
static const struct {
    const char *key, *value;
} base[] = {
    {"model_type", "\"qwen3\""},
    {"vocab_size", "48"},
    {"hidden_size", "64"},
    {"intermediate_size", "96"},
    {"num_hidden_layers", "2"},
    {"num_attention_heads", "4"},
    {"num_key_value_heads", "2"},
    {"head_dim", "16"},
    {"max_position_embeddings", "128"},
    {"rms_norm_eps", "1e-6"},
    {"tie_word_embeddings", "true"},
};

/* The config as text, with `key` set to `value`; NULL omits the key. */
static char *config_text(const char *key, const char *value)
{
    struct bytes b = {0};
    bool found = false;
    put_text(&b, "{");
    for (size_t i = 0; i < LENGTH(base); i++) {
        bool same = strcmp(base[i].key, key) == 0;
        found = found || same;
        if (same && !value)
            continue;
        put_text(&b, b.len > 1 ? ",\"" : "\"");
        put_text(&b, base[i].key);
        put_text(&b, "\":");
        put_text(&b, same ? value : base[i].value);
    }
    if (!found && value) {
        put_text(&b, ",\"");
        put_text(&b, key);
        put_text(&b, "\":");
        put_text(&b, value);
    }
    put_bytes(&b, "}", 2);
    return (char *)b.p;
}

static enum nb_status parse_text(const char *text, size_t len, struct nbi_config *c)
{
    json_t *json = NULL;
    char *copy = malloc(len ? len : 1); /* exact size, for the sanitizer */
    assert_non_null(copy);
    memcpy(copy, text, len);
    enum nb_status rc = nbi_json_parse(&json, copy, len);
    if (rc == NB_OK)
        rc = nbi_config_parse(c, json);
    json_decref(json);
    free(copy);
    return rc;
}

static enum nb_status parse_with(const char *key, const char *value, struct nbi_config *c)
{
    char *text = config_text(key, value);
    enum nb_status rc = parse_text(text, strlen(text), c);
    free(text);
    return rc;
}

static void refuse_with(const char *key, const char *value, const char *words)
{
    struct nbi_config c;
    if (parse_with(key, value, &c) == NB_OK)
        fail_msg("accepted: '%s' as %s", key, value ? value : "nothing");
    expect_message(words, key);
}

static void accept_with(const char *key, const char *value, struct nbi_config *c)
{
    if (parse_with(key, value, c) != NB_OK)
        fail_msg("refused: '%s' as %s: %s", key, value ? value : "nothing", nb_last_error());
}

static void refuse_text(const char *text, const char *words)
{
    struct nbi_config c;
    assert_int_not_equal(parse_text(text, strlen(text), &c), NB_OK);
    expect_message(words, text);
}

/* ---- sizes ---- */

static void test_hostile_config__accepts_the_unmodified_config(void **state)
{
    (void)state;
    struct nbi_config c;
    accept_with("model_type", "\"qwen3\"", &c);
    assert_int_equal(c.layers, 2);
    assert_int_equal(c.eos_count, 0);
}

static void test_hostile_config__refuses_missing_fields(void **state)
{
    (void)state;
    static const char *const required[] = {"model_type",        "vocab_size",
                                           "hidden_size",       "intermediate_size",
                                           "num_hidden_layers", "num_attention_heads"};
    for (size_t i = 0; i < LENGTH(required); i++) {
        char words[64];
        snprintf(words, sizeof words, "'%s' is missing", required[i]);
        refuse_with(required[i], NULL, words);
        refuse_with(required[i], "null", words);
    }
}

static void test_hostile_config__refuses_sizes_out_of_range(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "vocab_size",          "hidden_size", "intermediate_size",       "num_hidden_layers",
        "num_attention_heads", "head_dim",    "max_position_embeddings", "num_key_value_heads"};
    static const char *const values[] = {"0",
                                         "-1",
                                         "16777217",
                                         "4294967295",
                                         "4294967296",
                                         "9223372036854775807",
                                         "-9223372036854775808"};
    for (size_t k = 0; k < LENGTH(keys); k++)
        for (size_t i = 0; i < LENGTH(values); i++) {
            char words[64];
            snprintf(words, sizeof words, "'%s' is %s, outside", keys[k], values[i]);
            refuse_with(keys[k], values[i], words);
        }
    refuse_with("num_hidden_layers", "513", "outside 1 to 512"); /* llama.cpp PR 25821 */
}

static void test_hostile_config__refuses_sizes_of_other_types(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "vocab_size",          "hidden_size", "intermediate_size",       "num_hidden_layers",
        "num_attention_heads", "head_dim",    "max_position_embeddings", "num_key_value_heads"};
    static const char *const values[] = {"2.0", "2.5", "1e2", "\"2\"", "[2]", "{}", "true"};
    for (size_t k = 0; k < LENGTH(keys); k++)
        for (size_t i = 0; i < LENGTH(values); i++) {
            char words[64];
            snprintf(words, sizeof words, "'%s' must be a whole number", keys[k]);
            refuse_with(keys[k], values[i], words);
        }
}

static void test_hostile_config__refuses_heads_that_do_not_divide(void **state)
{
    (void)state;
    refuse_with("num_key_value_heads", "3", "not a multiple of 3 key/value heads");
    refuse_with("num_key_value_heads", "8", "not a multiple of 8 key/value heads");
    refuse_with("head_dim", "15", "head_dim 15 is not an even number");
    refuse_with("head_dim", "1", "'head_dim' is 1, outside 2 to");
}

static void test_hostile_config__refuses_heads_that_are_too_wide(void **state)
{
    (void)state;
    refuse_text("{\"model_type\":\"qwen3\",\"vocab_size\":48,\"hidden_size\":64,"
                "\"intermediate_size\":96,\"num_hidden_layers\":2,"
                "\"num_attention_heads\":1025,\"head_dim\":1024}",
                "'num_attention_heads' is 1025");
}

static void test_hostile_config__refuses_other_numbers(void **state)
{
    (void)state;
    refuse_with("rms_norm_eps", "0", "'rms_norm_eps' is 0, outside");
    refuse_with("rms_norm_eps", "-1e-6", "'rms_norm_eps' is");
    refuse_with("rms_norm_eps", "1", "'rms_norm_eps' is 1, outside");
    refuse_with("rms_norm_eps", "\"1e-6\"", "'rms_norm_eps' must be a number");
    refuse_with("rms_norm_eps", "1e400", "is too large");
    refuse_with("rms_norm_eps", "NaN", "invalid JSON");
    refuse_with("rope_theta", "0", "'rope_theta' is 0, outside");
    refuse_with("rope_theta", "-1", "'rope_theta' is -1, outside");
    refuse_with("rope_theta", "1e300", "'rope_theta' is 1e+300, outside");
    refuse_with("rope_theta", "[]", "'rope_theta' must be a number");
    refuse_with("initializer_range", "-1", "'initializer_range' is -1");
    refuse_with("tie_word_embeddings", "1", "'tie_word_embeddings' must be true or false");
    refuse_with("tie_word_embeddings", "\"true\"", "'tie_word_embeddings' must be true or false");
    refuse_with("vocab_size", "99999999999999999999", "is too large");
}

/* ---- what is not implemented ---- */

static void test_hostile_config__refuses_other_architectures(void **state)
{
    (void)state;
    refuse_with("model_type", "\"qwen3_moe\"", "model_type 'qwen3_moe' is not supported");
    refuse_with("model_type", "\"llama\"", "model_type 'llama' is not supported");
    refuse_with("model_type", "\"Qwen3\"", "model_type 'Qwen3' is not supported");
    refuse_with("model_type", "\"\"", "model_type '' is not supported");
    refuse_with("model_type", "3", "'model_type' must be a string");
    refuse_with("hidden_act", "\"gelu\"", "hidden_act 'gelu' is not supported");
    refuse_with("attention_bias", "true", "'attention_bias' is set");
    refuse_with("attention_bias", "1", "'attention_bias' is set");
    refuse_with("use_sliding_window", "true", "'use_sliding_window' is set");
    refuse_with("layer_types", "[\"full_attention\",\"sliding_attention\"]",
                "layer_types: layer 1");
    refuse_with("layer_types", "[7, 7]", "layer_types: layer 0");
    refuse_with("layer_types", "[\"full_attention\"]", "must be a list of 2");
    refuse_with("layer_types", "\"full_attention\"", "must be a list of 2");
}

static void test_hostile_config__refuses_other_rope_scalings(void **state)
{
    (void)state;
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    for (size_t i = 0; i < LENGTH(keys); i++) {
        const char *k = keys[i];
        refuse_with(k, "{\"rope_type\":\"linear\",\"factor\":2}",
                    "rope scaling 'linear' is not supported");
        refuse_with(k, "{\"type\":\"dynamic\"}", "rope scaling 'dynamic' is not supported");
        refuse_with(k, "{\"rope_type\":7}", "'rope_type' must be a string");
        refuse_with(k, "\"yarn\"", "must be an object");
        refuse_with(k, "[]", "must be an object");
        refuse_with(k, "{\"rope_type\":\"yarn\"}", "'factor' is missing");
        refuse_with(k, "{\"rope_type\":\"yarn\",\"factor\":0}", "'factor' is 0, outside");
        refuse_with(k, "{\"rope_type\":\"yarn\",\"factor\":1e9}", "'factor' is 1e+09, outside");
        refuse_with(k, "{\"rope_type\":\"yarn\",\"factor\":\"4\"}", "'factor' must be a number");
        refuse_with(k,
                    "{\"rope_type\":\"yarn\",\"factor\":4,"
                    "\"original_max_position_embeddings\":0}",
                    "'original_max_position_embeddings' is 0");
        refuse_with(k, "{\"rope_theta\":-1}", "'rope_theta' is -1, outside");
    }
}

static void test_hostile_config__accepts_both_rope_variants(void **state)
{
    (void)state;
    struct nbi_config c;
    accept_with("rope_theta", "5e6", &c);
    assert_true(c.rope_theta == 5e6 && c.yarn_factor == 0);
    accept_with("rope_parameters", "{\"rope_theta\":5000000,\"rope_type\":\"default\"}", &c);
    assert_true(c.rope_theta == 5e6 && c.yarn_factor == 0);
    accept_with("rope_scaling", "null", &c);
    accept_with("rope_scaling", "{\"type\":\"yarn\",\"factor\":4.0}", &c);
    assert_true(c.yarn_factor == 4 && c.yarn_original == 128);
    accept_with("rope_parameters",
                "{\"rope_type\":\"yarn\",\"factor\":2,\"rope_theta\":1e6,"
                "\"original_max_position_embeddings\":64}",
                &c);
    assert_true(c.yarn_factor == 2 && c.yarn_original == 64 && c.rope_theta == 1e6);
}

/* ---- token ids ---- */

static void test_hostile_config__refuses_bad_token_ids(void **state)
{
    (void)state;
    refuse_with("eos_token_id", "[1,2,3,4,5,6,7,8,9]", "lists more than 8 ids");
    refuse_with("eos_token_id", "48", "eos_token_id 48 is outside the vocabulary of 48");
    refuse_with("eos_token_id", "[1,48]", "eos_token_id 48 is outside the vocabulary of 48");
    refuse_with("eos_token_id", "[9223372036854775807]", "is outside the vocabulary");
    refuse_with("eos_token_id", "-1", "'eos_token_id' is -1, outside");
    refuse_with("eos_token_id", "[-1]", "must hold whole numbers");
    refuse_with("eos_token_id", "[1.0]", "must hold whole numbers");
    refuse_with("eos_token_id", "[[1]]", "must hold whole numbers");
    refuse_with("eos_token_id", "\"1\"", "must be a whole number");
    refuse_with("bos_token_id", "48", "token id 48 is outside the vocabulary of 48");
    refuse_with("pad_token_id", "48", "token id 48 is outside the vocabulary of 48");
    refuse_with("pad_token_id", "-5", "'pad_token_id' is -5, outside");
    refuse_with("bos_token_id", "1.5", "'bos_token_id' must be a whole number");
}

static void test_hostile_config__accepts_lists_of_ids(void **state)
{
    (void)state;
    struct nbi_config c;
    accept_with("eos_token_id", "[0,1,2,3,4,5,6,47]", &c);
    assert_int_equal(c.eos_count, 8);
    assert_int_equal(c.eos[7], 47);
    accept_with("eos_token_id", "[]", &c);
    assert_int_equal(c.eos_count, 0);
}

/* ---- the text itself ---- */

static void test_hostile_config__refuses_what_is_not_an_object(void **state)
{
    (void)state;
    refuse_text("", "invalid JSON");
    refuse_text("{", "invalid JSON");
    refuse_text("[]", "not a JSON object");
    refuse_text("{} {}", "invalid JSON");
    refuse_text("{\"model_type\":\"qwen3\\u0000\"}", "NUL");
    refuse_text("{\"model_type\":\"\xc0\xaf\"}", "invalid JSON");
    refuse_text("\xef\xbb\xbf{}", "invalid JSON"); /* a byte order mark */
    refuse_text("{'model_type':'qwen3'}", "invalid JSON");
}

static void test_hostile_config__refuses_duplicate_keys(void **state)
{
    (void)state;
    refuse_text("{\"model_type\":\"qwen3\",\"model_type\":\"qwen3\"}", "duplicate object key");
    refuse_with("rope_scaling", "{\"factor\":1,\"factor\":2}", "duplicate object key");
}

static void test_hostile_config__refuses_deep_nesting(void **state)
{
    (void)state;
    char deep[2 * 100000 + 1];
    memset(deep, '[', 100000);
    memset(deep + 100000, ']', 100000);
    deep[200000] = 0;
    refuse_with("architectures", deep, "nested deeper than");
    deep[100000] = 0; /* and one that is never closed */
    refuse_text(deep, "nested deeper than");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_config__accepts_the_unmodified_config),
        cmocka_unit_test(test_hostile_config__refuses_missing_fields),
        cmocka_unit_test(test_hostile_config__refuses_sizes_out_of_range),
        cmocka_unit_test(test_hostile_config__refuses_sizes_of_other_types),
        cmocka_unit_test(test_hostile_config__refuses_heads_that_do_not_divide),
        cmocka_unit_test(test_hostile_config__refuses_heads_that_are_too_wide),
        cmocka_unit_test(test_hostile_config__refuses_other_numbers),
        cmocka_unit_test(test_hostile_config__refuses_other_architectures),
        cmocka_unit_test(test_hostile_config__refuses_other_rope_scalings),
        cmocka_unit_test(test_hostile_config__accepts_both_rope_variants),
        cmocka_unit_test(test_hostile_config__refuses_bad_token_ids),
        cmocka_unit_test(test_hostile_config__accepts_lists_of_ids),
        cmocka_unit_test(test_hostile_config__refuses_what_is_not_an_object),
        cmocka_unit_test(test_hostile_config__refuses_duplicate_keys),
        cmocka_unit_test(test_hostile_config__refuses_deep_nesting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
