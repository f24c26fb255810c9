/* test_hostile_safetensors.c - .safetensors files with one mistake each: the frame, the header, the
 * quantised layouts, and the index of a sharded model. */
#include <sys/stat.h>
#include <unistd.h>

#include "unit/hostile.h"

/* A file: length, header, `data` zero bytes. */
static struct bytes file_of(const char *header, size_t data)
{
    struct bytes b = {0};
    put_u64(&b, strlen(header));
    put_text(&b, header);
    put_zeros(&b, data);
    return b;
}

static void refuse_header(const char *header, size_t data, const char *words)
{
    struct bytes b = file_of(header, data);
    refuse(NBI_FORMAT_SAFETENSORS, &b, words);
}

struct header_case {
    const char *header;
    size_t data;
    const char *words;
};

static void refuse_all(const struct header_case *cases, size_t n)
{
    for (size_t i = 0; i < n; i++)
        refuse_header(cases[i].header, cases[i].data, cases[i].words);
}

/* One tensor "a" with the given fields. */
#define TENSOR(dtype, shape, offsets)                                                              \
    "{\"a\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void test_hostile_safetensors__accepts_the_unmodified_file(void **state)
{
    (void)state;
    struct bytes b = file_of(TENSOR("\"F32\"", "[2]", "[0,8]"), 8);
    accept(NBI_FORMAT_SAFETENSORS, &b);
}

/* ---- the frame ---- */

static void test_hostile_safetensors__refuses_header_lengths(void **state)
{
    (void)state;
    const uint64_t lengths[] = {
        3, 100000001, (uint64_t)1 << 32, (uint64_t)1 << 63, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < LENGTH(lengths); i++) {
        struct bytes b = {0};
        put_u64(&b, lengths[i]);
        put_text(&b, "{}");
        refuse(NBI_FORMAT_SAFETENSORS, &b, "the header claims");
    }
}

/* The limit applies even if the file is long enough. */
static void test_hostile_safetensors__refuses_headers_over_100_mb(void **state)
{
    (void)state;
    const size_t n = 100000001;
    uint8_t *p = calloc(1, 8 + n);
    assert_non_null(p);
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(n >> 8 * i);
    struct nbi_store *store;
    assert_int_not_equal(nbi_store_open_memory(&store, NBI_FORMAT_SAFETENSORS, p, 8 + n), NB_OK);
    expect_message("limit 100000000", "100 MB");
    free(p);
}

static void test_hostile_safetensors__refuses_short_files(void **state)
{
    (void)state;
    for (size_t n = 0; n < 8; n++) {
        struct bytes b = {0};
        put_zeros(&b, n);
        refuse(NBI_FORMAT_SAFETENSORS, &b, "file ends early");
    }
    struct bytes b = {0};
    put_zeros(&b, 8);
    refuse(NBI_FORMAT_SAFETENSORS, &b, "does not start with '{'");
}

static void test_hostile_safetensors__refuses_what_is_not_a_json_object(void **state)
{
    (void)state;
    static const struct header_case cases[] = {
        {"not json", 0, "does not start with '{'"},
        {"[]", 0, "does not start with '{'"},
        {"\"{}\"", 0, "does not start with '{'"},
        {" {}", 0, "does not start with '{'"},
        {"{} x", 0, "does not start with '{'"},
        {"{}\n", 0, "does not start with '{'"}, /* only spaces are padding */
        {"{}{}", 0, "invalid JSON"},
        {"{\"a\"}", 0, "invalid JSON"},
        {"{\"a\":1,}", 0, "invalid JSON"},
        {"{\"\xff\":1}", 0, "invalid JSON"},
    };
    refuse_all(cases, LENGTH(cases));
}

static void test_hostile_safetensors__refuses_a_nul_after_the_json(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_u64(&b, 3);
    put_bytes(&b, "{}\0", 3);
    refuse(NBI_FORMAT_SAFETENSORS, &b, "does not start with '{'");
}

static void test_hostile_safetensors__refuses_deep_nesting(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_u64(&b, 5 + 2 * 100 + 1);
    put_text(&b, "{\"a\":");
    for (int i = 0; i < 200; i++)
        put_text(&b, i < 100 ? "[" : "]");
    put_text(&b, "}");
    refuse(NBI_FORMAT_SAFETENSORS, &b, "nested deeper than");
}

