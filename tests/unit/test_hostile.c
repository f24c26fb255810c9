/* test_hostile.c - real files of every format, damaged one byte at a time: truncated at every byte
 * of the header, and every header byte changed in three ways. Each must be refused, by the reader
 * or by the checks behind `inspect --verify`. The files are the seeds of the fuzz targets
 * (tests/fuzz/make_seeds.sh). */
#include "base/file.h"
#include "convert/verify.h"
#include "unit/hostile.h"

struct seed {
    const char *name;
    enum nbi_format format;
};

static const struct seed seeds[] = {
    {"dat/bf16.dat", NBI_FORMAT_DAT},
    {"dat/f32.dat", NBI_FORMAT_DAT},
    {"dat/nvfp4.dat", NBI_FORMAT_DAT},
    {"dat/nvfp4_two_level.dat", NBI_FORMAT_DAT},
    {"safetensors/bf16.safetensors", NBI_FORMAT_SAFETENSORS},
    {"safetensors/modelopt.safetensors", NBI_FORMAT_SAFETENSORS},
    {"safetensors/compressed.safetensors", NBI_FORMAT_SAFETENSORS},
    {"gguf/bf16.gguf", NBI_FORMAT_GGUF},
    {"gguf/nvfp4.gguf", NBI_FORMAT_GGUF},
    {"gguf/nvfp4_two_level.gguf", NBI_FORMAT_GGUF},
    {"gguf/tokenizer.gguf", NBI_FORMAT_GGUF},
};

/* A seed in memory. header[i]: byte i is not part of a tensor's values. */
struct file {
    const struct seed *seed;
    uint8_t *bytes;
    bool *header;
    size_t len;
};

/* ---- opening and checking in memory ---- */

/* Does what nb_file_open and nb_file_verify do with a file without a config.json. */
static enum nb_status check(const struct file *f, size_t len)
{
    struct nbi_model m = {0};
    enum nb_status rc = nbi_store_open_memory(&m.store, f->seed->format, f->bytes, len);
    if (rc != NB_OK)
        return rc;
    rc = nbi_model_translate(m.store);
    if (rc != NB_OK) {
        nbi_model_close(&m);
        return rc;
    }
    if (f->seed->format == NBI_FORMAT_GGUF) {
        m.has_config = nbi_config_from_gguf(&m.config, m.store) == NB_OK;
        snprintf(m.config_error, sizeof m.config_error, "config");
    }
    rc = nbi_verify(&m, 1, NULL, NULL);
    nbi_model_close(&m);
    return rc;
}

static void mark_values(struct file *f, const struct nbi_span *span)
{
    for (uint64_t i = 0; i < span->bytes; i++)
        f->header[span->offset + i] = false;
}

/* Sets header[i] except for values. unmark_dat_scales clears the tensor scales of a `.dat`; in
 * other formats they lie after the header, in gaps that no entry covers. */
static void mark_header(struct file *f)
{
    struct nbi_store *store;
    assert_int_equal(nbi_store_open_memory(&store, f->seed->format, f->bytes, f->len), NB_OK);
    uint64_t first = f->len;
    for (size_t i = 0; i < f->len; i++)
        f->header[i] = true;
    for (int64_t i = 0; i < store->count; i++) {
        mark_values(f, &store->entries[i].data);
        mark_values(f, &store->entries[i].scale);
        first = store->entries[i].data.offset < first ? store->entries[i].data.offset : first;
        if (store->entries[i].scale.bytes && store->entries[i].scale.offset < first)
            first = store->entries[i].scale.offset;
    }
    nbi_store_close(store);
    if (f->seed->format == NBI_FORMAT_DAT)
        return; /* headers are everywhere: what is not a value is header */
    /* After the header there are only padding and tensor scales, which safetensors sorts first. */
    if (f->seed->format == NBI_FORMAT_SAFETENSORS) {
        uint64_t n = 0;
        for (int i = 7; i >= 0; i--)
            n = n << 8 | f->bytes[i];
        first = 8 + n;
    }
    for (size_t i = first; i < f->len; i++)
        f->header[i] = false;
}

/* In a `.dat` the four bytes after "....tscale", type code 6 and one dimension of 1 are a tensor
 * scale. */
static void unmark_dat_scales(struct file *f)
{
    static const char head[] = ".tscale\6\1\1";
    for (size_t i = 0; f->seed->format == NBI_FORMAT_DAT && i + sizeof head + 3 <= f->len; i++)
        if (memcmp(f->bytes + i, head, sizeof head - 1) == 0)
            for (size_t k = 0; k < 4; k++)
                f->header[i + sizeof head - 1 + k] = false;
}

static void load(struct file *f, const struct seed *seed)
{
    char path[512], *bytes = NULL;
    snprintf(path, sizeof path, "%s/fuzz/corpus/%s", NB_TEST_SOURCE, seed->name);
    if (nbi_file_read(path, (size_t)1 << 20, &bytes, &f->len) != NB_OK)
        fail_msg("%s (tests/fuzz/make_seeds.sh makes it)", nb_last_error());
    f->seed = seed;
    f->bytes = malloc(f->len); /* exact size, for the sanitizer */
    f->header = calloc(f->len, sizeof *f->header);
    assert_true(f->bytes && f->header);
    memcpy(f->bytes, bytes, f->len);
    free(bytes);
    mark_header(f);
    unmark_dat_scales(f);
}

