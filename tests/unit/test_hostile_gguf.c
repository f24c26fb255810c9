/* test_hostile_gguf.c - .gguf files with one mistake each, including those of CVEs in other
 * readers: wrong counts, lengths, dimensions, offsets and types. */
#include "base/crc.h"
#include "formats/gguf.h"
#include "model/model.h"
#include "tokenizer/vocab.h"
#include "unit/hostile.h"

enum { TENSOR_F32 = 0, TENSOR_F16 = 1, TENSOR_Q4_0 = 2, TENSOR_BF16 = 30, TENSOR_NVFP4 = 40 };

/* ---- building ---- */

static void header(struct bytes *b, uint64_t tensors, uint64_t kvs)
{
    put_text(b, "GGUF");
    put_u32(b, 3);
    put_u64(b, tensors);
    put_u64(b, kvs);
}

static void kv(struct bytes *b, const char *key, uint32_t type)
{
    put_string(b, key);
    put_u32(b, type);
}

static void kv_u32(struct bytes *b, const char *key, uint32_t v)
{
    kv(b, key, NBI_GGUF_U32);
    put_u32(b, v);
}

static void kv_f32(struct bytes *b, const char *key, float v)
{
    kv(b, key, NBI_GGUF_F32);
    put_f32(b, v);
}

static void kv_string(struct bytes *b, const char *key, const char *v)
{
    kv(b, key, NBI_GGUF_STRING);
    put_string(b, v);
}

static void kv_array(struct bytes *b, const char *key, uint32_t type, uint64_t count)
{
    kv(b, key, NBI_GGUF_ARRAY);
    put_u32(b, type);
    put_u64(b, count);
}

/* A row of the tensor table, with dimensions in the file's order: innermost first. */
static void tensor(struct bytes *b, const char *name, int ndim, const uint64_t *dims, uint32_t type,
                   uint64_t offset)
{
    put_string(b, name);
    put_u32(b, (uint32_t)ndim);
    for (int i = 0; i < ndim; i++)
        put_u64(b, dims[i]);
    put_u32(b, type);
    put_u64(b, offset);
}

static void vector(struct bytes *b, const char *name, uint64_t n, uint64_t offset)
{
    tensor(b, name, 1, &n, TENSOR_F32, offset);
}

static void pad(struct bytes *b, size_t alignment)
{
    while (b->len % alignment)
        put_zeros(b, 1);
}

/* One f32 vector of 8 and its 32 bytes. */
static void one_tensor(struct bytes *b)
{
    vector(b, "t", 8, 0);
    pad(b, 32);
    put_zeros(b, 32);
}

static void refuse_gguf(struct bytes *b, const char *words)
{
    refuse(NBI_FORMAT_GGUF, b, words);
}

static void test_hostile_gguf__accepts_the_unmodified_file(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 1, 1);
    kv_u32(&b, "general.alignment", 32);
    one_tensor(&b);
    accept(NBI_FORMAT_GGUF, &b);
}

/* ---- the first 24 bytes ---- */

static void test_hostile_gguf__refuses_other_magic(void **state)
{
    (void)state;
    const char *const magics[] = {"FUGG", "GGML", "GGUE", "gguf"};
    for (size_t i = 0; i < LENGTH(magics); i++) {
        struct bytes b = {0};
        put_text(&b, magics[i]);
        put_u32(&b, 3);
        put_zeros(&b, 16);
        refuse_gguf(&b, "not a GGUF file");
    }
}

static void test_hostile_gguf__refuses_other_versions(void **state)
{
    (void)state;
    const uint32_t versions[] = {0, 1, 2, 4, 0x03000000, UINT32_MAX}; /* the fifth: big-endian 3 */
    for (size_t i = 0; i < LENGTH(versions); i++) {
        struct bytes b = {0};
        put_text(&b, "GGUF");
        put_u32(&b, versions[i]);
        put_zeros(&b, 16);
        refuse_gguf(&b, "is not supported; 3 is");
    }
}

/* CVE-2024-21802 and related ones: counts that size an allocation. */
static void test_hostile_gguf__refuses_huge_counts(void **state)
{
    (void)state;
    const uint64_t counts[] = {3, (uint64_t)1 << 32, INT64_MAX, (uint64_t)1 << 63, UINT64_MAX};
    for (size_t i = 0; i < LENGTH(counts); i++)
        for (int which = 0; which < 2; which++) {
            struct bytes b = {0};
            header(&b, which ? counts[i] : 0, which ? 0 : counts[i]);
            put_zeros(&b, 26);
            refuse_gguf(&b, "do not fit the 26 bytes left");
        }
}