/* ---- keys ---- */

static void test_hostile_safetensors__refuses_duplicate_keys(void **state)
{
    (void)state;
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                  "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
                  1, "duplicate object key");
    refuse_header("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],"
                  "\"data_offsets\":[0,1]}}",
                  1, "duplicate object key");
}

static void test_hostile_safetensors__refuses_missing_and_extra_fields(void **state)
{
    (void)state;
    static const struct header_case cases[] = {
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "and nothing else"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "and nothing else"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "and nothing else"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1,
         "and nothing else"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"x\":1}}", 1, "'data_offsets' must be"},
        {"{\"a\":{\"x\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "'dtype' is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"x\":[1],\"data_offsets\":[0,1]}}", 1, "'shape' must be"},
        {"{\"a\":null}", 0, "and nothing else"},
        {"{\"a\":[1,2,3]}", 0, "and nothing else"},
    };
    refuse_all(cases, LENGTH(cases));
}

static void test_hostile_safetensors__refuses_names_that_are_not_text(void **state)
{
    (void)state;
#define NAMED(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}"
    static const struct header_case cases[] = {
        {NAMED("a\\u0000b"), 1, "NUL"},
        {NAMED(""), 1, "not printable text"},
        {NAMED("\\u001b[2J"), 1, "not printable text"},
        {NAMED("\\u007f"), 1, "not printable text"},
        {NAMED("\\ud800"), 1, "invalid JSON"},
    };
    refuse_all(cases, LENGTH(cases));
#undef NAMED
}

static void test_hostile_safetensors__refuses_a_name_of_2000_bytes(void **state)
{
    (void)state;
    char header[2200], name[2001];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    snprintf(header, sizeof header,
             "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", name);
    refuse_header(header, 1, "a tensor name of 2000 bytes");
}

static void test_hostile_safetensors__refuses_metadata_that_is_not_text(void **state)
{
    (void)state;
    static const struct header_case cases[] = {
        {"{\"__metadata__\":{\"format\":1}}", 0, "must be a string"},
        {"{\"__metadata__\":{\"format\":null}}", 0, "must be a string"},
        {"{\"__metadata__\":{\"format\":{}}}", 0, "must be a string"},
        {"{\"__metadata__\":[]}", 0, "must be an object"},
        {"{\"__metadata__\":\"pt\"}", 0, "must be an object"},
    };
    refuse_all(cases, LENGTH(cases));
}

/* ---- types, shapes, offsets ---- */

static void test_hostile_safetensors__refuses_unknown_types(void **state)
{
    (void)state;
    static const struct header_case cases[] = {
        {TENSOR("\"F4\"", "[1]", "[0,1]"), 1, "element type 'F4' is not supported"},
        {TENSOR("\"f32\"", "[1]", "[0,4]"), 4, "element type 'f32' is not supported"},
        {TENSOR("\"\"", "[1]", "[0,1]"), 1, "is not supported"},
        {TENSOR("1", "[1]", "[0,1]"), 1, "'dtype' must be a string"},
        {TENSOR("null", "[1]", "[0,1]"), 1, "'dtype' is missing"},
    };
    refuse_all(cases, LENGTH(cases));
}

