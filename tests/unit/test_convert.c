/* test_convert.c - whole models through the public interface: lossless round trips, quantisation,
 * refused targets, what verify finds. */
#include <math.h>
#include <unistd.h>

#include "base/json.h"
#include "convert/model_writer.h"
#include "formats/store.h"
#include "model/transformer.h"
#include "tensor/nvfp4.h"
#include "unit/support.h"

static int make_models(void **state)
{
    if (make_test_dir(state) != 0)
        return -1;
    struct nb_synth_opts opts = {.preset = "tiny", .dst = test_path("tied"), .seed = 5};
    if (nb_synth(&opts) != NB_OK)
        return -1;
    json_t *config;
    char text[512];
    snprintf(text, sizeof text, "%s", test_path("untied.json"));
    if (nbi_json_read_file(&config, test_path("tied/config.json"), 10000) != NB_OK)
        return -1;
    json_object_set_new(config, "tie_word_embeddings", json_false());
    json_object_set_new(config, "num_hidden_layers", json_integer(2));
    enum nb_status rc = nbi_json_write_file(config, text);
    json_decref(config);
    opts = (struct nb_synth_opts){
        .config = text, .dst = test_path("untied"), .dtype = NB_OUT_F16, .seed = 6, .sigma = 0.05f};
    return rc == NB_OK && nb_synth(&opts) == NB_OK ? 0 : -1;
}

static void convert(const char *src, const char *dst, const char *model_dir,
                    enum nb_out_layout layout)
{
    struct nb_convert_opts opts = {
        .src = src, .dst = dst, .model_dir = model_dir, .layout = layout, .threads = 2};
    assert_ok(nb_convert(&opts));
}

static void quantize(const char *src, const char *dst, enum nb_quant_method method, bool two_level,
                     struct nb_quantize_report *report)
{
    struct nb_quantize_opts opts = {
        .to = {.src = src, .dst = dst, .threads = 2}, .method = method, .two_level = two_level};
    assert_ok(nb_quantize(&opts, report));
}

/* Asserts that both models have the same tensors, with the same types, shapes and bytes. */
static void assert_same_model(const char *a, const char *b)
{
    struct nbi_store *x, *y;
    assert_ok(nbi_store_open(&x, a));
    assert_ok(nbi_store_open(&y, b));
    assert_int_equal(x->count, y->count);
    for (int64_t i = 0; i < x->count; i++) {
        const struct nbi_entry *e = &x->entries[i], *f = nbi_store_find(y, e->name);
        assert_non_null(f);
        assert_int_equal(e->dtype, f->dtype);
        assert_int_equal(e->ndim, f->ndim);
        assert_memory_equal(e->shape, f->shape, sizeof e->shape);
        size_t n = (size_t)e->count * 4 + 16;
        uint8_t *p = calloc(2, n);
        if (e->dtype == NBI_NVFP4) {
            assert_true(e->tensor_scale == f->tensor_scale);
            assert_ok(nbi_store_read_nvfp4(x, e, 0, e->count, p, p + e->count / 2));
            assert_ok(nbi_store_read_nvfp4(y, f, 0, e->count, p + n, p + n + e->count / 2));
        } else {
            assert_ok(nbi_store_read(x, e, 0, e->count, p));
            assert_ok(nbi_store_read(y, f, 0, e->count, p + n));
        }
        assert_memory_equal(p, p + n, n);
        free(p);
    }
    nbi_store_close(x);
    nbi_store_close(y);
}

