/* test_hostile_dat.c - .dat files with one mistake each. The format has no magic number and no
 * checksum; a reader is safe because it compares every length with the bytes left. */
#include "unit/hostile.h"

enum { U8 = 0, I8 = 1, F16 = 5, F32 = 6, F64 = 7, BF16 = 15, E2M1X2 = 100, E4M3 = 101 };

/* An entry up to its bytes. */
static void entry_head(struct bytes *b, const char *name, uint64_t code, int ndim,
                       const uint64_t *dims)
{
    put_uleb(b, strlen(name));
    put_text(b, name);
    put_uleb(b, code);
    put_uleb(b, (uint64_t)ndim);
    for (int i = 0; i < ndim; i++)
        put_uleb(b, dims[i]);
}

static void entry(struct bytes *b, const char *name, uint64_t code, uint64_t rows, uint64_t cols,
                  size_t bytes)
{
    entry_head(b, name, code, 2, (const uint64_t[]){rows, cols});
    put_zeros(b, bytes);
}

static void scalar_entry(struct bytes *b, const char *name, float v)
{
    entry_head(b, name, F32, 1, (const uint64_t[]){1});
    put_f32(b, v);
}

static void refuse_dat(struct bytes *b, const char *words)
{
    refuse(NBI_FORMAT_DAT, b, words);
}

/* ---- the builder itself ---- */

static void test_hostile_dat__accepts_the_unmodified_file(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 3);
    entry(&b, "x.weight.qdata", U8, 2, 16, 32);
    entry(&b, "x.weight.scale", E4M3, 2, 2, 4);
    scalar_entry(&b, "x.weight.tscale", 1.0f);
    accept(NBI_FORMAT_DAT, &b);
}

/* ---- numbers ---- */

static void test_hostile_dat__refuses_an_empty_file(void **state)
{
    (void)state;
    struct bytes b = {0};
    refuse_dat(&b, "file ends early");
}

static void test_hostile_dat__refuses_overlong_numbers(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_bytes(&b, "\x81\x00", 2); /* a count of 1 in two bytes */
    entry(&b, "a", F32, 1, 1, 4);
    refuse_dat(&b, "needless last byte");

    put_uleb(&b, 1);
    put_uleb(&b, 1);
    put_text(&b, "a");
    put_uleb(&b, F32);
    put_bytes(&b, "\x81\x80\x00\x01", 4); /* one dimension, in three bytes */
    put_zeros(&b, 8);
    refuse_dat(&b, "needless last byte");
}

static void test_hostile_dat__refuses_numbers_past_64_bits(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_bytes(&b, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 10); /* bit 64 */
    put_zeros(&b, 16);
    refuse_dat(&b, "does not fit 64 bits");

    for (int i = 0; i < 32; i++) /* one that never ends */
        put_u8(&b, 0x80);
    refuse_dat(&b, "does not fit 64 bits");
}

static void test_hostile_dat__refuses_a_truncated_number(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_u8(&b, 0x80);
    refuse_dat(&b, "file ends early");
}

/* ---- names ---- */

static void test_hostile_dat__refuses_bad_name_lengths(void **state)
{
    (void)state;
    const uint64_t lengths[] = {0, 1025, (uint64_t)1 << 32, UINT64_MAX};
    for (size_t i = 0; i < LENGTH(lengths); i++) {
        struct bytes b = {0};
        put_uleb(&b, 1);
        put_uleb(&b, lengths[i]);
        put_zeros(&b, 2000);
        refuse_dat(&b, "name length");
    }
}

static void test_hostile_dat__refuses_a_name_past_the_end(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 1);
    put_uleb(&b, 1000);
    put_text(&b, "short");
    refuse_dat(&b, "file ends early");
}

static void test_hostile_dat__refuses_names_that_are_not_text(void **state)
{
    (void)state;
    const char *const names[] = {
        "\xff",         "a\x80",       "\xc0\xaf", /* '/' in two bytes */
        "\xed\xa0\x80",                            /* half of a surrogate pair */
        "a\x1b[2J",     "line\nbreak", "tab\t",    "\x7f", "\xf4\x90\x80\x80", /* beyond U+10FFFF */
    };
    for (size_t i = 0; i < LENGTH(names); i++) {
        struct bytes b = {0};
        put_uleb(&b, 1);
        entry(&b, names[i], F32, 1, 1, 4);
        refuse_dat(&b, "not printable text");
    }
}

static void test_hostile_dat__refuses_a_name_with_a_nul(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 1);
    put_uleb(&b, 3);
    put_bytes(&b, "a\0b", 3);
    put_uleb(&b, F32);
    put_uleb(&b, 0);
    put_f32(&b, 1);
    refuse_dat(&b, "not printable text");
}

static void test_hostile_dat__refuses_duplicate_names(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 2);
    entry(&b, "a", F32, 1, 1, 4);
    entry(&b, "a", F32, 1, 1, 4);
    refuse_dat(&b, "two tensors are named 'a'");
}