/* ---- metadata ---- */

/* Lengths beyond the end, and lengths that wrap when something is added (CVE-2024-23496). */
static void test_hostile_gguf__refuses_string_lengths_past_the_end(void **state)
{
    (void)state;
    const uint64_t lengths[] = {100, (uint64_t)1 << 31, (uint64_t)1 << 63, UINT64_MAX - 7,
                                UINT64_MAX};
    for (size_t i = 0; i < LENGTH(lengths); i++) {
        struct bytes b = {0};
        header(&b, 0, 1);
        kv(&b, "k", NBI_GGUF_STRING);
        put_u64(&b, lengths[i]);
        put_text(&b, "value");
        refuse_gguf(&b, "file ends early");

        header(&b, 0, 1); /* the same for a key */
        put_u64(&b, lengths[i]);
        put_zeros(&b, 20);
        refuse_gguf(&b, lengths[i] == 100 ? "file ends early" : "a name of");

        header(&b, 0, 1); /* and within an array of strings */
        kv_array(&b, "k", NBI_GGUF_STRING, 2);
        put_string(&b, "first");
        put_u64(&b, lengths[i]);
        put_text(&b, "second");
        refuse_gguf(&b, "file ends early");

        header(&b, 1, 0); /* and for the name of a tensor */
        put_u64(&b, lengths[i]);
        put_zeros(&b, 20);
        refuse_gguf(&b, lengths[i] == 100 ? "file ends early" : "a name of");
    }
}

static void test_hostile_gguf__refuses_huge_arrays(void **state)
{
    (void)state;
    const uint64_t counts[] = {
        5, (uint64_t)1 << 32, (uint64_t)1 << 61, (uint64_t)1 << 62, (uint64_t)1 << 63, UINT64_MAX};
    const uint32_t types[] = {NBI_GGUF_U8,   NBI_GGUF_I16, NBI_GGUF_F32,
                              NBI_GGUF_BOOL, NBI_GGUF_F64, NBI_GGUF_STRING};
    for (size_t i = 0; i < LENGTH(counts); i++)
        for (size_t k = 0; k < LENGTH(types); k++) {
            struct bytes b = {0};
            header(&b, 0, 1);
            kv_array(&b, "k", types[k], counts[i]);
            put_zeros(&b, 4);
            refuse_gguf(&b, "metadata 'k': an array of");
        }
}

static void test_hostile_gguf__refuses_bad_value_types(void **state)
{
    (void)state;
    const uint32_t types[] = {13, 14, 255, 0x80000000u, UINT32_MAX};
    for (size_t i = 0; i < LENGTH(types); i++) {
        struct bytes b = {0};
        header(&b, 0, 1);
        kv(&b, "k", types[i]);
        put_zeros(&b, 16);
        refuse_gguf(&b, "metadata 'k' has unsupported type");

        header(&b, 0, 1);
        kv_array(&b, "k", types[i], 1);
        put_zeros(&b, 16);
        refuse_gguf(&b, "metadata 'k' has unsupported type");
    }
}

static void test_hostile_gguf__refuses_nested_arrays(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 0, 1);
    kv_array(&b, "k", NBI_GGUF_ARRAY, 1);
    put_u32(&b, NBI_GGUF_U8);
    put_u64(&b, 1);
    put_u8(&b, 0);
    refuse_gguf(&b, "metadata 'k' is an array of arrays, which is not supported");
}

static void test_hostile_gguf__refuses_duplicate_keys(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 0, 3);
    kv_u32(&b, "k", 1);
    kv_u32(&b, "other", 2);
    kv_string(&b, "k", "1");
    refuse_gguf(&b, "metadata 'k' occurs twice");
}

static void test_hostile_gguf__refuses_keys_that_are_not_text(void **state)
{
    (void)state;
    const char *const keys[] = {"", "\xff", "k\xc3", "\xed\xa0\x80"};
    for (size_t i = 0; i < LENGTH(keys); i++) {
        struct bytes b = {0};
        header(&b, 0, 1);
        kv_u32(&b, keys[i], 1);
        refuse_gguf(&b, "a metadata key is not text");
    }
    struct bytes b = {0};
    header(&b, 0, 1);
    put_u64(&b, 3);
    put_bytes(&b, "a\0b", 3);
    put_u32(&b, NBI_GGUF_U8);
    put_u8(&b, 0);
    refuse_gguf(&b, "a metadata key is not text");
}

