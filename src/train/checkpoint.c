/* checkpoint.c - writes and reads a checkpoint file: a header with all sizes, the blobs, a trailer.
 *
 * Files are not trusted. The header states the length of the file and of everything in it, and is
 * compared with the actual length before anything is allocated. The checksums of the blobs stand in
 * the trailer because the writer knows them last; a file without a trailer is incomplete. */
#include "train/checkpoint.h"

#include <string.h>

#include "base/crc.h"
#include "base/file.h"
#include "base/jscan.h"
#include "base/parallel.h"
#include "base/utf8.h"

#define MAGIC       "NBCKPT\r\n"
#define END_MAGIC   "NBCKEND\n"
#define VERSION     1u
#define FIXED_BYTES 44 /* of the header, before the settings */
#define HEADER_MAX  ((uint64_t)64 << 20)
#define PIECE       ((size_t)1 << 20) /* checksummed and copied at a time, while in cache */

struct blob {
    const char *name;
    uint64_t bytes, offset;
    uint32_t crc;
};

struct nbi_checkpoint {
    struct nbi_source *src;
    uint8_t *header; /* owns the strings of names and settings */
    uint64_t header_bytes, step;
    uint32_t header_crc;
    const char *settings;
    struct nbi_ckpt_value *values;
    size_t value_count;
    struct blob *blobs;
    size_t blob_count;
};

/* ---- little-endian numbers ---- */

