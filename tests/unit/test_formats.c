/* test_formats.c - readers against bytes written by hand, and writers against the same bytes.
 *
 * These are the literal layouts; random models and other libraries are covered elsewhere
 * (tests/unit/test_convert.c, tests/interop). */
#include "base/str.h"
#include "convert/model_writer.h"
#include "convert/staging_dir.h"
#include "formats/store.h"
#include "formats/writer.h"
#include "model/model.h"
#include "unit/support.h"

/* Two NVFP4 rows of 32 values, shared by all cases: 16 bytes of codes and 2 scales per row. */
static void make_codes(uint8_t codes[32], uint8_t scales[4])
{
    for (int i = 0; i < 32; i++)
        codes[i] = (uint8_t)(i * 37 + 11);
    static const uint8_t s[4] = {0x01, 0x38, 0x7E, 0x20};
    memcpy(scales, s, 4);
}

/* ---- .dat ---- */

/* Count 3; embedding f16 [1, 2]; q_proj codes and scales, following docs/FORMATS.md. */
static size_t make_dat(uint8_t *out)
{
    uint8_t codes[32], scales[4];
    struct nbi_str s = {0};
    make_codes(codes, scales);
    nbi_str_append(&s, "\x03\x19model.embed_tokens.weight\x05\x02\x01\x02\x00\x3C\x00\xC0", 35);
    nbi_str_append(&s, "\x2Cmodel.layers.0.self_attn.q_proj.weight.qdata\x00\x02\x02\x10", 49);
    nbi_str_append(&s, codes, 32);
    nbi_str_append(&s, "\x2Cmodel.layers.0.self_attn.q_proj.weight.scale\x65\x02\x02\x02", 49);
    nbi_str_append(&s, scales, 4);
    memcpy(out, s.p, s.len);
    size_t n = s.len;
    nbi_str_release(&s);
    return n;
}

static void test_dat__reads_a_literal_file(void **state)
{
    (void)state;
    uint8_t file[512], codes[32], scales[4], q[32], s[4];
    size_t n = make_dat(file);
    struct nbi_store *store;
    make_codes(codes, scales);
    assert_ok(nbi_store_open_memory(&store, NBI_FORMAT_DAT, file, n));
    assert_int_equal(store->count, 2);
    const struct nbi_entry *e = nbi_store_find(store, "model.embed_tokens.weight");
    assert_non_null(e);
    assert_int_equal(e->dtype, NBI_F16);
    assert_int_equal(e->data.offset, 31);
    float f[2];
    assert_ok(nbi_store_read_f32(store, e, 0, 2, f));
    assert_true(f[0] == 1.0f && f[1] == -2.0f);
    e = nbi_store_find(store, "model.layers.0.self_attn.q_proj.weight");
    assert_non_null(e);
    assert_int_equal(e->dtype, NBI_NVFP4);
    assert_int_equal(e->shape[0], 2);
    assert_int_equal(e->shape[1], 32);
    assert_ok(nbi_store_read_nvfp4(store, e, 0, 64, q, s));
    assert_memory_equal(q, codes, 32);
    assert_memory_equal(s, scales, 4);
    float all[64];
    assert_ok(nbi_store_read_f32(store, e, 0, 64, all));
    /* Byte 0 is 0x0B: value 0 is code 11 = -1.5, value 1 code 0; the first scale is 2^-9. */
    assert_true(all[0] == -1.5f * 0x1p-9f && all[1] == 0.0f);
    /* Byte 16 (row 1) is 16 * 37 + 11 = 0x5B: -1.5 and 3, times 448. */
    assert_true(all[32] == -1.5f * 448 && all[33] == 3.0f * 448);
    nbi_store_close(store);
}

static void put_all(struct nbi_writer *w, const uint8_t *codes, const uint8_t *scales)
{
    static const uint16_t embed[2] = {0x3C00, 0xC000};
    assert_ok(nbi_writer_put(w, 0, 0, 2, embed));
    assert_ok(nbi_writer_put_nvfp4(w, 1, 0, 64, codes, scales));
}

static const struct nbi_tensor_spec outs[2] = {
    {.name = "model.embed_tokens.weight", .dtype = NBI_F16, .ndim = 2, .shape = {1, 2}},
    {.name = "model.layers.0.self_attn.q_proj.weight",
     .dtype = NBI_NVFP4,
     .ndim = 2,
     .shape = {2, 32}},
};