static void test_hostile_gguf__refuses_a_key_too_long(void **state)
{
    (void)state;
    char key[1026];
    memset(key, 'k', sizeof key - 1);
    key[sizeof key - 1] = 0;
    struct bytes b = {0};
    header(&b, 0, 1);
    kv_u32(&b, key, 1);
    refuse_gguf(&b, "a name of 1025 bytes");
}

/* GHSA-96jg-mvhq-q7q7: an alignment that makes the padding wrap, or divides by zero. */
static void test_hostile_gguf__refuses_bad_alignments(void **state)
{
    (void)state;
    const struct {
        uint32_t type;
        uint64_t v;
        const char *words;
    } cases[] = {
        {NBI_GGUF_U32, 0, "outside 1 to"},
        {NBI_GGUF_U32, 3, "not a power of two"},
        {NBI_GGUF_U32, 48, "not a power of two"},
        {NBI_GGUF_U32, 1u << 31, "outside 1 to"},
        {NBI_GGUF_U32, UINT32_MAX, "outside 1 to"},
        {NBI_GGUF_I32, (uint32_t)-32, "outside 1 to"},
        {NBI_GGUF_U64, (uint64_t)1 << 63, "outside 1 to"},
        {NBI_GGUF_U64, UINT64_MAX, "outside 1 to"},
        {NBI_GGUF_F32, 0x42000000, "not a whole number"},
        {NBI_GGUF_BOOL, 1, "not a whole number"},
        {NBI_GGUF_STRING, 0, "not a single number"},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        bool is_64_bits = cases[i].type == NBI_GGUF_U64 || cases[i].type == NBI_GGUF_STRING;
        struct bytes b = {0};
        header(&b, 1, 1);
        kv(&b, "general.alignment", cases[i].type);
        put_u32(&b, (uint32_t)cases[i].v);
        if (is_64_bits)
            put_u32(&b, (uint32_t)(cases[i].v >> 32));
        if (cases[i].type == NBI_GGUF_BOOL)
            b.len -= 3;
        one_tensor(&b);
        refuse_gguf(&b, cases[i].words);
    }
    struct bytes b = {0};
    header(&b, 1, 1);
    kv_array(&b, "general.alignment", NBI_GGUF_U32, 1);
    put_u32(&b, 32);
    one_tensor(&b);
    refuse_gguf(&b, "not a single number");
}

/* ---- the tensor table ---- */

static void test_hostile_gguf__refuses_five_dimensions(void **state)
{
    (void)state;
    const uint64_t dims[5] = {1, 1, 1, 1, 8};
    struct bytes b = {0};
    header(&b, 1, 0);
    tensor(&b, "t", 5, dims, TENSOR_F32, 0);
    pad(&b, 32);
    put_zeros(&b, 32);
    refuse_gguf(&b, "5 dimensions, GGUF allows 4");

    header(&b, 1, 0);
    put_string(&b, "t");
    put_u32(&b, UINT32_MAX);
    put_zeros(&b, 64);
    refuse_gguf(&b, "4294967295 dimensions");
}

/* CVE-2024-21802 again (products of info->ne): one that overflows, or is negative when signed. */
static void test_hostile_gguf__refuses_dimensions_that_overflow(void **state)
{
    (void)state;
    const struct {
        uint64_t dims[4];
        const char *words;
    } cases[] = {
        {{(uint64_t)1 << 32, (uint64_t)1 << 32, 1, 1}, "too many elements"},
        {{(uint64_t)1 << 62, 2, 2, 2}, "too many elements"},
        {{INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}, "too many elements"},
        {{(uint64_t)1 << 60, 1, 1, 1}, "too many elements"},
        {{0x100000001, 0x100000001, 1, 1}, "too many elements"},
        {{(uint64_t)1 << 63, 1, 1, 1}, "a dimension of 9223372036854775808"},
        {{1, 1, 1, UINT64_MAX}, "a dimension of 18446744073709551615"},
        {{(uint64_t)1 << 58, 1, 1, 1}, "lies outside the file"},
        {{(uint64_t)1 << 59, 1, 1, 1}, "lies outside the file"},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        struct bytes b = {0};
        header(&b, 1, 0);
        tensor(&b, "t", 4, cases[i].dims, TENSOR_F32, 0);
        pad(&b, 32);
        put_zeros(&b, 32);
        if (cases[i].dims[0] == (uint64_t)1 << 59) /* one above the limit */
            refuse_gguf(&b, "too many elements");
        else
            refuse_gguf(&b, cases[i].words);
    }
}