static void assert_same_bytes(const char *a, const char *b)
{
    char *x, *y;
    size_t n, m;
    assert_ok(nbi_file_read(a, (size_t)1 << 28, &x, &n));
    assert_ok(nbi_file_read(b, (size_t)1 << 28, &y, &m));
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

static void test_convert__plain_models_survive_every_format(void **state)
{
    (void)state;
    static const char *const models[] = {"tied", "untied"};
    for (int i = 0; i < 2; i++) {
        char model[512];
        snprintf(model, sizeof model, "%s", test_path(models[i]));
        convert(model, test_path("p.dat"), NULL, NB_LAYOUT_MODELOPT);
        assert_same_model(model, test_path("p.dat"));
        convert(test_path("p.dat"), test_path("p.gguf"), model, NB_LAYOUT_MODELOPT);
        convert(test_path("p.gguf"), test_path("p.safetensors"), NULL, NB_LAYOUT_MODELOPT);
        assert_same_model(model, test_path("p.safetensors"));
        convert(test_path("p.gguf"), test_path("p2.dat"), NULL, NB_LAYOUT_MODELOPT);
        assert_same_bytes(test_path("p.dat"), test_path("p2.dat"));
        convert(test_path("p.gguf"), test_path("pdir"), NULL, NB_LAYOUT_MODELOPT);
        assert_same_model(model, test_path("pdir"));
        nbi_remove_tree(test_path("pdir"));
    }
}

static void test_convert__nvfp4_survives_every_layout(void **state)
{
    (void)state;
    for (int two_level = 0; two_level < 2; two_level++) {
        struct nb_quantize_report report;
        char model[512];
        snprintf(model, sizeof model, "%s", test_path("tied"));
        quantize(model, test_path("q.dat"), NB_QUANT_SWEEP, two_level, &report);
        convert(test_path("q.dat"), test_path("mo"), model, NB_LAYOUT_MODELOPT);
        convert(test_path("mo"), test_path("ct"), NULL, NB_LAYOUT_COMPRESSED_TENSORS);
        convert(test_path("ct"), test_path("q.gguf"), NULL, NB_LAYOUT_MODELOPT);
        convert(test_path("q.gguf"), test_path("back.dat"), NULL, NB_LAYOUT_MODELOPT);
        assert_same_model(test_path("q.dat"), test_path("mo"));
        assert_same_model(test_path("q.dat"), test_path("ct"));
        assert_same_bytes(test_path("q.dat"), test_path("back.dat"));
        nbi_remove_tree(test_path("mo"));
        nbi_remove_tree(test_path("ct"));
    }
}

static void test_convert__config_describes_the_quantisation(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    json_t *j;
    quantize(test_path("tied"), test_path("cb"), NB_QUANT_RTN, false, &report);
    assert_ok(nbi_json_read_file(&j, test_path("cb/config.json"), 10000));
    assert_true(json_is_false(json_object_get(j, "tie_word_embeddings")));
    json_t *q = json_object_get(j, "quantization_config");
    assert_string_equal(json_string_value(json_object_get(q, "quant_method")), "modelopt");
    assert_string_equal(json_string_value(json_object_get(q, "quant_algo")), "W4A16_NVFP4");
    assert_int_equal(json_array_size(json_object_get(q, "ignore")), 0); /* the head is quantised */
    json_decref(j);
    assert_ok(nbi_json_read_file(&j, test_path("cb/hf_quant_config.json"), 10000));
    q = json_object_get(j, "quantization");
    assert_int_equal(json_integer_value(json_object_get(q, "group_size")), 16);
    assert_non_null(json_object_get(q, "kv_cache_quant_algo"));
    assert_non_null(json_object_get(q, "exclude_modules"));
    json_decref(j);
    convert(test_path("cb"), test_path("cc"), NULL, NB_LAYOUT_COMPRESSED_TENSORS);
    assert_ok(nbi_json_read_file(&j, test_path("cc/config.json"), 10000));
    q = json_object_get(j, "quantization_config");
    assert_string_equal(json_string_value(json_object_get(q, "format")), "nvfp4-pack-quantized");
    json_decref(j);
    assert_false(nbi_path_is_file(test_path("cc/hf_quant_config.json")));
}

static void test_quantize__head_follows_the_embedding(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    struct nbi_store *model, *out;
    quantize(test_path("tied"), test_path("h.dat"), NB_QUANT_RTN, false, &report);
    assert_ok(nbi_store_open(&model, test_path("tied")));
    assert_ok(nbi_store_open(&out, test_path("h.dat")));
    const struct nbi_entry *embed = nbi_store_find(model, "model.embed_tokens.weight");
    const struct nbi_entry *head = nbi_store_find(out, "lm_head.weight");
    assert_non_null(head);
    assert_int_equal(head->dtype, NBI_NVFP4);
    assert_ptr_equal(head, &out->entries[out->count - 1]); /* last, as in a .dat */
    assert_int_equal(nbi_store_find(out, embed->name)->dtype, NBI_BF16);
    int64_t n = embed->count;
    float *x = malloc((size_t)n * sizeof *x);
    uint8_t *q = malloc((size_t)n), *s = q + n / 2, *q2 = malloc((size_t)n), *s2 = q2 + n / 2;
    assert_ok(nbi_store_read_f32(model, embed, 0, n, x));
    nbi_nvfp4_quantize(q, s, x, n / 16, NB_QUANT_RTN, 1.0f);
    assert_ok(nbi_store_read_nvfp4(out, head, 0, n, q2, s2));
    assert_memory_equal(q, q2, (size_t)n / 2);
    assert_memory_equal(s, s2, (size_t)n / 16);
    free(x);
    free(q);
    free(q2);
    nbi_store_close(model);
    nbi_store_close(out);
}

static bool looked_up;

static enum nb_status note_lookup(struct nbi_backend *be, const struct nbi_weight_source *src,
                                  struct nbi_weight *out)
{
    (void)be;
    *out = (struct nbi_weight){0};
    looked_up = src->lookup;
    return NB_OK;
}

/* Whether a weight of this file is loaded for row lookups only. */
static bool is_lookup(const char *path, const char *name)
{
    struct nbi_backend be = {.weight_new = note_lookup};
    struct nbi_store *store;
    struct nbi_weight w;
    assert_ok(nbi_store_open(&store, path));
    const struct nbi_entry *e = nbi_store_find(store, name);
    assert_non_null(e);
    int64_t layer;
    struct nbi_param p = {
        .ndim = 2, .shape = {e->shape[0], e->shape[1]}, .def = nbi_param_parse(name, &layer)};
    snprintf(p.name, sizeof p.name, "%s", name);
    struct nbi_weight_provider from = nbi_weights_from_store(store);
    assert_ok(from.load(from.ctx, &be, &p, &w));
    nbi_store_close(store);
    return looked_up;
}

static void test_quantize__an_embedding_with_a_separate_head_is_a_lookup(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    quantize(test_path("tied"), test_path("l.dat"), NB_QUANT_RTN, false, &report);
    assert_false(is_lookup(test_path("tied"), "model.embed_tokens.weight"));
    assert_true(is_lookup(test_path("untied"), "model.embed_tokens.weight"));
    assert_true(is_lookup(test_path("l.dat"), "model.embed_tokens.weight"));
    assert_false(is_lookup(test_path("untied"), "lm_head.weight"));
    assert_false(is_lookup(test_path("l.dat"), "lm_head.weight"));
}

static void test_quantize__skips_patterns_and_shares_fused_scales(void **state)
{
    (void)state;
    static const char *const skip[] = {"lm_head", "*.layers.1.*", "down_proj", "layer", NULL};
    struct nb_quantize_report report;
    struct nbi_store *s;
    struct nb_quantize_opts opts = {.to = {.src = test_path("untied"), .dst = test_path("s.dat")},
                                    .method = NB_QUANT_SWEEP,
                                    .two_level = true,
                                    .skip = skip};
    assert_ok(nb_quantize(&opts, &report));
    assert_int_equal(report.total.tensors, 6); /* q k v o gate up of layer 0 */
    assert_ok(nbi_store_open(&s, test_path("s.dat")));
    assert_int_equal(nbi_store_find(s, "lm_head.weight")->dtype, NBI_F16);
    assert_int_equal(nbi_store_find(s, "model.layers.0.mlp.down_proj.weight")->dtype, NBI_F16);
    assert_int_equal(nbi_store_find(s, "model.layers.1.mlp.up_proj.weight")->dtype, NBI_F16);
#define SCALE(name) nbi_store_find(s, "model.layers.0." name ".weight")->tensor_scale
    assert_true(SCALE("self_attn.q_proj") == SCALE("self_attn.k_proj"));
    assert_true(SCALE("self_attn.q_proj") == SCALE("self_attn.v_proj"));
    assert_true(SCALE("mlp.gate_proj") == SCALE("mlp.up_proj"));
    assert_true(SCALE("self_attn.q_proj") < 1);
#undef SCALE
    nbi_store_close(s);
}

static void test_quantize__report_does_not_depend_on_threads(void **state)
{
    (void)state;
    static const double min_snr[2][3] = {{19.5, 20.5, 20.8}, {20.2, 21.0, 21.6}};
    for (int two_level = 0; two_level < 2; two_level++)
        for (int method = NB_QUANT_RTN; method <= NB_QUANT_SWEEP; method++) {
            struct nb_quantize_report r;
            quantize(test_path("tied"), test_path("r.dat"), (enum nb_quant_method)method, two_level,
                     &r);
            assert_int_equal(r.families, 8);
            assert_int_equal(r.total.tensors, 29);
            assert_true(r.total.snr_db > min_snr[two_level][method]);
            assert_true(fabs(pow(10, -r.total.snr_db / 10) - r.total.rel_mse) < 1e-9);
            assert_true(r.total.zeros > 0.03 && r.total.zeros < 0.15);
        }
    struct nb_quantize_report r;
    struct nb_quantize_opts one = {
        .to = {.src = test_path("tied"), .dst = test_path("r1.dat"), .threads = 1},
        .method = NB_QUANT_SWEEP,
        .two_level = true};
    assert_ok(nb_quantize(&one, &r));
    assert_same_bytes(test_path("r.dat"), test_path("r1.dat"));
}

static void test_convert__dtype_option_casts_and_dequantises(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    struct nbi_store *a, *b;
    quantize(test_path("tied"), test_path("c.dat"), NB_QUANT_SWEEP, true, &report);
    static const enum nb_out_dtype dtypes[] = {NB_OUT_F32, NB_OUT_F16, NB_OUT_BF16};
    static const enum nbi_dtype expected[] = {NBI_F32, NBI_F16, NBI_BF16};
    for (int i = 0; i < 3; i++) {
        struct nb_convert_opts opts = {
            .src = test_path("c.dat"), .dst = test_path("c.safetensors"), .dtype = dtypes[i]};
        assert_ok(nb_convert(&opts));
        assert_ok(nbi_store_open(&a, test_path("c.dat")));
        assert_ok(nbi_store_open(&b, test_path("c.safetensors")));
        for (int64_t k = 0; k < a->count; k++) {
            const struct nbi_entry *e = &a->entries[k], *f = nbi_store_find(b, e->name);
            assert_int_equal(f->dtype, expected[i]);
            if (e->dtype != NBI_NVFP4)
                continue;
            float *x = malloc((size_t)e->count * 8), *y = x + e->count;
            assert_ok(nbi_store_read_f32(a, e, 0, e->count, x));
            assert_ok(nbi_store_read_f32(b, f, 0, e->count, y));
            for (int64_t v = 0; v < e->count; v++)
                if (dtypes[i] != NB_OUT_F16)
                    assert_true(x[v] == y[v]); /* NVFP4 values are exact in bf16 */
                else
                    assert_true(fabsf(x[v] - y[v]) <= 0x1p-25f); /* half an f16 subnormal step */
            free(x);
        }
        nbi_store_close(a);
        nbi_store_close(b);
    }
}

static void test_convert__refuses_bad_targets(void **state)
{
    (void)state;
    struct nb_convert_opts same = {.src = test_path("tied"), .dst = test_path("tied")};
    assert_fails(nb_convert(&same), NB_EINVAL, "both source and target");
}

static void test_convert__never_replaces_its_source(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    struct nb_convert_opts opts = {.src = test_path("tied/model.safetensors"),
                                   .dst = test_path("tied")};
    assert_fails(nb_convert(&opts), NB_EINVAL, "both source and target");
    convert(test_path("tied"), test_path("own.dat"), NULL, NB_LAYOUT_MODELOPT);
    opts = (struct nb_convert_opts){
        .src = test_path("own.dat"), .dst = test_path("tied"), .model_dir = test_path("tied")};
    assert_fails(nb_convert(&opts), NB_EINVAL, "both source and target");
    struct nb_quantize_opts inside = {
        .to = {.src = test_path("tied"), .dst = test_path("tied/q.dat")}};
    assert_fails(nb_quantize(&inside, &report), NB_EINVAL, "two sets of weights");
    assert_true(nbi_path_is_file(test_path("tied/model.safetensors")));
}

static void test_convert__weights_must_fit_their_config(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    convert(test_path("tied"), test_path("f.dat"), NULL, NB_LAYOUT_MODELOPT);
    struct nb_convert_opts opts = {
        .src = test_path("f.dat"), .dst = test_path("f.gguf"), .model_dir = test_path("untied")};
    assert_fails(nb_convert(&opts), NB_EFORMAT, "do not fit their config");
    opts.dst = test_path("fdir");
    assert_fails(nb_convert(&opts), NB_EFORMAT, "do not fit their config");
    struct nb_quantize_opts q = {.to = opts};
    q.to.dst = test_path("fq.dat");
    assert_fails(nb_quantize(&q, &report), NB_EFORMAT, "do not fit their config");
    opts.dst = test_path("f.safetensors"); /* stores no config: only a warning */
    assert_ok(nb_convert(&opts));
}

static void test_convert__gguf_round_trip_restores_bf16_norms(void **state)
{
    (void)state;
    convert(test_path("tied"), test_path("g1.gguf"), NULL, NB_LAYOUT_KEEP);
    convert(test_path("g1.gguf"), test_path("g2.gguf"), NULL, NB_LAYOUT_KEEP);
    convert(test_path("g2.gguf"), test_path("g.safetensors"), NULL, NB_LAYOUT_KEEP);
    assert_same_model(test_path("tied"), test_path("g.safetensors"));
}

/* The output can be read before it is renamed to the target; after an abort the target is
 * unchanged. */
static void check_reopen(const char *target)
{
    const float wanted[] = {1, 2, 3, 4};
    float got[4];
    const struct nbi_manifest_entry item = {
        .out = {.name = "model.norm.weight", .dtype = NBI_F32, .ndim = 1, .shape = {4}}};
    const struct nb_convert_opts opts = {.src = test_path("tied"), .dst = target};
    for (int commit = 0; commit < 2; commit++) {
        struct nbi_model m;
        struct nbi_model_writer x;
        struct nbi_store *store;
        assert_ok(nbi_model_open(&m, test_path("tied"), NULL));
        assert_ok(nbi_model_writer_begin(&x, &opts, &m, &item, 1));
        assert_ok(nbi_writer_put(x.writer, 0, 0, 4, wanted));
        assert_ok(nbi_model_writer_reopen(&x, &store));
        assert_int_equal(store->count, 1);
        assert_ok(nbi_store_read(store, &store->entries[0], 0, 4, got));
        assert_memory_equal(got, wanted, sizeof wanted);
        nbi_store_close(store);
        assert_same_model(test_path("tied"), target);
        if (commit)
            assert_ok(nbi_model_writer_commit(&x));
        else
            nbi_model_writer_abort(&x);
        assert_ok(nbi_store_open(&store, target));
        assert_true((store->count == 1) == (commit == 1));
        nbi_store_close(store);
        nbi_model_close(&m);
    }
    assert_int_equal(temporaries(), 0);
}

static void test_model_writer__output_can_be_read_before_commit(void **state)
{
    static const char *const targets[] = {"seen.dat", "seen.safetensors", "seen"};
    (void)state;
    for (int i = 0; i < 3; i++) {
        char target[512];
        snprintf(target, sizeof target, "%s", test_path(targets[i]));
        convert(test_path("tied"), target, NULL, NB_LAYOUT_KEEP);
        check_reopen(target);
    }
}

/* Asserts that the file contains these words. */
static void assert_holds(const char *path, const char *words)
{
    char *text;
    size_t len;
    assert_ok(nbi_file_read(path, 100000, &text, &len));
    if (!strstr(text, words))
        fail_msg("'%s' is not in %s", words, path);
    free(text);
}

static void test_convert__a_separate_head_unties_the_config(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    quantize(test_path("tied"), test_path("t.dat"), NB_QUANT_RTN, false, &report);
    struct nb_convert_opts opts = {.src = test_path("t.dat"),
                                   .dst = test_path("t2.dat"),
                                   .dtype = NB_OUT_BF16,
                                   .model_dir = test_path("tied")};
    assert_ok(nb_convert(&opts));
    convert(test_path("t2.dat"), test_path("t2"), test_path("tied"), NB_LAYOUT_KEEP);
    assert_holds(test_path("t2/config.json"), "\"tie_word_embeddings\": false");
    assert_holds(test_path("t2/config.json"), "\"rms_norm_eps\": 1e-6");
}

static void test_convert__keeps_the_layout(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    struct nbi_store *s;
    quantize(test_path("tied"), test_path("k.dat"), NB_QUANT_RTN, true, &report);
    convert(test_path("k.dat"), test_path("k.safetensors"), NULL, NB_LAYOUT_COMPRESSED_TENSORS);
    convert(test_path("k.safetensors"), test_path("k2.safetensors"), NULL, NB_LAYOUT_KEEP);
    assert_same_bytes(test_path("k.safetensors"), test_path("k2.safetensors"));
    assert_ok(nbi_store_open(&s, test_path("k2.safetensors")));
    assert_int_equal(s->layout, NBI_LAYOUT_COMPRESSED_TENSORS);
    nbi_store_close(s);
}

static void test_convert__needs_a_config_for_gguf(void **state)
{
    (void)state;
    convert(test_path("tied"), test_path("alone.dat"), NULL, NB_LAYOUT_MODELOPT);
    struct nb_convert_opts opts = {.src = test_path("alone.dat"), .dst = test_path("alone.gguf")};
    assert_fails(nb_convert(&opts), NB_ENOTFOUND, "--model-dir");
    opts.dst = test_path("what.bin");
    assert_fails(nb_convert(&opts), NB_EINVAL, "ends in .dat");
    opts.dst = test_path("x.gguf");
    opts.model_dir = test_path("nowhere");
    assert_fails(nb_convert(&opts), NB_ENOTFOUND, "config.json");
}

/* Overwrites one byte of a file. */
static void poke(const char *path, uint64_t offset, uint8_t byte)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)offset, SEEK_SET), 0);
    assert_int_equal(fputc(byte, f), byte);
    fclose(f);
}