static void test_dat__writes_the_literal_file(void **state)
{
    (void)state;
    uint8_t expected[512], codes[32], scales[4];
    size_t n = make_dat(expected), len;
    char *bytes;
    struct nbi_writer *w;
    make_codes(codes, scales);
    struct nbi_writer_opts opts = {.format = NBI_FORMAT_DAT, .path = test_path("w.dat")};
    assert_ok(nbi_writer_begin(&w, &opts, outs, 2));
    put_all(w, codes, scales);
    assert_ok(nbi_writer_commit(w));
    assert_ok(nbi_file_read(test_path("w.dat"), 1000, &bytes, &len));
    assert_int_equal(len, n);
    assert_memory_equal(bytes, expected, n);
    free(bytes);
}

/* A .dat with one NVFP4 weight whose block scales have type `code`. */
static size_t dat_with_scales(uint8_t *out, uint8_t code, const void *scales, size_t bytes,
                              const char *stem)
{
    uint8_t codes[32], unused[4];
    struct nbi_str s = {0};
    make_codes(codes, unused);
    uint8_t len = (uint8_t)(strlen(stem) + 6);
    nbi_str_append(&s, "\x02", 1);
    nbi_str_append(&s, &len, 1);
    nbi_str_printf(&s, "%s.qdata", stem);
    nbi_str_append(&s, "\x00\x02\x02\x10", 4);
    nbi_str_append(&s, codes, 32);
    nbi_str_append(&s, &len, 1);
    nbi_str_printf(&s, "%s.scale", stem);
    nbi_str_append(&s, &code, 1);
    nbi_str_append(&s, "\x02\x02\x02", 3);
    nbi_str_append(&s, scales, bytes);
    memcpy(out, s.p, s.len);
    size_t n = s.len;
    nbi_str_release(&s);
    return n;
}

static void test_dat__reads_legacy_scale_types(void **state)
{
    (void)state;
    static const uint16_t f16[4] = {0x1800, 0x3C00, 0x5F00, 0x2C00}; /* 2^-9, 1, 448, 2^-4 */
    static const uint16_t bf16[4] = {0x3B00, 0x3F80, 0x43E0, 0x3D80};
    static const float f32[4] = {0x1p-9f, 1, 448, 0x1p-4f};
    static const uint8_t e4m3[4] = {0x01, 0x38, 0x7E, 0x18};
    static const struct {
        uint8_t code;
        const void *scales;
        size_t bytes;
    } rows[] = {{5, f16, 8}, {15, bf16, 8}, {6, f32, 16}, {0, e4m3, 4}, {101, e4m3, 4}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int with_weight = 0; with_weight < 2; with_weight++) {
            uint8_t file[512], q[32], s[4];
            const char *stem = with_weight ? "lm_head.weight" : "lm_head";
            size_t n = dat_with_scales(file, rows[i].code, rows[i].scales, rows[i].bytes, stem);
            struct nbi_store *store;
            assert_ok(nbi_store_open_memory(&store, NBI_FORMAT_DAT, file, n));
            const struct nbi_entry *e = nbi_store_find(store, "lm_head.weight");
            assert_non_null(e);
            assert_ok(nbi_store_read_nvfp4(store, e, 0, 64, q, s));
            assert_memory_equal(s, e4m3, 4);
            float y[64];
            assert_ok(nbi_store_read_f32(store, e, 0, 64, y));
            assert_true(y[0] == -1.5f * 0x1p-9f && y[32] == -1.5f * 448);
            nbi_store_close(store);
        }
}

static void test_dat__scales_outside_e4m3_can_only_be_dequantised(void **state)
{
    (void)state;
    static const float f32[4] = {0.3f, 1, 448, 0.0625f};
    uint8_t file[512], q[32], s[4];
    float y[64];
    size_t n = dat_with_scales(file, 6, f32, sizeof f32, "lm_head.weight");
    struct nbi_store *store;
    assert_ok(nbi_store_open_memory(&store, NBI_FORMAT_DAT, file, n));
    assert_fails(nbi_store_read_nvfp4(store, &store->entries[0], 0, 64, q, s), NB_EVALUE,
                 "not an E4M3 value");
    assert_ok(nbi_store_read_f32(store, &store->entries[0], 0, 64, y));
    assert_true(y[0] == -1.5f * 0.3f);
    nbi_store_close(store);
}

/* ---- safetensors ---- */