/* CVE-2026-7482: an offset or size beyond the file leaks the memory after it. */
static void test_hostile_gguf__refuses_tensors_outside_the_file(void **state)
{
    (void)state;
    const uint64_t offsets[] = {
        32, (uint64_t)1 << 20, (uint64_t)1 << 62, (uint64_t)1 << 63, (uint64_t)-32, UINT64_MAX, 1};
    for (size_t i = 0; i < LENGTH(offsets); i++) {
        struct bytes b = {0};
        header(&b, 1, 0);
        vector(&b, "t", 8, offsets[i]);
        pad(&b, 32);
        put_zeros(&b, 32);
        refuse_gguf(&b, ", 0 expected");
    }
    struct bytes b = {0};
    header(&b, 1, 0);
    vector(&b, "t", 9, 0);
    pad(&b, 32);
    put_zeros(&b, 32);
    refuse_gguf(&b, "tensor 't' lies outside the file");
}

/* CVE-2025-53630 and CVE-2026-27940: sizes that are valid one by one and wrap as a sum. */
static void test_hostile_gguf__refuses_sizes_whose_sum_wraps(void **state)
{
    (void)state;
    const uint64_t each = (uint64_t)1 << 58; /* 2^60 bytes of f32 */
    struct bytes b = {0};
    header(&b, 20, 0);
    for (uint64_t i = 0; i < 20; i++) {
        char name[8];
        snprintf(name, sizeof name, "t%d", (int)i);
        vector(&b, name, each, i * each * 4);
    }
    pad(&b, 32);
    put_zeros(&b, 64);
    refuse_gguf(&b, "larger than any file");
}

static void test_hostile_gguf__refuses_overlapping_tensors(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 2, 0);
    vector(&b, "a", 8, 0);
    vector(&b, "b", 8, 0);
    pad(&b, 32);
    put_zeros(&b, 64);
    refuse_gguf(&b, "data at offset 0, 32 expected");
}

static void test_hostile_gguf__refuses_duplicate_tensors(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 2, 0);
    vector(&b, "a", 8, 0);
    vector(&b, "a", 8, 32);
    pad(&b, 32);
    put_zeros(&b, 64);
    refuse_gguf(&b, "two tensors are named 'a'");
}

static void test_hostile_gguf__refuses_tensor_names_that_are_not_text(void **state)
{
    (void)state;
    const char *const names[] = {"", "\xff", "a\nb", "\x1b[0m"};
    for (size_t i = 0; i < LENGTH(names); i++) {
        struct bytes b = {0};
        header(&b, 1, 0);
        vector(&b, names[i], 8, 0);
        pad(&b, 32);
        put_zeros(&b, 32);
        refuse_gguf(&b, "not printable text");
    }
}

static void test_hostile_gguf__refuses_other_tensor_types(void **state)
{
    (void)state;
    static const struct {
        uint32_t type;
        const char *name;
    } types[] = {{TENSOR_Q4_0, "Q4_0"},
                 {12, "Q4_K"},
                 {14, "Q6_K"},
                 {23, "IQ4_XS"},
                 {29, "IQ1_M"},
                 {34, "TQ1_0"},
                 {39, "MXFP4"},
                 {4, "4"},
                 {36, "36"},
                 {41, "41"},
                 {255, "255"},
                 {0x80000000u, "2147483648"},
                 {UINT32_MAX, "4294967295"}};
    for (size_t i = 0; i < LENGTH(types); i++) {
        char wanted[100];
        snprintf(wanted, sizeof wanted,
                 "GGUF tensor type %s is not supported; F32, F16, BF16 and NVFP4 are",
                 types[i].name);
        struct bytes b = {0};
        header(&b, 1, 0);
        tensor(&b, "t", 1, (const uint64_t[]){64}, types[i].type, 0);
        pad(&b, 32);
        put_zeros(&b, 512);
        refuse_gguf(&b, wanted);
    }
}

static void test_hostile_gguf__refuses_nvfp4_rows_with_partial_blocks(void **state)
{
    (void)state;
    const uint64_t rows[] = {1, 16, 32, 63, 65, 96};
    for (size_t i = 0; i < LENGTH(rows); i++) {
        const uint64_t dims[2] = {rows[i], 64}; /* the total count would be a multiple */
        struct bytes b = {0};
        header(&b, 1, 0);
        tensor(&b, "t", 2, dims, TENSOR_NVFP4, 0);
        pad(&b, 32);
        put_zeros(&b, rows[i] * 36);
        refuse_gguf(&b, "must be a multiple of 64");
    }
    struct bytes b = {0};
    header(&b, 1, 0);
    tensor(&b, "t", 0, NULL, TENSOR_NVFP4, 0);
    pad(&b, 32);
    refuse_gguf(&b, "must be a multiple of 64");
}