static void put_u32(struct nbi_str *s, uint32_t v)
{
    const uint8_t b[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
    nbi_str_append(s, b, sizeof b);
}

static void put_u64(struct nbi_str *s, uint64_t v)
{
    put_u32(s, (uint32_t)v);
    put_u32(s, (uint32_t)(v >> 32));
}

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t get_u64(const uint8_t *p)
{
    return (uint64_t)get_u32(p + 4) << 32 | get_u32(p);
}

/* ---- names, for both directions ---- */

static bool name_is_valid(const char *name, size_t len)
{
    return len >= 1 && len <= NBI_CKPT_NAME_MAX && nbi_utf8_printable(name, len);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Sorts the names; *twice: one that occurs twice, or NULL. */
static void find_duplicate(const char **names, size_t count, const char **twice)
{
    *twice = NULL;
    qsort(names, count, sizeof *names, by_text);
    for (size_t i = 1; i < count && !*twice; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            *twice = names[i];
}

/* Checks the names of values or blobs, whose pointers are stride bytes apart. */
static enum nb_status check_names(const void *first, size_t count, size_t stride,
                                  enum nb_status status)
{
    const char **names = count ? malloc(count * sizeof *names) : NULL;
    const char *twice;
    if (count && !names)
        return nbi_fail_memory("names of a checkpoint", count * sizeof *names);
    enum nb_status rc = NB_OK;
    for (size_t i = 0; i < count && rc == NB_OK; i++) {
        memcpy(&names[i], (const char *)first + i * stride, sizeof *names);
        if (!name_is_valid(names[i], strlen(names[i])))
            rc = nbi_fail(status, "a name is empty, too long or not printable");
    }
    if (rc == NB_OK && count) {
        find_duplicate(names, count, &twice);
        if (twice)
            rc = nbi_fail(status, "the name '%s' occurs twice", twice);
    }
    free(names);
    return rc;
}

_Static_assert(offsetof(struct nbi_ckpt_value, name) == 0, "check_names");
_Static_assert(offsetof(struct nbi_ckpt_blob, name) == 0, "check_names");
_Static_assert(offsetof(struct blob, name) == 0, "check_names");

/* ---- writing ---- */

static enum nb_status check_content(const struct nbi_ckpt_content *c)
{
    struct nbi_jspan span;
    size_t settings = strlen(c->settings);
    if (c->step > NBI_CKPT_STEP_MAX || c->value_count > NBI_CKPT_VALUES_MAX ||
        c->blob_count > NBI_CKPT_BLOBS_MAX || settings > NBI_CKPT_SETTINGS_MAX)
        return nbi_fail(NB_EINVAL,
                        "too much for a checkpoint: step %llu, %zu numbers, %zu blobs, "
                        "%zu bytes of settings",
                        (unsigned long long)c->step, c->value_count, c->blob_count, settings);
    NBI_TRY(nbi_context(nbi_jscan(&span, c->settings, settings), "settings of a checkpoint"));
    NBI_TRY(check_names(c->values, c->value_count, sizeof *c->values, NB_EINVAL));
    NBI_TRY(check_names(c->blobs, c->blob_count, sizeof *c->blobs, NB_EINVAL));
    for (size_t i = 0; i < c->blob_count; i++)
        if (c->blobs[i].bytes > 0 && !c->blobs[i].memory && !c->get)
            return nbi_fail(NB_EINVAL, "the blob '%s' has no bytes", c->blobs[i].name);
    return NB_OK;
}

static void put_name(struct nbi_str *s, const char *name)
{
    uint8_t len = (uint8_t)strlen(name);
    nbi_str_append(s, &len, 1);
    nbi_str_append(s, name, (size_t)len + 1);
}

static uint64_t trailer_bytes(size_t blobs)
{
    return 4 * (uint64_t)blobs + 8 + 4;
}

static void put_tables(struct nbi_str *s, const struct nbi_ckpt_content *c)
{
    for (size_t i = 0; i < c->value_count; i++) {
        const struct nbi_ckpt_value *v = &c->values[i];
        uint64_t bits;
        uint8_t kind = v->is_real;
        memcpy(&bits, v->is_real ? (const void *)&v->real : &v->integer, sizeof bits);
        nbi_str_append(s, &kind, 1);
        put_name(s, v->name);
        put_u64(s, bits);
    }
    for (size_t i = 0; i < c->blob_count; i++) {
        put_name(s, c->blobs[i].name);
        put_u64(s, c->blobs[i].bytes);
    }
}

/* Makes the header in s and computes the length of the file. */
static enum nb_status make_header(const struct nbi_ckpt_content *c, struct nbi_str *s,
                                  uint64_t *file_bytes)
{
    struct nbi_str tables = {0};
    size_t settings = strlen(c->settings);
    put_tables(&tables, c);
    uint64_t header = FIXED_BYTES + settings + 1 + tables.len + 4;
    uint64_t total = header + trailer_bytes(c->blob_count);
    for (size_t i = 0; i < c->blob_count; i++)
        if (__builtin_add_overflow(total, c->blobs[i].bytes, &total) || total > INT64_MAX) {
            nbi_str_release(&tables);
            return nbi_fail(NB_EINVAL, "a checkpoint of more than 2^63 bytes");
        }
    nbi_str_append(s, MAGIC, 8);
    put_u32(s, VERSION);
    put_u32(s, (uint32_t)header);
    put_u64(s, total);
    put_u64(s, c->step);
    put_u32(s, (uint32_t)settings);
    put_u32(s, (uint32_t)c->value_count);
    put_u32(s, (uint32_t)c->blob_count);
    nbi_str_append(s, c->settings, settings + 1);
    nbi_str_append(s, nbi_str_text(&tables), tables.len);
    put_u32(s, nbi_crc32c(0, nbi_str_text(s), s->len));
    enum nb_status rc = nbi_str_status(&tables);
    nbi_str_release(&tables);
    *file_bytes = total;
    return rc == NB_OK ? nbi_str_status(s) : rc;
}

/* A piece that is written while the next one is fetched. */
struct turn {
    struct nbi_outfile *f;
    const struct nbi_ckpt_content *c;
    size_t index;
    uint64_t offset, at; /* of the piece in its blob, and of the blob in the file */
    const void *piece;
    size_t bytes;
    void *next; /* NULL: there is none to fetch */
    size_t next_bytes;
    enum nb_status written, fetched;
    char message[512]; /* of a fetch that failed: messages belong to threads */
};

static void fetch_next(struct turn *t)
{
    t->fetched = t->c->get(t->c->ctx, t->index, t->offset + t->bytes, t->next, t->next_bytes);
    if (t->fetched != NB_OK)
        snprintf(t->message, sizeof t->message, "%s", nb_last_error());
}

/* For nbi_team_run: the first thread writes, the last one fetches. */
static void take_turn(void *ctx, int thread, int threads)
{
    struct turn *t = ctx;
    if (thread == 0)
        t->written = nbi_outfile_write(t->f, t->at + t->offset, t->piece, t->bytes);
    if (thread == threads - 1 && t->next && (threads > 1 || t->written == NB_OK))
        fetch_next(t);
}

/* Without overlap one thread does both. */
static enum nb_status run_turn(struct turn *t)
{
    bool both = t->next && t->c->overlap;
    t->written = t->fetched = NB_OK;
    if (both)
        nbi_team_run(2, take_turn, t);
    else
        take_turn(t, 0, 1);
    if (t->written != NB_OK || t->fetched == NB_OK)
        return t->written;
    nbi_fail(t->fetched, "%s", t->message);
    return nbi_context(t->fetched, "blob '%s'", t->c->blobs[t->index].name);
}

static size_t piece_at(const struct nbi_ckpt_blob *b, uint64_t offset)
{
    return b->bytes - offset < PIECE ? (size_t)(b->bytes - offset) : PIECE;
}

/* Writes a blob at a file offset; buffer: two pieces for the callback. */
static enum nb_status write_blob(struct nbi_outfile *f, const struct nbi_ckpt_content *c,
                                 size_t index, uint64_t at, uint8_t *buffer, uint32_t *crc)
{
    const struct nbi_ckpt_blob *b = &c->blobs[index];
    struct turn t = {.f = f, .c = c, .index = index, .at = at};
    *crc = 0;
    if (b->bytes > 0 && !b->memory)
        NBI_TRY(
            nbi_context(c->get(c->ctx, index, 0, buffer, piece_at(b, 0)), "blob '%s'", b->name));
    for (int which = 0; t.offset < b->bytes; which ^= 1) {
        t.bytes = piece_at(b, t.offset);
        t.next_bytes = piece_at(b, t.offset + t.bytes);
        t.piece =
            b->memory ? (const uint8_t *)b->memory + t.offset : buffer + (size_t)which * PIECE;
        t.next = b->memory || t.next_bytes == 0 ? NULL : buffer + (size_t)(which ^ 1) * PIECE;
        *crc = nbi_crc32c(*crc, t.piece, t.bytes);
        NBI_TRY(run_turn(&t));
        t.offset += t.bytes;
    }
    return NB_OK;
}

/* Writes the header in s, the blobs and the trailer, for which s is reused. */
static enum nb_status write_parts(struct nbi_outfile *f, const struct nbi_ckpt_content *c,
                                  struct nbi_str *s, uint8_t *buffer)
{
    uint64_t at = s->len;
    uint32_t header_crc = get_u32((const uint8_t *)s->p + s->len - 4);
    NBI_TRY(nbi_outfile_write(f, 0, s->p, s->len));
    s->len = 0;
    for (size_t i = 0; i < c->blob_count; i++) {
        uint32_t crc;
        NBI_TRY(write_blob(f, c, i, at, buffer, &crc));
        at += c->blobs[i].bytes;
        put_u32(s, crc);
    }
    nbi_str_append(s, END_MAGIC, 8);
    put_u32(s, nbi_crc32c(header_crc, nbi_str_text(s), s->len));
    NBI_TRY(nbi_str_status(s));
    return nbi_outfile_write(f, at, s->p, s->len);
}

enum nb_status nbi_checkpoint_write(const char *path, const struct nbi_ckpt_content *c)
{
    struct nbi_str s = {0};
    struct nbi_outfile *f = NULL;
    uint64_t total = 0;
    NBI_TRY(check_content(c));
    uint8_t *buffer = c->get ? malloc(2 * PIECE) : NULL;
    enum nb_status rc = c->get && !buffer ? nbi_fail_memory("checkpoint buffer", 2 * PIECE) : NB_OK;
    if (rc == NB_OK)
        rc = make_header(c, &s, &total);
    if (rc == NB_OK)
        rc = nbi_outfile_open(&f, path);
    if (rc == NB_OK)
        rc = nbi_outfile_reserve(f, total);
    if (rc == NB_OK)
        rc = write_parts(f, c, &s, buffer);
    if (rc == NB_OK)
        rc = nbi_outfile_commit(f);
    else
        nbi_outfile_abort(f);
    nbi_str_release(&s);
    free(buffer);
    return rc;
}

/* ---- reading: the header ---- */

static enum nb_status malformed(const char *what)
{
    return nbi_fail(NB_EFORMAT, "bad header: %s", what);
}

/* The part of the header that is not parsed yet, without its checksum. */
struct rest {
    const uint8_t *p;
    uint64_t left;
};

static const uint8_t *take(struct rest *r, uint64_t n)
{
    if (n > r->left)
        return NULL;
    const uint8_t *p = r->p;
    r->p += n;
    r->left -= n;
    return p;
}

/* A name with its length before it and a NUL after it; NULL if malformed. */
static const char *take_name(struct rest *r)
{
    const uint8_t *len = take(r, 1);
    const uint8_t *name = len ? take(r, (uint64_t)*len + 1) : NULL;
    return name && strnlen((const char *)name, (size_t)*len + 1) == *len ? (const char *)name
                                                                         : NULL;
}

static enum nb_status parse_values(struct nbi_checkpoint *c, struct rest *r, uint32_t count)
{
    if (count > NBI_CKPT_VALUES_MAX || count > r->left / 11)
        return malformed("more numbers than it has room for");
    c->values = calloc((size_t)count + 1, sizeof *c->values);
    if (!c->values)
        return nbi_fail_memory("checkpoint", count * sizeof *c->values);
    for (; c->value_count < count; c->value_count++) {
        struct nbi_ckpt_value *v = &c->values[c->value_count];
        const uint8_t *kind = take(r, 1);
        v->name = kind ? take_name(r) : NULL;
        const uint8_t *bits = v->name ? take(r, 8) : NULL;
        if (!bits || *kind > 1)
            return malformed("a number is cut off or of no known kind");
        uint64_t value = get_u64(bits);
        v->is_real = *kind == 1;
        memcpy(v->is_real ? (void *)&v->real : &v->integer, &value, sizeof value);
    }
    return check_names(c->values, count, sizeof *c->values, NB_EFORMAT);
}

static enum nb_status parse_blobs(struct nbi_checkpoint *c, struct rest *r, uint32_t count)
{
    uint64_t at = c->header_bytes, end = nbi_source_size(c->src), trailer = trailer_bytes(count);
    if (count > NBI_CKPT_BLOBS_MAX || count > r->left / 10 || trailer > end - at)
        return malformed("more blobs than it has room for");
    end -= trailer;
    c->blobs = calloc((size_t)count + 1, sizeof *c->blobs);
    if (!c->blobs)
        return nbi_fail_memory("checkpoint", count * sizeof *c->blobs);
    for (; c->blob_count < count; c->blob_count++) {
        struct blob *b = &c->blobs[c->blob_count];
        b->name = take_name(r);
        const uint8_t *bytes = b->name ? take(r, 8) : NULL;
        if (!bytes)
            return malformed("a blob is cut off");
        b->bytes = get_u64(bytes);
        b->offset = at;
        if (b->bytes > end - at)
            return malformed("blobs are longer than the file");
        at += b->bytes;
    }
    if (at != end)
        return malformed("blobs are shorter than the file");
    return check_names(c->blobs, count, sizeof *c->blobs, NB_EFORMAT);
}

static enum nb_status parse_header(struct nbi_checkpoint *c)
{
    const uint8_t *h = c->header;
    struct rest r = {h + FIXED_BYTES, c->header_bytes - FIXED_BYTES - 4};
    struct nbi_jspan span;
    uint32_t settings = get_u32(h + 32);
    c->step = get_u64(h + 24);
    if (c->step > NBI_CKPT_STEP_MAX)
        return malformed("the step is too large");
    const uint8_t *text = settings <= NBI_CKPT_SETTINGS_MAX ? take(&r, settings + 1ull) : NULL;
    if (!text || text[settings] != 0)
        return malformed("settings are cut off");
    c->settings = (const char *)text;
    NBI_TRY(nbi_context(nbi_jscan(&span, c->settings, settings), "settings"));
    NBI_TRY(parse_values(c, &r, get_u32(h + 36)));
    NBI_TRY(parse_blobs(c, &r, get_u32(h + 40)));
    return r.left == 0 ? NB_OK : malformed("bytes are left over");
}

/* Magic, version and sizes, from the first bytes of the file. */
static enum nb_status read_sizes(struct nbi_checkpoint *c)
{
    uint8_t h[FIXED_BYTES] = {0};
    uint64_t size = nbi_source_size(c->src), n = size < sizeof h ? size : sizeof h;
    NBI_TRY(nbi_source_read(c->src, 0, h, (size_t)n));
    if (memcmp(h, MAGIC, n < 8 ? (size_t)n : 8) != 0)
        return nbi_fail(NB_EFORMAT, "not a checkpoint");
    if (n >= 12 && get_u32(h + 8) != VERSION)
        return nbi_fail(NB_EFORMAT, "wrong version: %u, this program reads %u", get_u32(h + 8),
                        VERSION);
    if (n < sizeof h)
        return nbi_fail(NB_EFORMAT, "truncated: %llu bytes", (unsigned long long)size);
    uint64_t expected = get_u64(h + 16);
    c->header_bytes = get_u32(h + 12);
    if (size != expected)
        return nbi_fail(NB_EFORMAT, "%s: %llu bytes, its header says %llu",
                        size < expected ? "truncated" : "too long", (unsigned long long)size,
                        (unsigned long long)expected);
    if (c->header_bytes < FIXED_BYTES + 1 + 4 || c->header_bytes > HEADER_MAX ||
        c->header_bytes > size)
        return malformed("its length is impossible");
    return NB_OK;
}

static enum nb_status read_header(struct nbi_checkpoint *c)
{
    NBI_TRY(read_sizes(c));
    size_t n = (size_t)c->header_bytes;
    c->header = malloc(n);
    if (!c->header)
        return nbi_fail_memory("checkpoint header", n);
    NBI_TRY(nbi_source_read(c->src, 0, c->header, n));
    c->header_crc = get_u32(c->header + n - 4);
    if (nbi_crc32c(0, c->header, n - 4) != c->header_crc)
        return nbi_fail(NB_EFORMAT, "bad checksum in the header");
    return parse_header(c);
}

static enum nb_status read_trailer(struct nbi_checkpoint *c)
{
    size_t n = (size_t)trailer_bytes(c->blob_count);
    uint8_t *t = malloc(n);
    if (!t)
        return nbi_fail_memory("checkpoint trailer", n);
    enum nb_status rc = nbi_source_read(c->src, nbi_source_size(c->src) - n, t, n);
    if (rc == NB_OK && memcmp(t + n - 12, END_MAGIC, 8) != 0)
        rc = nbi_fail(NB_EFORMAT, "not complete: the trailer is missing");
    else if (rc == NB_OK && nbi_crc32c(c->header_crc, t, n - 4) != get_u32(t + n - 4))
        rc = nbi_fail(NB_EFORMAT, "bad checksum in the trailer");
    for (size_t i = 0; i < c->blob_count && rc == NB_OK; i++)
        c->blobs[i].crc = get_u32(t + 4 * i);
    free(t);
    return rc;
}

/* Takes ownership of src, also on failure. */
static enum nb_status open_source(struct nbi_checkpoint **out, struct nbi_source *src)
{
    struct nbi_checkpoint *c = calloc(1, sizeof *c);
    if (!c) {
        nbi_source_close(src);
        return nbi_fail_memory("checkpoint", sizeof *c);
    }
    c->src = src;
    enum nb_status rc = read_header(c);
    if (rc == NB_OK)
        rc = read_trailer(c);
    if (rc != NB_OK) {
        nbi_context(rc, "checkpoint '%s'", nbi_source_path(src));
        nbi_checkpoint_close(c);
        return rc;
    }
    *out = c;
    return NB_OK;
}

enum nb_status nbi_checkpoint_open(struct nbi_checkpoint **out, const char *path)
{
    struct nbi_source *src = NULL;
    *out = NULL;
    NBI_TRY(nbi_source_open(&src, path));
    return open_source(out, src);
}

enum nb_status nbi_checkpoint_open_memory(struct nbi_checkpoint **out, const void *bytes,
                                          size_t len)
{
    struct nbi_source *src = NULL;
    *out = NULL;
    NBI_TRY(nbi_source_memory(&src, bytes, len));
    return open_source(out, src);
}

void nbi_checkpoint_close(struct nbi_checkpoint *c)
{
    if (!c)
        return;
    nbi_source_close(c->src);
    free(c->header);
    free(c->values);
    free(c->blobs);
    free(c);
}

/* ---- reading: what is in it ---- */

const char *nbi_checkpoint_path(const struct nbi_checkpoint *c)
{
    return nbi_source_path(c->src);
}

uint64_t nbi_checkpoint_step(const struct nbi_checkpoint *c)
{
    return c->step;
}

const char *nbi_checkpoint_settings(const struct nbi_checkpoint *c)
{
    return c->settings;
}

static enum nb_status find_value(const struct nbi_checkpoint *c, const char *name, bool is_real,
                                 const struct nbi_ckpt_value **v)
{
    for (size_t i = 0; i < c->value_count; i++)
        if (c->values[i].is_real == is_real && strcmp(c->values[i].name, name) == 0) {
            *v = &c->values[i];
            return NB_OK;
        }
    return nbi_fail(NB_EFORMAT, "checkpoint '%s' has no %s number '%s'", nbi_checkpoint_path(c),
                    is_real ? "real" : "whole", name);
}

enum nb_status nbi_checkpoint_int(const struct nbi_checkpoint *c, const char *name, int64_t *v)
{
    const struct nbi_ckpt_value *found;
    NBI_TRY(find_value(c, name, false, &found));
    *v = found->integer;
    return NB_OK;
}

enum nb_status nbi_checkpoint_real(const struct nbi_checkpoint *c, const char *name, double *v)
{
    const struct nbi_ckpt_value *found;
    NBI_TRY(find_value(c, name, true, &found));
    *v = found->real;
    return NB_OK;
}

size_t nbi_checkpoint_blob_count(const struct nbi_checkpoint *c)
{
    return c->blob_count;
}

struct nbi_ckpt_blob nbi_checkpoint_blob(const struct nbi_checkpoint *c, size_t index)
{
    NBI_BUG_IF(index >= c->blob_count);
    return (struct nbi_ckpt_blob){.name = c->blobs[index].name, .bytes = c->blobs[index].bytes};
}

/* Reads a blob into dst, or through a buffer if dst is NULL, and passes each piece to put unless
 * that is NULL. */
static enum nb_status pass_blob(const struct nbi_checkpoint *c, const struct blob *b, void *dst,
                                nbi_ckpt_put_fn put, void *ctx)
{
    void *buffer = dst ? NULL : malloc(PIECE);
    if (!dst && !buffer)
        return nbi_fail_memory("checkpoint buffer", PIECE);
    enum nb_status rc = NB_OK;
    uint32_t crc = 0;
    for (uint64_t done = 0; done < b->bytes && rc == NB_OK;) {
        size_t n = b->bytes - done < PIECE ? (size_t)(b->bytes - done) : PIECE;
        void *p = dst ? (char *)dst + done : buffer;
        rc = nbi_check_interrupt();
        if (rc == NB_OK)
            rc = nbi_source_read(c->src, b->offset + done, p, n);
        if (rc == NB_OK)
            crc = nbi_crc32c(crc, p, n);
        if (rc == NB_OK && put)
            rc = put(ctx, done, p, n);
        done += n;
    }
    free(buffer);
    if (rc == NB_OK && crc != b->crc)
        rc = nbi_fail(NB_EFORMAT, "checkpoint '%s': bad checksum in blob '%s'",
                      nbi_checkpoint_path(c), b->name);
    return rc;
}

enum nb_status nbi_checkpoint_verify(const struct nbi_checkpoint *c)
{
    for (size_t i = 0; i < c->blob_count; i++)
        NBI_TRY(pass_blob(c, &c->blobs[i], NULL, NULL, NULL));
    return NB_OK;
}

static enum nb_status find_blob(const struct nbi_checkpoint *c, const char *name, uint64_t bytes,
                                const struct blob **b)
{
    *b = NULL;
    for (size_t i = 0; i < c->blob_count && !*b; i++)
        if (strcmp(c->blobs[i].name, name) == 0)
            *b = &c->blobs[i];
    if (!*b)
        return nbi_fail(NB_EFORMAT, "checkpoint '%s' has no blob '%s'", nbi_checkpoint_path(c),
                        name);
    if ((*b)->bytes != bytes)
        return nbi_fail(NB_EFORMAT, "checkpoint '%s': blob '%s' has %llu bytes, %llu expected",
                        nbi_checkpoint_path(c), name, (unsigned long long)(*b)->bytes,
                        (unsigned long long)bytes);
    return NB_OK;
}

enum nb_status nbi_checkpoint_read(const struct nbi_checkpoint *c, const char *name, void *dst,
                                   uint64_t bytes)
{
    const struct blob *b;
    NBI_TRY(find_blob(c, name, bytes, &b));
    return pass_blob(c, b, dst, NULL, NULL);
}

enum nb_status nbi_checkpoint_stream(const struct nbi_checkpoint *c, const char *name,
                                     uint64_t bytes, nbi_ckpt_put_fn put, void *ctx)
{
    const struct blob *b;
    NBI_TRY(find_blob(c, name, bytes, &b));
    return pass_blob(c, b, NULL, put, ctx);
}