static void write_safetensors(const char *path, enum nbi_layout layout, bool two_level)
{
    uint8_t codes[32], scales[4];
    struct nbi_tensor_spec list[2] = {outs[0], outs[1]};
    struct nbi_writer *w;
    make_codes(codes, scales);
    list[1].two_level = two_level;
    struct nbi_writer_opts opts = {
        .format = NBI_FORMAT_SAFETENSORS, .layout = layout, .path = path};
    assert_ok(nbi_writer_begin(&w, &opts, list, 2));
    put_all(w, codes, scales);
    if (two_level)
        assert_ok(nbi_writer_put_tensor_scale(w, 1, 0.25f, 0));
    assert_ok(nbi_writer_commit(w));
}

static void test_safetensors__writes_the_literal_header_in_order(void **state)
{
    (void)state;
    char *bytes;
    size_t len;
    /* f32 first, then f16, then bytes by name; padded to a multiple of 8. */
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"model.layers.0.self_attn.q_proj.weight_scale_2\":"
        "{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
        "\"model.embed_tokens.weight\":"
        "{\"dtype\":\"F16\",\"shape\":[1,2],\"data_offsets\":[4,8]},"
        "\"model.layers.0.self_attn.q_proj.weight\":"
        "{\"dtype\":\"U8\",\"shape\":[2,16],\"data_offsets\":[8,40]},"
        "\"model.layers.0.self_attn.q_proj.weight_scale\":"
        "{\"dtype\":\"F8_E4M3\",\"shape\":[2,2],\"data_offsets\":[40,44]}}";
    write_safetensors(test_path("m.safetensors"), NBI_LAYOUT_MODELOPT, true);
    assert_ok(nbi_file_read(test_path("m.safetensors"), 4096, &bytes, &len));
    uint64_t n;
    memcpy(&n, bytes, 8);
    assert_int_equal(n % 8, 0);
    assert_int_equal(len, 8 + n + 44);
    assert_memory_equal(bytes + 8, header, sizeof header - 1);
    for (size_t i = sizeof header - 1; i < n; i++)
        assert_int_equal(bytes[8 + i], ' ');
    float scale;
    memcpy(&scale, bytes + 8 + n, 4);
    assert_true(scale == 0.25f);
    free(bytes);
}

static void test_safetensors__layouts_give_the_same_entry(void **state)
{
    (void)state;
    static const enum nbi_layout layouts[] = {NBI_LAYOUT_MODELOPT, NBI_LAYOUT_COMPRESSED_TENSORS};
    uint8_t codes[32], scales[4], q[32], s[4];
    make_codes(codes, scales);
    for (int i = 0; i < 4; i++) {
        const char *path = test_path("l.safetensors");
        struct nbi_store *store;
        write_safetensors(path, layouts[i & 1], i >= 2);
        assert_ok(nbi_store_open(&store, path));
        assert_int_equal(store->layout, layouts[i & 1]);
        assert_int_equal(store->count, 2);
        const struct nbi_entry *e = nbi_store_find(store, outs[1].name);
        assert_non_null(e);
        assert_true(e->tensor_scale == (i >= 2 ? 0.25f : 1.0f));
        assert_int_equal(e->two_level, i >= 2);
        assert_ok(nbi_store_read_nvfp4(store, e, 0, 64, q, s));
        assert_memory_equal(q, codes, 32);
        assert_memory_equal(s, scales, 4);
        nbi_store_close(store);
    }
}

static void test_safetensors__compressed_tensors_store_the_divisor(void **state)
{
    (void)state;
    char *bytes;
    size_t len;
    write_safetensors(test_path("c.safetensors"), NBI_LAYOUT_COMPRESSED_TENSORS, true);
    assert_ok(nbi_file_read(test_path("c.safetensors"), 4096, &bytes, &len));
    uint64_t n;
    float divisor;
    memcpy(&n, bytes, 8);
    memcpy(&divisor, bytes + 8 + n, 4);
    assert_true(divisor == 4.0f);
    assert_non_null(strstr(bytes + 8, "q_proj.weight_packed\""));
    assert_non_null(strstr(bytes + 8, "weight_global_scale\":{\"dtype\":\"F32\",\"shape\":[1]"));
    free(bytes);
}