static void test_hostile_gguf__refuses_unusable_tensor_scales(void **state)
{
    (void)state;
    const uint32_t bits[] = {0, 0x80000000, 0xBF800000, 0x7FC00000, 0x7F800000, 1};
    for (size_t i = 0; i < LENGTH(bits); i++) {
        struct bytes b = {0};
        header(&b, 2, 0);
        tensor(&b, "x.weight", 1, (const uint64_t[]){64}, TENSOR_NVFP4, 0);
        vector(&b, "x.scale", 1, 64);
        pad(&b, 32);
        put_zeros(&b, 64);
        put_u32(&b, bits[i]);
        refuse_gguf(&b, "must be finite and positive");
    }
    struct bytes b = {0};
    header(&b, 1, 0);
    vector(&b, "x.scale", 8, 0);
    pad(&b, 32);
    put_zeros(&b, 32);
    refuse_gguf(&b, "a scale without a quantised tensor");
}

static void test_hostile_gguf__refuses_truncated_data(void **state)
{
    (void)state;
    for (size_t cut = 1; cut <= 32; cut++) {
        struct bytes b = {0};
        header(&b, 1, 0);
        one_tensor(&b);
        b.len -= cut;
        refuse_gguf(&b, "lies outside the file");
    }
}

static void test_hostile_gguf__refuses_bytes_after_the_last_tensor(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 1, 0);
    one_tensor(&b);
    put_zeros(&b, 1);
    refuse_gguf(&b, "1 bytes after the last tensor");

    header(&b, 0, 0);
    pad(&b, 32);
    put_zeros(&b, 64);
    refuse_gguf(&b, "64 bytes after the last tensor");
}

/* ---- nibble's own checksum ---- */

/* A file with the two keys and the right checksum. *at: offset of the checksum. */
static struct bytes checked_file(size_t *at)
{
    struct bytes b = {0};
    header(&b, 1, 3);
    kv_u32(&b, "qwen3.block_count", 1);
    kv_string(&b, NBI_GGUF_KEY_VERSION, "0.0.0 (test)");
    kv_u32(&b, NBI_GGUF_KEY_CRC, 0);
    *at = b.len - 4;
    vector(&b, "t", 8, 0);
    pad(&b, 32);
    uint32_t crc = nbi_crc32c(0, b.p, b.len);
    for (int i = 0; i < 4; i++)
        b.p[*at + (size_t)i] = (uint8_t)(crc >> 8 * i);
    put_zeros(&b, 32);
    return b;
}

static void test_hostile_gguf__refuses_a_wrong_checksum(void **state)
{
    (void)state;
    size_t at;
    struct bytes b = checked_file(&at);
    accept(NBI_FORMAT_GGUF, &b);
    b = checked_file(&at);
    b.p[at] ^= 1;
    refuse_gguf(&b, "does not match its checksum");
    b = checked_file(&at);
    b.p[24 + 8 + strlen("qwen3.block_count") + 4] ^= 2; /* another plausible number of layers */
    refuse_gguf(&b, "does not match its checksum");
    b = checked_file(&at);
    b.p[b.len - 32 - 1] ^= 1; /* padding */
    refuse_gguf(&b, "does not match its checksum");
}

static void test_hostile_gguf__refuses_one_of_two_checksum_keys(void **state)
{
    (void)state;
    struct bytes b = {0};
    header(&b, 1, 1);
    kv_string(&b, NBI_GGUF_KEY_VERSION, "0.0.0");
    one_tensor(&b);
    refuse_gguf(&b, "metadata 'nibble.header_crc32c' is damaged or missing");

    header(&b, 1, 1);
    kv_u32(&b, NBI_GGUF_KEY_CRC, 0);
    one_tensor(&b);
    refuse_gguf(&b, "metadata 'nibble.version' is damaged or missing");

    header(&b, 1, 2);
    kv_string(&b, NBI_GGUF_KEY_VERSION, "0.0.0");
    kv_string(&b, NBI_GGUF_KEY_CRC, "0");
    one_tensor(&b);
    refuse_gguf(&b, "metadata 'nibble.header_crc32c' is damaged or missing");
}

/* ---- the config in the metadata ---- */