/* X.qdata and X.weight.qdata are spellings of one weight. */
static void test_hostile_dat__refuses_one_weight_in_two_spellings(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 4);
    entry(&b, "x.qdata", U8, 1, 8, 8);
    entry(&b, "x.scale", E4M3, 1, 1, 1);
    entry(&b, "x.weight.qdata", U8, 1, 8, 8);
    entry(&b, "x.weight.scale", E4M3, 1, 1, 1);
    refuse_dat(&b, "two tensors are named 'x.weight'");
}

/* ---- types, shapes, sizes ---- */

static void test_hostile_dat__refuses_unknown_element_codes(void **state)
{
    (void)state;
    const uint64_t codes[] = {4711, 8, 12, 99, 102, (uint64_t)1 << 32, UINT64_MAX};
    for (size_t i = 0; i < LENGTH(codes); i++) {
        struct bytes b = {0};
        put_uleb(&b, 1);
        entry(&b, "a", codes[i], 1, 1, 8);
        refuse_dat(&b, "unknown element type code");
    }
}

static void test_hostile_dat__refuses_nine_dimensions(void **state)
{
    (void)state;
    const uint64_t ones[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    struct bytes b = {0};
    put_uleb(&b, 1);
    entry_head(&b, "a", F32, 9, ones);
    put_zeros(&b, 4);
    refuse_dat(&b, "9 dimensions");
}

static void test_hostile_dat__refuses_shapes_that_overflow(void **state)
{
    (void)state;
    const struct {
        uint64_t rows, cols;
        const char *words;
    } cases[] = {
        {(uint64_t)1 << 32, (uint64_t)1 << 32, "too many elements"},
        {(uint64_t)1 << 62, 4, "too many elements"},
        {(uint64_t)1 << 60, 1, "too many elements"},
        {INT64_MAX, INT64_MAX, "too many elements"},
        {(uint64_t)1 << 63, 1, "dimension 0 is"}, /* negative when signed */
        {1, UINT64_MAX, "dimension 1 is"},
        {((uint64_t)1 << 58), 1, "file ends early"},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        struct bytes b = {0};
        put_uleb(&b, 1);
        entry(&b, "a", F64, cases[i].rows, cases[i].cols, 64);
        refuse_dat(&b, cases[i].words);
    }
}

static void test_hostile_dat__refuses_a_payload_past_the_end(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 1);
    entry(&b, "a", F32, 4, 4, 63);
    refuse_dat(&b, "file ends early: 64 bytes wanted");
}

static void test_hostile_dat__refuses_a_count_too_large(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, UINT64_MAX);
    entry(&b, "a", F32, 1, 1, 4);
    refuse_dat(&b, "tensors announced");

    put_uleb(&b, 2);
    entry(&b, "a", F32, 1, 1, 4);
    refuse_dat(&b, "entry 2 of 2");
}

static void test_hostile_dat__refuses_a_count_too_small(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 1);
    entry(&b, "a", F32, 1, 1, 4);
    entry(&b, "b", F32, 1, 1, 4);
    refuse_dat(&b, "bytes after the last tensor");

    put_uleb(&b, 0);
    put_zeros(&b, 1);
    refuse_dat(&b, "1 bytes after the last tensor");
}

/* ---- pairs ---- */

static void test_hostile_dat__refuses_codes_without_scales(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 1);
    entry(&b, "x.weight.qdata", U8, 2, 16, 32);
    refuse_dat(&b, "has no '.scale' beside it");
}

static void test_hostile_dat__refuses_scales_without_codes(void **state)
{
    (void)state;
    const char *const names[] = {"x.weight.scale", "x.weight.tscale"};
    for (size_t i = 0; i < LENGTH(names); i++) {
        struct bytes b = {0};
        put_uleb(&b, 1);
        entry(&b, names[i], E4M3, 2, 2, 4);
        refuse_dat(&b, "a scale without a quantised tensor");
    }
}

static void test_hostile_dat__refuses_a_name_that_is_only_a_suffix(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 1);
    entry(&b, ".qdata", U8, 2, 16, 32);
    refuse_dat(&b, "has no '.scale' beside it");
}

static void test_hostile_dat__refuses_shapes_that_do_not_fit(void **state)
{
    (void)state;
    const uint64_t cases[][4] = {
        {2, 16, 2, 1}, /* scales for half a row */
        {2, 16, 3, 2}, /* another row count */
        {2, 12, 2, 1}, /* 24 values are not a whole number of blocks */
        {2, 16, 2, 4}, {0, 16, 1, 2},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        const uint64_t *c = cases[i];
        struct bytes b = {0};
        put_uleb(&b, 2);
        entry(&b, "x.weight.qdata", U8, c[0], c[1], c[0] * c[1]);
        entry(&b, "x.weight.scale", E4M3, c[2], c[3], c[2] * c[3]);
        refuse_dat(&b, "do not fit");
    }
}