static void test_safetensors__writes_shards_with_an_index(void **state)
{
    (void)state;
    struct nbi_tensor_spec list[3] = {
        {.name = "a", .dtype = NBI_F32, .ndim = 1, .shape = {8}},
        {.name = "b", .dtype = NBI_F32, .ndim = 1, .shape = {8}},
        {.name = "c", .dtype = NBI_F32, .ndim = 1, .shape = {8}},
    };
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8];
    struct nbi_writer *w;
    struct nbi_staging_dir stage;
    assert_ok(nbi_staging_dir_begin(&stage, test_path("sharded")));
    struct nbi_writer_opts opts = {
        .format = NBI_FORMAT_SAFETENSORS, .path = stage.temp, .shard_bytes = 64};
    assert_ok(nbi_writer_begin(&w, &opts, list, 3));
    for (int i = 0; i < 3; i++) {
        x[0] = (float)i;
        assert_ok(nbi_writer_put(w, i, 0, 8, x));
    }
    assert_ok(nbi_writer_commit(w));
    assert_ok(nbi_staging_dir_commit(&stage));
    assert_true(nbi_path_is_file(test_path("sharded/model-00001-of-00002.safetensors")));
    assert_true(nbi_path_is_file(test_path("sharded/model-00002-of-00002.safetensors")));
    struct nbi_store *store;
    assert_ok(nbi_store_open(&store, test_path("sharded")));
    assert_int_equal(store->file_count, 2);
    assert_ok(nbi_store_read_f32(store, nbi_store_find(store, "c"), 0, 8, y));
    assert_true(y[0] == 2 && y[7] == 8);
    nbi_store_close(store);
}

/* ---- GGUF ---- */

static void test_gguf__writes_blocks_and_the_tensor_table(void **state)
{
    (void)state;
    struct nbi_tensor_spec t = {.name = "model.layers.7.mlp.down_proj.weight",
                                .dtype = NBI_NVFP4,
                                .ndim = 2,
                                .shape = {1, 64},
                                .two_level = true};
    uint8_t codes[32], scales[4];
    make_codes(codes, scales);
    struct nbi_gguf_meta *meta;
    struct nbi_writer *w;
    assert_ok(nbi_gguf_meta_new(&meta));
    nbi_gguf_meta_string(meta, "general.architecture", "qwen3");
    struct nbi_writer_opts opts = {.format = NBI_FORMAT_GGUF,
                                   .path = test_path("x.gguf"),
                                   .meta = meta,
                                   .gguf_name = nbi_param_to_gguf};
    assert_ok(nbi_writer_begin(&w, &opts, &t, 1));
    assert_ok(nbi_writer_put_nvfp4(w, 0, 0, 64, codes, scales));
    assert_ok(nbi_writer_put_tensor_scale(w, 0, 0.5f, 0));
    assert_ok(nbi_writer_commit(w));
    nbi_gguf_meta_free(meta);

    char *bytes;
    size_t len;
    assert_ok(nbi_file_read(test_path("x.gguf"), 4096, &bytes, &len));
    assert_memory_equal(bytes, "GGUF\3\0\0\0\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 24);
    const uint8_t *block = (const uint8_t *)bytes + len - 64 - 32; /* 36 bytes padded to 64 */
    assert_memory_equal(block, scales, 4);
    /* Value 0 is the low nibble of byte 0, value 8 the low nibble of byte 4. */
    assert_int_equal(block[4], (codes[0] & 15) | (codes[4] & 15) << 4);
    assert_int_equal(block[5], codes[0] >> 4 | (codes[4] >> 4) << 4);
    free(bytes);

    struct nbi_store *store;
    uint8_t q[32], s[4];
    assert_ok(nbi_model_open_store(&store, test_path("x.gguf")));
    assert_int_equal(store->count, 1);
    assert_string_equal(store->entries[0].name, t.name);
    assert_true(store->entries[0].tensor_scale == 0.5f);
    assert_ok(nbi_store_read_nvfp4(store, &store->entries[0], 0, 64, q, s));
    assert_memory_equal(q, codes, 32);
    assert_memory_equal(s, scales, 4);
    nbi_store_close(store);
}

static void test_gguf__refuses_what_it_cannot_hold(void **state)
{
    (void)state;
    static const struct {
        struct nbi_tensor_spec out;
        const char *words;
    } rows[] = {
        {{.name = "lm_head.weight", .dtype = NBI_NVFP4, .ndim = 2, .shape = {2, 32}},
         "blocks of 64"},
        {{.name = "what.is.this", .dtype = NBI_F32, .ndim = 1, .shape = {4}}, "no name in a GGUF"},
        {{.name = "lm_head.weight", .dtype = NBI_BOOL, .ndim = 1, .shape = {4}}, "cannot hold"},
    };
    struct nbi_gguf_meta *meta;
    assert_ok(nbi_gguf_meta_new(&meta));
    struct nbi_writer_opts opts = {.format = NBI_FORMAT_GGUF,
                                   .path = test_path("no.gguf"),
                                   .meta = meta,
                                   .gguf_name = nbi_param_to_gguf};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct nbi_writer *w;
        assert_fails(nbi_writer_begin(&w, &opts, &rows[i].out, 1), NB_EUNSUPPORTED, rows[i].words);
        assert_false(nbi_path_is_file(test_path("no.gguf")));
    }
    nbi_gguf_meta_free(meta);
    struct nbi_model m = {.has_config = true};
    struct nbi_model_writer x;
    const struct nb_convert_opts to = {.src = "", .dst = test_path("no.gguf")};
    const struct nbi_manifest_entry embedding = {.out = {.name = "model.embed_tokens.weight",
                                                         .dtype = NBI_NVFP4,
                                                         .ndim = 2,
                                                         .shape = {2, 64},
                                                         .two_level = true}};
    assert_fails(nbi_model_writer_begin(&x, &to, &m, &embedding, 1), NB_EUNSUPPORTED,
                 "no tensor scale for the token embedding");
    assert_false(nbi_path_is_file(test_path("no.gguf")));
}