struct model_case {
    uint32_t layers, heads, kv_heads, head_dim, hidden;
    const char *arch;
    float eps;
    uint32_t eos;
    bool no_head_dim;
};

static const struct model_case good_model = {1, 2, 1, 2, 8, "qwen3", 1e-6f, 3, false};

/* A file whose metadata describes a model and whose only tensor is an embedding of 4 rows. */
static struct bytes model_file(const struct model_case *m)
{
    struct bytes b = {0};
    header(&b, 1, m->no_head_dim ? 9 : 10);
    kv_string(&b, "general.architecture", m->arch);
    kv_u32(&b, "qwen3.embedding_length", m->hidden);
    kv_u32(&b, "qwen3.feed_forward_length", 8);
    kv_u32(&b, "qwen3.block_count", m->layers);
    kv_u32(&b, "qwen3.attention.head_count", m->heads);
    kv_u32(&b, "qwen3.attention.head_count_kv", m->kv_heads);
    if (!m->no_head_dim)
        kv_u32(&b, "qwen3.attention.key_length", m->head_dim);
    kv_u32(&b, "qwen3.context_length", 128);
    kv_f32(&b, "qwen3.attention.layer_norm_rms_epsilon", m->eps);
    kv_u32(&b, "tokenizer.ggml.eos_token_id", m->eos);
    tensor(&b, "token_embd.weight", 2, (const uint64_t[]){8, 4}, TENSOR_F32, 0);
    pad(&b, 32);
    put_zeros(&b, 128);
    return b;
}

static enum nb_status config_of(struct model_case m)
{
    struct bytes b = model_file(&m);
    struct nbi_store *store;
    struct nbi_config config;
    assert_int_equal(nbi_store_open_memory(&store, NBI_FORMAT_GGUF, b.p, b.len), NB_OK);
    enum nb_status rc = nbi_model_translate(store);
    if (rc == NB_OK)
        rc = nbi_config_from_gguf(&config, store);
    nbi_store_close(store);
    free(b.p);
    return rc;
}

static void refuse_config(struct model_case m, const char *words)
{
    assert_int_not_equal(config_of(m), NB_OK);
    expect_message(words, "config");
}

/* llama.cpp PR 25821: more layers than fit an array of 512. */
static void test_hostile_gguf__refuses_too_many_layers(void **state)
{
    (void)state;
    assert_int_equal(config_of(good_model), NB_OK);
    const uint32_t layers[] = {0, 513, 1u << 16, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < LENGTH(layers); i++) {
        struct model_case m = good_model;
        m.layers = layers[i];
        refuse_config(m, "metadata 'qwen3.block_count' is");
    }
}

static void test_hostile_gguf__refuses_bad_head_counts(void **state)
{
    (void)state;
    struct model_case m = good_model;
    m.heads = 0;
    refuse_config(m, "'qwen3.attention.head_count' is 0");
    m.heads = UINT32_MAX;
    refuse_config(m, "'qwen3.attention.head_count' is");
    m = good_model;
    m.kv_heads = 0;
    refuse_config(m, "'qwen3.attention.head_count_kv' is 0");
    m.kv_heads = 3;
    refuse_config(m, "not a multiple");
    m = good_model;
    m.head_dim = 3;
    refuse_config(m, "not an even number");
    m.head_dim = 1u << 20;
    refuse_config(m, "'qwen3.attention.key_length' is");
}

/* Without key_length a head has hidden / heads values, which can be 0. */
static void test_hostile_gguf__refuses_heads_of_no_values(void **state)
{
    (void)state;
    struct model_case m = good_model;
    m.no_head_dim = true;
    m.heads = m.kv_heads = 16;
    assert_int_not_equal(config_of(m), NB_OK);
    m.heads = m.kv_heads = 1;
    m.hidden = 1 << 20; /* one head of a million values */
    assert_int_not_equal(config_of(m), NB_OK);
}

static void test_hostile_gguf__refuses_other_config_values(void **state)
{
    (void)state;
    struct model_case m = good_model;
    m.arch = "llama";
    refuse_config(m, "architecture 'llama' is not supported");
    m = good_model;
    m.hidden = 0;
    refuse_config(m, "'qwen3.embedding_length' is 0");
    m.hidden = UINT32_MAX;
    refuse_config(m, "'qwen3.embedding_length' is");
    m = good_model;
    m.eps = 0;
    refuse_config(m, "epsilon' is 0");
    m.eps = -1;
    refuse_config(m, "epsilon' is -1");
    const uint32_t nan = 0x7FC00000;
    memcpy(&m.eps, &nan, sizeof m.eps);
    refuse_config(m, "epsilon' is");
    m = good_model;
    m.eos = 4; /* the embedding has 4 rows */
    refuse_config(m, "eos_token_id 4 is outside the vocabulary of 4");
    m.eos = UINT32_MAX;
    refuse_config(m, "eos_token_id' is");
}