static void test_hostile_safetensors__refuses_bad_shapes(void **state)
{
    (void)state;
    static const struct header_case cases[] = {
        {TENSOR("\"U8\"", "[-1]", "[0,1]"), 1, "not a whole number >= 0"},
        {TENSOR("\"U8\"", "[1.0]", "[0,1]"), 1, "not a whole number >= 0"},
        {TENSOR("\"U8\"", "[\"1\"]", "[0,1]"), 1, "not a whole number >= 0"},
        {TENSOR("\"U8\"", "[null]", "[0,1]"), 1, "not a whole number >= 0"},
        {TENSOR("\"U8\"", "1", "[0,1]"), 1, "'shape' must be a list"},
        {TENSOR("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "'shape' must be a list of at most"},
        {TENSOR("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0, "too many elements"},
        {TENSOR("\"F64\"", "[2305843009213693952]", "[0,0]"), 0, "too many elements"},
        {TENSOR("\"U8\"", "[9223372036854775807,2]", "[0,0]"), 0, "too many elements"},
        {TENSOR("\"U8\"", "[9223372036854775808]", "[0,0]"), 0, "is too large"},
    };
    refuse_all(cases, LENGTH(cases));
}

static void test_hostile_safetensors__refuses_bad_offsets(void **state)
{
    (void)state;
    static const struct header_case cases[] = {
        {TENSOR("\"U8\"", "[4]", "[4,0]"), 4, "but the buffer has 4 bytes"},
        {TENSOR("\"U8\"", "[4]", "[-4,0]"), 4, "but the buffer has 4 bytes"},
        {TENSOR("\"U8\"", "[4]", "[0,-1]"), 4, "but the buffer has 4 bytes"},
        {TENSOR("\"U8\"", "[5]", "[0,5]"), 4, "but the buffer has 4 bytes"},
        {TENSOR("\"U8\"", "[4]", "[9223372036854775804,9223372036854775807]"), 4, "but the buffer"},
        {TENSOR("\"U8\"", "[4]", "[0,9223372036854775808]"), 4, "is too large"},
        {TENSOR("\"U8\"", "[4]", "[0.0,4.0]"), 4, "must be two whole numbers"},
        {TENSOR("\"U8\"", "[4]", "[\"0\",\"4\"]"), 4, "must be two whole numbers"},
        {TENSOR("\"U8\"", "[4]", "[0,4,4]"), 4, "must be two whole numbers"},
        {TENSOR("\"U8\"", "[4]", "[0]"), 4, "must be two whole numbers"},
        {TENSOR("\"U8\"", "[4]", "{}"), 4, "must be two whole numbers"},
        {TENSOR("\"U8\"", "[4]", "[true,4]"), 4, "must be two whole numbers"},
        {TENSOR("\"U8\"", "[4]", "[0,3]"), 4, "has 3 bytes, its shape and type need 4"},
        {TENSOR("\"F32\"", "[1]", "[0,8]"), 8, "has 8 bytes, its shape and type need 4"},
    };
    refuse_all(cases, LENGTH(cases));
}

/* Two tensors of 4 bytes at the given offsets in `data` bytes. */
static void refuse_cover(const char *first, const char *second, size_t data, const char *words)
{
    char header[256];
    snprintf(header, sizeof header,
             "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":%s},"
             "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":%s}}",
             first, second);
    refuse_header(header, data, words);
}

static void test_hostile_safetensors__refuses_data_that_is_not_covered_once(void **state)
{
    (void)state;
    refuse_cover("[0,4]", "[0,4]", 8, "overlaps");
    refuse_cover("[0,4]", "[2,6]", 8, "overlaps");
    refuse_cover("[0,4]", "[6,10]", 10, "does not follow");
    refuse_cover("[2,6]", "[6,10]", 10, "does not follow"); /* a gap at the start */
    refuse_cover("[0,4]", "[4,8]", 9, "1 bytes after the last tensor");
    refuse_header("{}", 16, "16 bytes after the last tensor");
}

/* ---- quantised layouts ---- */

enum { MODELOPT, COMPRESSED };

/* A weight of [2, 32] in three parts; a field that is set replaces the correct value. */
struct weight {
    int layout;
    bool no_codes, no_scale, no_global;
    const char *codes_shape, *scale_shape, *scale_dtype, *codes_dtype;
    size_t codes_bytes, scale_bytes;
    float global;
    int globals; /* number of values */
};

static void add_part(struct bytes *header, size_t *at, const char *name, const char *dtype,
                     const char *shape, size_t bytes)
{
    char text[256];
    snprintf(text, sizeof text,
             "%s\"x.%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
             header->len > 1 ? "," : "", name, dtype, shape, *at, *at + bytes);
    put_text(header, text);
    *at += bytes;
}

static struct bytes weight_file(const struct weight *w)
{
    struct bytes h = {0}, b = {0};
    size_t at = 0, codes = w->codes_bytes ? w->codes_bytes : 32;
    size_t scales = w->scale_bytes ? w->scale_bytes : 4;
    bool modelopt = w->layout == MODELOPT;
    put_text(&h, "{");
    if (!w->no_codes)
        add_part(&h, &at, modelopt ? "weight" : "weight_packed",
                 w->codes_dtype ? w->codes_dtype : "U8", w->codes_shape ? w->codes_shape : "[2,16]",
                 codes);
    if (!w->no_scale)
        add_part(&h, &at, "weight_scale", w->scale_dtype ? w->scale_dtype : "F8_E4M3",
                 w->scale_shape ? w->scale_shape : "[2,2]", scales);
    size_t global_at = at;
    if (!w->no_global)
        add_part(&h, &at, modelopt ? "weight_scale_2" : "weight_global_scale", "F32",
                 w->globals == 2 ? "[2]" : "[1]", w->globals == 2 ? 8 : 4);
    put_text(&h, "}");
    put_u64(&b, h.len);
    put_bytes(&b, h.p, h.len);
    put_zeros(&b, global_at);
    for (size_t i = global_at; i < at; i += 4)
        put_f32(&b, w->global);
    free(h.p);
    return b;
}

static void refuse_weight(struct weight w, const char *words)
{
    struct bytes b = weight_file(&w);
    refuse(NBI_FORMAT_SAFETENSORS, &b, words);
}

static void test_hostile_safetensors__accepts_both_layouts(void **state)
{
    (void)state;
    for (int layout = MODELOPT; layout <= COMPRESSED; layout++) {
        struct bytes b = weight_file(&(struct weight){.layout = layout, .global = 1.0f});
        accept(NBI_FORMAT_SAFETENSORS, &b);
    }
}

static void test_hostile_safetensors__refuses_incomplete_weights(void **state)
{
    (void)state;
    /* Bytes without scales are plain bytes; their tensor scale then belongs to nothing. */
    refuse_weight((struct weight){MODELOPT, .no_scale = true, .global = 1},
                  "a scale without a quantised tensor");
    refuse_weight((struct weight){MODELOPT, .no_global = true, .global = 1},
                  "has no '.weight_scale_2' beside it");
    refuse_weight((struct weight){COMPRESSED, .no_scale = true, .global = 1},
                  "has no '.weight_scale' beside it");
    refuse_weight((struct weight){COMPRESSED, .no_global = true, .global = 1},
                  "has no '.weight_global_scale' beside it");
}

static void test_hostile_safetensors__refuses_orphan_scales(void **state)
{
    (void)state;
    for (int layout = MODELOPT; layout <= COMPRESSED; layout++)
        refuse_weight((struct weight){layout, .no_codes = true, .global = 1},
                      "a scale without a quantised tensor");
    refuse_header("{\"x.input_scale\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,
                  "a scale without a quantised tensor");
}

static void test_hostile_safetensors__refuses_scales_of_wrong_shape(void **state)
{
    (void)state;
    for (int l = MODELOPT; l <= COMPRESSED; l++) {
        refuse_weight((struct weight){l, .scale_shape = "[4]", .global = 1}, "do not fit");
        refuse_weight((struct weight){l, .scale_shape = "[1,4]", .global = 1}, "do not fit");
        refuse_weight((struct weight){l, .scale_shape = "[2,3]", .scale_bytes = 6, .global = 1},
                      "do not fit");
        refuse_weight((struct weight){l, .codes_shape = "[2,12]", .codes_bytes = 24, .global = 1},
                      "do not fit");
    }
}

static void test_hostile_safetensors__refuses_scales_of_wrong_type(void **state)
{
    (void)state;
    for (int l = MODELOPT; l <= COMPRESSED; l++) {
        refuse_weight((struct weight){l, .scale_dtype = "U8", .global = 1}, "have type u8");
        refuse_weight((struct weight){l, .scale_dtype = "F32", .scale_bytes = 16, .global = 1},
                      "have type f32");
    }
    refuse_weight((struct weight){COMPRESSED, .codes_dtype = "I8", .global = 1},
                  "codes must be bytes");
}

static void test_hostile_safetensors__refuses_unusable_tensor_scales(void **state)
{
    (void)state;
    const uint32_t bits[] = {0, 0x80000000, 0xBF800000, 0x7FC00000, 0x7F800000, 1};
    for (size_t i = 0; i < LENGTH(bits); i++)
        for (int l = MODELOPT; l <= COMPRESSED; l++) {
            float v;
            memcpy(&v, &bits[i], sizeof v);
            refuse_weight((struct weight){l, .global = v}, "must be finite and positive");
        }
    for (int l = MODELOPT; l <= COMPRESSED; l++)
        refuse_weight((struct weight){l, .global = 1, .globals = 2}, "must be one f32 value");
    /* A divisor whose inverse is subnormal. */
    refuse_weight((struct weight){COMPRESSED, .global = 3e38f}, "its inverse is not a usable");
}

static void test_hostile_safetensors__refuses_two_layouts_in_one_file(void **state)
{
    (void)state;
    struct bytes h = {0}, b = {0};
    size_t at = 0;
    put_text(&h, "{");
    add_part(&h, &at, "y.weight", "U8", "[2,16]", 32);
    add_part(&h, &at, "y.weight_scale", "F8_E4M3", "[2,2]", 4);
    add_part(&h, &at, "y.weight_scale_2", "F32", "[]", 4);
    add_part(&h, &at, "z.weight_packed", "U8", "[2,16]", 32);
    add_part(&h, &at, "z.weight_scale", "F8_E4M3", "[2,2]", 4);
    add_part(&h, &at, "z.weight_global_scale", "F32", "[1]", 4);
    put_text(&h, "}");
    put_u64(&b, h.len);
    put_bytes(&b, h.p, h.len);
    while (at > 0) {
        put_f32(&b, 1.0f);
        at -= 4;
    }
    free(h.p);
    refuse(NBI_FORMAT_SAFETENSORS, &b, "another NVFP4 layout");
}

/* ---- an index and its shards ---- */

static char dir[256];

static int make_dir(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/nibble-hostile-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    static const char *const names[] = {"one.safetensors", "two.safetensors",
                                        "model.safetensors.index.json", ""};
    char path[512];
    for (size_t i = 0; i < LENGTH(names); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        if (names[i][0])
            unlink(path);
    }
    return rmdir(dir);
}

static void write_in_dir(const char *name, const void *bytes, size_t n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(nbi_file_write(path, bytes, n), NB_OK);
}

static void write_shard(const char *name, const char *tensor)
{
    char header[128];
    snprintf(header, sizeof header,
             "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", tensor);
    struct bytes b = file_of(header, 4);
    write_in_dir(name, b.p, b.len);
    free(b.p);
}

/* Tensor "a" in one.safetensors, "b" in two.safetensors. */
static enum nb_status open_with_index(const char *index)
{
    struct nbi_store *store;
    write_shard("one.safetensors", "a");
    write_shard("two.safetensors", "b");
    write_in_dir("model.safetensors.index.json", index, strlen(index));
    enum nb_status rc = nbi_store_open(&store, dir);
    nbi_store_close(store);
    return rc;
}

#define MAP(a, b) "{\"weight_map\":{\"a\":" a ",\"b\":" b "}}"

static void test_hostile_safetensors__accepts_a_correct_index(void **state)
{
    (void)state;
    assert_int_equal(open_with_index(MAP("\"one.safetensors\"", "\"two.safetensors\"")), NB_OK);
}

static void test_hostile_safetensors__refuses_bad_indexes(void **state)
{
    (void)state;
    static const struct {
        const char *index, *words;
    } cases[] = {
        {MAP("\"one.safetensors\"", "\"../two.safetensors\""), "not in a file of this directory"},
        {MAP("\"one.safetensors\"", "\"/etc/x.safetensors\""), "not in a file of this directory"},
        {MAP("\"one.safetensors\"", "\"sub/two.safetensors\""), "not in a file of this directory"},
        {MAP("\"one.safetensors\"", "\"two.bin\""), "not in a file of this directory"},
        {MAP("\"one.safetensors\"", "7"), "not in a file of this directory"},
        {MAP("\"one.safetensors\"", "null"), "not in a file of this directory"},
        {MAP("\"one.safetensors\"", "\"three.safetensors\""), "cannot open"},
        {MAP("\"two.safetensors\"", "\"one.safetensors\""), "but not so in the index"},
        {MAP("\"one.safetensors\"", "\"one.safetensors\""), "the index lists 2 tensors"},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"x\":\"two.safetensors\"}}",
         "but not so in the index"},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\","
         "\"c\":\"two.safetensors\"}}",
         "the index lists 3 tensors"},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"two.safetensors\"}}",
         "duplicate object key"},
        {"{\"weight_map\":[]}", "'weight_map' must be an object"},
        {"{}", "'weight_map' must be an object"},
        {"[]", "'weight_map' must be an object"},
        {"", "invalid JSON"},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        assert_int_not_equal(open_with_index(cases[i].index), NB_OK);
        expect_message(cases[i].words, cases[i].index);
    }
}