static void unload(struct file *f)
{
    free(f->bytes);
    free(f->header);
}

typedef int (*damage_fn)(struct file *f);

/* Runs fn, which returns how many damaged files were accepted, on all seeds. */
static void for_each_seed(damage_fn fn)
{
    int accepted = 0;
    for (size_t i = 0; i < LENGTH(seeds); i++) {
        struct file f;
        load(&f, &seeds[i]);
        accepted += fn(&f);
        unload(&f);
    }
    if (accepted)
        fail_msg("%d damaged files passed all checks", accepted);
}

/* ---- damage ---- */

static int undamaged(struct file *f)
{
    if (check(f, f->len) != NB_OK)
        fail_msg("'%s' itself is refused: %s", f->seed->name, nb_last_error());
    char path[512];
    struct nb_file *file = NULL;
    snprintf(path, sizeof path, "%s/fuzz/corpus/%s", NB_TEST_SOURCE, f->seed->name);
    assert_int_equal(nb_file_open(&file, path, NULL), NB_OK);
    assert_int_equal(nb_file_verify(file, 1, NULL, NULL, NULL), NB_OK);
    nb_file_close(file);
    return 0;
}

/* Opening alone must detect a truncated file. The exact copy lets the sanitizer detect reads past
 * its end. */
static bool opens_truncated(const struct file *f, size_t len)
{
    struct nbi_store *store;
    uint8_t *copy;
    enum nb_status rc = open_exact(f->seed->format, f->bytes, len, &store, &copy);
    bool silent = rc != NB_OK && nb_last_error()[0] == 0;
    if (rc == NB_OK)
        nbi_store_close(store);
    free(copy);
    if (silent)
        fail_msg("'%s' cut at %zu: refused without a message", f->seed->name, len);
    return rc == NB_OK;
}

/* The length that a GGUF must have: the padding after its last tensor is optional. */
static size_t needed_length(const struct file *f)
{
    struct nbi_store *store;
    size_t end = 0;
    assert_int_equal(nbi_store_open_memory(&store, f->seed->format, f->bytes, f->len), NB_OK);
    for (int64_t i = 0; i < store->count; i++) {
        const struct nbi_span *s = &store->entries[i].data;
        if (s->offset + s->bytes > end)
            end = s->offset + s->bytes;
    }
    if (f->seed->format != NBI_FORMAT_GGUF)
        end = f->len;
    nbi_store_close(store);
    return end;
}

static int truncate_file(struct file *f)
{
    int accepted = 0;
    size_t needed = needed_length(f);
    for (size_t len = 0; len < needed; len++) {
        bool sampled =
            len % 61 == 0 || len + 1 == needed; /* every 61st length is enough within values */
        if ((f->header[len] || sampled) && opens_truncated(f, len)) {
            print_error("accepted: '%s' cut to %zu of %zu bytes\n", f->seed->name, len, f->len);
            accepted++;
        }
    }
    return accepted;
}

static int change_byte(struct file *f)
{
    static const uint8_t masks[] = {0x01, 0x80, 0xFF};
    int accepted = 0;
    for (size_t i = 0; i < f->len; i++)
        for (size_t k = 0; k < LENGTH(masks) && f->header[i]; k++) {
            f->bytes[i] ^= masks[k];
            enum nb_status rc = check(f, f->len);
            f->bytes[i] ^= masks[k];
            if (rc == NB_OK) {
                print_error("accepted: '%s' with byte %zu (0x%02x) ^ 0x%02x\n", f->seed->name, i,
                            f->bytes[i], masks[k]);
                accepted++;
            } else if (nb_last_error()[0] == 0) {
                fail_msg("'%s' byte %zu: refused without a message", f->seed->name, i);
            }
        }
    return accepted;
}

/* Adds a byte, at the end or within the header. */
static int add_byte(struct file *f)
{
    struct file g = {.seed = f->seed, .len = f->len + 1};
    int accepted = 0;
    g.bytes = malloc(g.len);
    assert_non_null(g.bytes);
    for (size_t at = 0; at <= f->len; at++) {
        if (at < f->len && !f->header[at])
            continue;
        memcpy(g.bytes, f->bytes, at);
        memcpy(g.bytes + at + 1, f->bytes + at, f->len - at);
        g.bytes[at] = at < f->len ? f->bytes[at] : 0;
        if (check(&g, g.len) == NB_OK) {
            print_error("accepted: '%s' with byte %zu doubled\n", f->seed->name, at);
            accepted++;
        }
    }
    free(g.bytes);
    return accepted;
}

static void test_hostile__accepts_the_seeds(void **state)
{
    (void)state;
    for_each_seed(undamaged);
}

static void test_hostile__refuses_every_truncation(void **state)
{
    (void)state;
    for_each_seed(truncate_file);
}

static void test_hostile__refuses_every_changed_header_byte(void **state)
{
    (void)state;
    for_each_seed(change_byte);
}

static void test_hostile__refuses_an_extra_byte(void **state)
{
    (void)state;
    for_each_seed(add_byte);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile__accepts_the_seeds),
        cmocka_unit_test(test_hostile__refuses_every_truncation),
        cmocka_unit_test(test_hostile__refuses_every_changed_header_byte),
        cmocka_unit_test(test_hostile__refuses_an_extra_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