static void test_hostile_gguf__refuses_a_config_without_its_keys(void **state)
{
    (void)state;
    struct bytes b = {0};
    struct nbi_store *store;
    struct nbi_config config;
    header(&b, 0, 1);
    kv_string(&b, "general.architecture", "qwen3");
    assert_int_equal(nbi_store_open_memory(&store, NBI_FORMAT_GGUF, b.p, b.len), NB_OK);
    assert_int_not_equal(nbi_config_from_gguf(&config, store), NB_OK);
    expect_message("metadata 'qwen3.context_length' is missing", "config");
    nbi_store_close(store);
    b.len = 0;
    header(&b, 0, 0);
    assert_int_equal(nbi_store_open_memory(&store, NBI_FORMAT_GGUF, b.p, b.len), NB_OK);
    assert_int_not_equal(nbi_config_from_gguf(&config, store), NB_OK);
    expect_message("metadata 'general.architecture' is missing", "config");
    nbi_store_close(store);
    free(b.p);
}

/* ---- the tokenizer in the metadata ---- */

typedef void (*put_fn)(struct bytes *b);

static void good_tokens(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.tokens", NBI_GGUF_STRING, 2);
    put_string(b, "a");
    put_string(b, "b");
}

static void good_types(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.token_type", NBI_GGUF_I32, 2);
    put_u32(b, 1);
    put_u32(b, 1);
}

static void good_merges(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.merges", NBI_GGUF_STRING, 1);
    put_string(b, "a b");
}

static enum nb_status read_vocab(put_fn tokens, put_fn types, put_fn merges)
{
    struct bytes b = {0};
    struct nbi_store *store;
    struct nbi_vocab vocab;
    uint8_t *copy;
    header(&b, 0, 5);
    kv_string(&b, "tokenizer.ggml.model", "gpt2");
    kv_string(&b, "tokenizer.ggml.pre", "qwen2");
    tokens(&b);
    types(&b);
    merges(&b);
    assert_int_equal(open_exact(NBI_FORMAT_GGUF, b.p, b.len, &store, &copy), NB_OK);
    enum nb_status rc = nbi_vocab_read_gguf(&vocab, store);
    if (rc == NB_OK)
        nbi_vocab_release(&vocab);
    nbi_store_close(store);
    free(copy);
    free(b.p);
    return rc;
}

static void float_tokens(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.tokens", NBI_GGUF_F32, 2);
    put_u64(b, 0);
}

static void single_token(struct bytes *b)
{
    kv_string(b, "tokenizer.ggml.tokens", "a");
}

static void wild_tokens(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.tokens", NBI_GGUF_STRING, 1);
    put_string(b, "\xff");
}

static void byte_types(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.token_type", NBI_GGUF_U8, 2);
    put_u8(b, 1);
    put_u8(b, 1);
}

static void string_types(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.token_type", NBI_GGUF_STRING, 2);
    put_string(b, "");
    put_string(b, "");
}

static void few_types(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.token_type", NBI_GGUF_I32, 0);
}

static void int_merges(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.merges", NBI_GGUF_I64, 1);
    put_u64(b, 1);
}

static void merge_without_space(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.merges", NBI_GGUF_STRING, 1);
    put_string(b, "ab");
}

static void empty_merge(struct bytes *b)
{
    kv_array(b, "tokenizer.ggml.merges", NBI_GGUF_STRING, 1);
    put_string(b, "");
}

/* llama.cpp PR 26690: arrays used without a check of their element type. */
static void test_hostile_gguf__refuses_tokenizers_of_wrong_types(void **state)
{
    (void)state;
    const struct {
        put_fn tokens, types, merges;
        const char *words;
    } cases[] = {
        {float_tokens, good_types, good_merges, "tokens' is not an array of strings"},
        {single_token, good_types, good_merges, "tokens' is not an array"},
        {wild_tokens, good_types, good_merges, "token 0 is not text"},
        {good_tokens, few_types, good_merges, "has no type"},
        {good_tokens, byte_types, good_merges, "token_type' is not an array of 32-bit numbers"},
        {good_tokens, string_types, good_merges, "token_type' is not an array of 32-bit numbers"},
        {good_tokens, good_types, int_merges, "merges' is not an array of strings"},
        {good_tokens, good_types, merge_without_space, "merge 0 is not a pair"},
        {good_tokens, good_types, empty_merge, "merge 0 is not a pair"},
    };
    assert_int_equal(read_vocab(good_tokens, good_types, good_merges), NB_OK);
    for (size_t i = 0; i < LENGTH(cases); i++) {
        assert_int_not_equal(read_vocab(cases[i].tokens, cases[i].types, cases[i].merges), NB_OK);
        expect_message(cases[i].words, "tokenizer");
    }
}