/* An index without tensors names no files. It may open or not, but it is not a valid model. */
static void test_hostile_safetensors__refuses_an_empty_index(void **state)
{
    (void)state;
    struct nb_file *file = NULL;
    if (open_with_index("{\"weight_map\":{}}") != NB_OK)
        return;
    assert_int_equal(nb_file_open(&file, dir, NULL), NB_OK);
    enum nb_status rc = nb_file_verify(file, 1, NULL, NULL, NULL);
    nb_file_close(file);
    assert_int_not_equal(rc, NB_OK);
    expect_message("is missing", "empty index");
}

/* Two shards that contain a tensor of the same name. */
static void test_hostile_safetensors__refuses_a_tensor_in_two_shards(void **state)
{
    (void)state;
    struct nbi_store *store;
    const char *index = MAP("\"one.safetensors\"", "\"two.safetensors\"");
    write_shard("one.safetensors", "a");
    write_shard("two.safetensors", "a");
    write_in_dir("model.safetensors.index.json", index, strlen(index));
    assert_int_not_equal(nbi_store_open(&store, dir), NB_OK);
    expect_message("but not so in the index", "two shards");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_safetensors__accepts_the_unmodified_file),
        cmocka_unit_test(test_hostile_safetensors__refuses_header_lengths),
        cmocka_unit_test(test_hostile_safetensors__refuses_headers_over_100_mb),
        cmocka_unit_test(test_hostile_safetensors__refuses_short_files),
        cmocka_unit_test(test_hostile_safetensors__refuses_what_is_not_a_json_object),
        cmocka_unit_test(test_hostile_safetensors__refuses_a_nul_after_the_json),
        cmocka_unit_test(test_hostile_safetensors__refuses_deep_nesting),
        cmocka_unit_test(test_hostile_safetensors__refuses_duplicate_keys),
        cmocka_unit_test(test_hostile_safetensors__refuses_missing_and_extra_fields),
        cmocka_unit_test(test_hostile_safetensors__refuses_names_that_are_not_text),
        cmocka_unit_test(test_hostile_safetensors__refuses_a_name_of_2000_bytes),
        cmocka_unit_test(test_hostile_safetensors__refuses_metadata_that_is_not_text),
        cmocka_unit_test(test_hostile_safetensors__refuses_unknown_types),
        cmocka_unit_test(test_hostile_safetensors__refuses_bad_shapes),
        cmocka_unit_test(test_hostile_safetensors__refuses_bad_offsets),
        cmocka_unit_test(test_hostile_safetensors__refuses_data_that_is_not_covered_once),
        cmocka_unit_test(test_hostile_safetensors__accepts_both_layouts),
        cmocka_unit_test(test_hostile_safetensors__refuses_incomplete_weights),
        cmocka_unit_test(test_hostile_safetensors__refuses_orphan_scales),
        cmocka_unit_test(test_hostile_safetensors__refuses_scales_of_wrong_shape),
        cmocka_unit_test(test_hostile_safetensors__refuses_scales_of_wrong_type),
        cmocka_unit_test(test_hostile_safetensors__refuses_unusable_tensor_scales),
        cmocka_unit_test(test_hostile_safetensors__refuses_two_layouts_in_one_file),
        cmocka_unit_test(test_hostile_safetensors__accepts_a_correct_index),
        cmocka_unit_test(test_hostile_safetensors__refuses_bad_indexes),
        cmocka_unit_test(test_hostile_safetensors__refuses_an_empty_index),
        cmocka_unit_test(test_hostile_safetensors__refuses_a_tensor_in_two_shards),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