static void test_names__translate_both_ways(void **state)
{
    (void)state;
    char out[128];
    assert_true(nbi_param_to_gguf("model.layers.35.self_attn.q_norm.weight", out, sizeof out));
    assert_string_equal(out, "blk.35.attn_q_norm.weight");
    assert_true(nbi_param_from_gguf("blk.0.ffn_norm.weight", out, sizeof out));
    assert_string_equal(out, "model.layers.0.post_attention_layernorm.weight");
    assert_true(nbi_param_from_gguf("output.weight", out, sizeof out));
    assert_string_equal(out, "lm_head.weight");
    assert_false(nbi_param_to_gguf("model.layers.01.mlp.up_proj.weight", out, sizeof out));
    assert_false(nbi_param_to_gguf("model.layers.x.mlp.up_proj.weight", out, sizeof out));
    assert_false(nbi_param_from_gguf("blk.99999.ffn_up.weight", out, sizeof out));
    assert_false(nbi_param_from_gguf("rope_freqs.weight", out, sizeof out));
}

/* ---- names of files and tensors ---- */

static void test_formats__endings_name_the_format(void **state)
{
    (void)state;
    enum nbi_format format;
    for (int i = 0; i < NBI_FORMATS; i++) {
        char name[64];
        snprintf(name, sizeof name, "a%s", nbi_formats[i].ending);
        assert_true(nbi_format_of_path(name, &format) && (int)format == i);
        assert_true(nbi_format_of_file(name, &format) && (int)format == i);
    }
    assert_true(nbi_format_of_path("A.GGUF", &format) && format == NBI_FORMAT_GGUF);
    assert_false(nbi_format_of_file("A.GGUF", &format));
    assert_false(nbi_format_of_path("model.bin", &format));
    assert_fails(nbi_format_detect("model.bin", &format), NB_EUNSUPPORTED, "cannot tell what");
}

static void test_formats__stem_lacks_a_final_weight(void **state)
{
    (void)state;
    assert_int_equal(nbi_stem_length("a.weight"), 1);
    assert_int_equal(nbi_stem_length("a.weight.b"), 10);
    assert_int_equal(nbi_stem_length("a"), 1);
    assert_true(nbi_is_weight_name("a.weight"));
    assert_false(nbi_is_weight_name("a.weight_scale"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dat__reads_a_literal_file),
        cmocka_unit_test(test_dat__writes_the_literal_file),
        cmocka_unit_test(test_dat__reads_legacy_scale_types),
        cmocka_unit_test(test_dat__scales_outside_e4m3_can_only_be_dequantised),
        cmocka_unit_test(test_safetensors__writes_the_literal_header_in_order),
        cmocka_unit_test(test_safetensors__layouts_give_the_same_entry),
        cmocka_unit_test(test_safetensors__compressed_tensors_store_the_divisor),
        cmocka_unit_test(test_safetensors__writes_shards_with_an_index),
        cmocka_unit_test(test_gguf__writes_blocks_and_the_tensor_table),
        cmocka_unit_test(test_gguf__refuses_what_it_cannot_hold),
        cmocka_unit_test(test_names__translate_both_ways),
        cmocka_unit_test(test_formats__endings_name_the_format),
        cmocka_unit_test(test_formats__stem_lacks_a_final_weight),
    };
    return cmocka_run_group_tests_name("formats", tests, make_test_dir, remove_test_dir);
}