/* A file that changes after its header was checked must not lead the reader out of its buffer: the
 * first length now covers the whole array, and there is no second one. */
static void test_hostile_gguf__survives_an_array_that_changes_after_opening(void **state)
{
    (void)state;
    struct bytes b = {0};
    struct nbi_store *store;
    struct nbi_vocab vocab;
    uint8_t *copy;
    header(&b, 0, 4);
    kv_string(&b, "tokenizer.ggml.model", "gpt2");
    kv_string(&b, "tokenizer.ggml.pre", "qwen2");
    good_merges(&b);
    good_tokens(&b);
    assert_int_equal(open_exact(NBI_FORMAT_GGUF, b.p, b.len, &store, &copy), NB_OK);
    copy[b.len - 18] = 10; /* 8 + "a" + 8 + "b": the first string takes the rest */
    memset(copy + b.len - 10, 'x', 10);
    assert_int_not_equal(nbi_vocab_read_gguf(&vocab, store), NB_OK);
    expect_message("changed while it was read", "array");
    nbi_store_close(store);
    free(copy);
    free(b.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_gguf__accepts_the_unmodified_file),
        cmocka_unit_test(test_hostile_gguf__refuses_other_magic),
        cmocka_unit_test(test_hostile_gguf__refuses_other_versions),
        cmocka_unit_test(test_hostile_gguf__refuses_huge_counts),
        cmocka_unit_test(test_hostile_gguf__refuses_string_lengths_past_the_end),
        cmocka_unit_test(test_hostile_gguf__refuses_huge_arrays),
        cmocka_unit_test(test_hostile_gguf__refuses_bad_value_types),
        cmocka_unit_test(test_hostile_gguf__refuses_nested_arrays),
        cmocka_unit_test(test_hostile_gguf__refuses_duplicate_keys),
        cmocka_unit_test(test_hostile_gguf__refuses_keys_that_are_not_text),
        cmocka_unit_test(test_hostile_gguf__refuses_a_key_too_long),
        cmocka_unit_test(test_hostile_gguf__refuses_bad_alignments),
        cmocka_unit_test(test_hostile_gguf__refuses_five_dimensions),
        cmocka_unit_test(test_hostile_gguf__refuses_dimensions_that_overflow),
        cmocka_unit_test(test_hostile_gguf__refuses_tensors_outside_the_file),
        cmocka_unit_test(test_hostile_gguf__refuses_sizes_whose_sum_wraps),
        cmocka_unit_test(test_hostile_gguf__refuses_overlapping_tensors),
        cmocka_unit_test(test_hostile_gguf__refuses_duplicate_tensors),
        cmocka_unit_test(test_hostile_gguf__refuses_tensor_names_that_are_not_text),
        cmocka_unit_test(test_hostile_gguf__refuses_other_tensor_types),
        cmocka_unit_test(test_hostile_gguf__refuses_nvfp4_rows_with_partial_blocks),
        cmocka_unit_test(test_hostile_gguf__refuses_unusable_tensor_scales),
        cmocka_unit_test(test_hostile_gguf__refuses_truncated_data),
        cmocka_unit_test(test_hostile_gguf__refuses_bytes_after_the_last_tensor),
        cmocka_unit_test(test_hostile_gguf__refuses_a_wrong_checksum),
        cmocka_unit_test(test_hostile_gguf__refuses_one_of_two_checksum_keys),
        cmocka_unit_test(test_hostile_gguf__refuses_too_many_layers),
        cmocka_unit_test(test_hostile_gguf__refuses_bad_head_counts),
        cmocka_unit_test(test_hostile_gguf__refuses_heads_of_no_values),
        cmocka_unit_test(test_hostile_gguf__refuses_other_config_values),
        cmocka_unit_test(test_hostile_gguf__refuses_a_config_without_its_keys),
        cmocka_unit_test(test_hostile_gguf__refuses_tokenizers_of_wrong_types),
        cmocka_unit_test(test_hostile_gguf__survives_an_array_that_changes_after_opening),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