static void test_hostile_dat__refuses_pairs_that_are_not_matrices(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 2);
    entry_head(&b, "x.weight.qdata", U8, 1, (const uint64_t[]){16});
    put_zeros(&b, 16);
    entry_head(&b, "x.weight.scale", E4M3, 1, (const uint64_t[]){2});
    put_zeros(&b, 2);
    refuse_dat(&b, "do not fit");
}

static void test_hostile_dat__refuses_codes_of_other_types(void **state)
{
    (void)state;
    const struct {
        uint64_t code;
        size_t size;
    } cases[] = {{F16, 2}, {F32, 4}, {I8, 1}, {E4M3, 1}};
    for (size_t i = 0; i < LENGTH(cases); i++) {
        struct bytes b = {0};
        put_uleb(&b, 2);
        entry(&b, "x.weight.qdata", cases[i].code, 2, 16, 32 * cases[i].size);
        entry(&b, "x.weight.scale", E4M3, 2, 2, 4);
        refuse_dat(&b, "codes must be bytes");
    }
}

static void test_hostile_dat__refuses_scales_of_other_types(void **state)
{
    (void)state;
    const struct {
        uint64_t code;
        size_t size;
    } cases[] = {{E2M1X2, 1}, {I8, 1}, {F64, 8}};
    for (size_t i = 0; i < LENGTH(cases); i++) {
        struct bytes b = {0};
        put_uleb(&b, 2);
        entry(&b, "x.weight.qdata", U8, 2, 16, 32);
        entry(&b, "x.weight.scale", cases[i].code, 2, 2, 4 * cases[i].size);
        refuse_dat(&b, "block scales 'x.weight.scale' have type");
    }
}

static void test_hostile_dat__refuses_unusable_tensor_scales(void **state)
{
    (void)state;
    const uint32_t bits[] = {0,          0x80000000, 0xBF800000, 0x7F800000,
                             0xFF800000, 0x7FC00000, 1 /* subnormal */};
    for (size_t i = 0; i < LENGTH(bits); i++) {
        struct bytes b = {0};
        float v;
        memcpy(&v, &bits[i], sizeof v);
        put_uleb(&b, 3);
        entry(&b, "x.weight.qdata", U8, 2, 16, 32);
        entry(&b, "x.weight.scale", E4M3, 2, 2, 4);
        scalar_entry(&b, "x.weight.tscale", v);
        refuse_dat(&b, "must be finite and positive");
    }
}

static void test_hostile_dat__refuses_a_tensor_scale_of_two_values(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uleb(&b, 3);
    entry(&b, "x.weight.qdata", U8, 2, 16, 32);
    entry(&b, "x.weight.scale", E4M3, 2, 2, 4);
    entry(&b, "x.weight.tscale", F32, 2, 1, 8);
    refuse_dat(&b, "must be one f32 value");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_dat__accepts_the_unmodified_file),
        cmocka_unit_test(test_hostile_dat__refuses_an_empty_file),
        cmocka_unit_test(test_hostile_dat__refuses_overlong_numbers),
        cmocka_unit_test(test_hostile_dat__refuses_numbers_past_64_bits),
        cmocka_unit_test(test_hostile_dat__refuses_a_truncated_number),
        cmocka_unit_test(test_hostile_dat__refuses_bad_name_lengths),
        cmocka_unit_test(test_hostile_dat__refuses_a_name_past_the_end),
        cmocka_unit_test(test_hostile_dat__refuses_names_that_are_not_text),
        cmocka_unit_test(test_hostile_dat__refuses_a_name_with_a_nul),
        cmocka_unit_test(test_hostile_dat__refuses_duplicate_names),
        cmocka_unit_test(test_hostile_dat__refuses_one_weight_in_two_spellings),
        cmocka_unit_test(test_hostile_dat__refuses_unknown_element_codes),
        cmocka_unit_test(test_hostile_dat__refuses_nine_dimensions),
        cmocka_unit_test(test_hostile_dat__refuses_shapes_that_overflow),
        cmocka_unit_test(test_hostile_dat__refuses_a_payload_past_the_end),
        cmocka_unit_test(test_hostile_dat__refuses_a_count_too_large),
        cmocka_unit_test(test_hostile_dat__refuses_a_count_too_small),
        cmocka_unit_test(test_hostile_dat__refuses_codes_without_scales),
        cmocka_unit_test(test_hostile_dat__refuses_scales_without_codes),
        cmocka_unit_test(test_hostile_dat__refuses_a_name_that_is_only_a_suffix),
        cmocka_unit_test(test_hostile_dat__refuses_shapes_that_do_not_fit),
        cmocka_unit_test(test_hostile_dat__refuses_pairs_that_are_not_matrices),
        cmocka_unit_test(test_hostile_dat__refuses_codes_of_other_types),
        cmocka_unit_test(test_hostile_dat__refuses_scales_of_other_types),
        cmocka_unit_test(test_hostile_dat__refuses_unusable_tensor_scales),
        cmocka_unit_test(test_hostile_dat__refuses_a_tensor_scale_of_two_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