static void test_verify__finds_bad_values(void **state)
{
    (void)state;
    struct nb_quantize_report report;
    struct nb_file *f;
    struct nbi_store *s;
    quantize(test_path("tied"), test_path("v.dat"), NB_QUANT_RTN, false, &report);
    assert_ok(nb_file_open(&f, test_path("v.dat"), NULL));
    assert_ok(nb_file_verify(f, 2, NULL, NULL, NULL));
    nb_file_close(f);

    assert_ok(nbi_store_open(&s, test_path("v.dat")));
    uint64_t scale = nbi_store_find(s, "model.layers.2.mlp.up_proj.weight")->scale.offset;
    uint64_t norm = nbi_store_find(s, "model.norm.weight")->data.offset;
    nbi_store_close(s);
    static const struct {
        uint8_t byte;
        const char *words;
    } rows[] = {{0x00, "zero"}, {0x7F, "NaN"}, {0xFF, "NaN"}, {0xB8, "negative"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        poke(test_path("v.dat"), scale + 5, rows[i].byte);
        assert_ok(nb_file_open(&f, test_path("v.dat"), NULL));
        assert_fails(nb_file_verify(f, 2, NULL, NULL, NULL), NB_EVALUE, rows[i].words);
        assert_non_null(strstr(nb_last_error(), "block scale 5 of tensor "
                                                "'model.layers.2.mlp.up_proj.weight'"));
        nb_file_close(f);
    }
    poke(test_path("v.dat"), scale + 5, 0x01);
    poke(test_path("v.dat"), norm + 7, 0xFF);
    poke(test_path("v.dat"), norm + 6, 0xC0);
    assert_ok(nb_file_open(&f, test_path("v.dat"), NULL));
    assert_fails(nb_file_verify(f, 2, NULL, NULL, NULL), NB_EVALUE,
                 "'model.norm.weight' holds NaN at element 3");
    nb_file_close(f);
    struct nb_quantize_opts opts = {.to = {.src = test_path("v.dat"), .dst = test_path("v2.dat")}};
    assert_ok(nb_quantize(&opts, &report)); /* norms are copied, whatever their values */
}

static void test_quantize__refuses_nan(void **state)
{
    (void)state;
    struct nbi_store *s;
    struct nb_quantize_report report;
    convert(test_path("tied"), test_path("nan.dat"), NULL, NB_LAYOUT_MODELOPT);
    assert_ok(nbi_store_open(&s, test_path("nan.dat")));
    uint64_t at = nbi_store_find(s, "model.layers.1.mlp.gate_proj.weight")->data.offset;
    nbi_store_close(s);
    poke(test_path("nan.dat"), at + 2 * 1000, 0x80);
    poke(test_path("nan.dat"), at + 2 * 1000 + 1, 0x7F); /* infinity in bf16 */
    struct nb_quantize_opts opts = {
        .to = {.src = test_path("nan.dat"), .dst = test_path("nan2.dat")}};
    assert_fails(nb_quantize(&opts, &report), NB_EVALUE,
                 "'model.layers.1.mlp.gate_proj.weight' holds infinity at element 1000");
    assert_false(nbi_path_is_file(test_path("nan2.dat")));
}

static void test_verify__finds_bad_names_and_shapes(void **state)
{
    (void)state;
    struct nb_file *f;
    convert(test_path("untied"), test_path("n.dat"), NULL, NB_LAYOUT_MODELOPT);
    assert_ok(nb_file_open(&f, test_path("n.dat"), test_path("tied")));
    assert_fails(nb_file_verify(f, 2, NULL, NULL, NULL), NB_EFORMAT, "is missing");
    nb_file_close(f);
    convert(test_path("tied"), test_path("n.dat"), NULL, NB_LAYOUT_MODELOPT);
    assert_ok(nb_file_open(&f, test_path("n.dat"), test_path("untied")));
    assert_fails(nb_file_verify(f, 2, NULL, NULL, NULL), NB_EFORMAT, "is not part of this model");
    nb_file_close(f);
}

static void test_synth__is_deterministic(void **state)
{
    (void)state;
    struct nb_synth_opts opts = {
        .preset = "tiny", .dst = test_path("again"), .seed = 5, .threads = 1};
    assert_ok(nb_synth(&opts));
    assert_same_bytes(test_path("tied/model.safetensors"), test_path("again/model.safetensors"));
    assert_fails(nb_synth(&opts), NB_EINVAL, "is not empty");
    opts.dst = test_path("other");
    opts.preset = "huge";
    assert_fails(nb_synth(&opts), NB_EINVAL, "no size 'huge'");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_convert__plain_models_survive_every_format),
        cmocka_unit_test(test_convert__nvfp4_survives_every_layout),
        cmocka_unit_test(test_convert__config_describes_the_quantisation),
        cmocka_unit_test(test_quantize__head_follows_the_embedding),
        cmocka_unit_test(test_quantize__an_embedding_with_a_separate_head_is_a_lookup),
        cmocka_unit_test(test_quantize__skips_patterns_and_shares_fused_scales),
        cmocka_unit_test(test_quantize__report_does_not_depend_on_threads),
        cmocka_unit_test(test_convert__dtype_option_casts_and_dequantises),
        cmocka_unit_test(test_convert__refuses_bad_targets),
        cmocka_unit_test(test_convert__never_replaces_its_source),
        cmocka_unit_test(test_convert__weights_must_fit_their_config),
        cmocka_unit_test(test_convert__gguf_round_trip_restores_bf16_norms),
        cmocka_unit_test(test_model_writer__output_can_be_read_before_commit),
        cmocka_unit_test(test_convert__a_separate_head_unties_the_config),
        cmocka_unit_test(test_convert__keeps_the_layout),
        cmocka_unit_test(test_convert__needs_a_config_for_gguf),
        cmocka_unit_test(test_verify__finds_bad_values),
        cmocka_unit_test(test_quantize__refuses_nan),
        cmocka_unit_test(test_verify__finds_bad_names_and_shapes),
        cmocka_unit_test(test_synth__is_deterministic),
    };
    return cmocka_run_group_tests_name("convert", tests, make_models, remove_test_dir);
}
