/* layout.c - joins stored parts into entries: which parts make one NVFP4 weight, in each layout.
 *
 * The layout follows from the names of the parts. A part whose counterpart is missing is an error
 * and is never dropped. */
#include <math.h>
#include <string.h>

#include "base/log.h"
#include "base/str.h"
#include "formats/read.h"
#include "tensor/nvfp4.h"

/* ---- finding parts by name ---- */

static int by_part_name(const void *a, const void *b)
{
    return strcmp((*(struct nbi_part *const *)a)->name, (*(struct nbi_part *const *)b)->name);
}

/* Returns the parts sorted by name in a new array of pointers, which the caller frees. Fails on a
 * duplicate name. */
static enum nb_status sort_parts(const struct nbi_parts *parts, struct nbi_part ***sorted)
{
    size_t n = (size_t)parts->count;
    *sorted = NULL;
    struct nbi_part **s = malloc((n ? n : 1) * sizeof *s);
    if (!s)
        return nbi_fail_memory("tensor list", n * sizeof *s);
    for (size_t i = 0; i < n; i++)
        s[i] = &parts->p[i];
    if (n)
        qsort(s, n, sizeof *s, by_part_name);
    for (size_t i = 1; i < n; i++)
        if (strcmp(s[i - 1]->name, s[i]->name) == 0) {
            enum nb_status rc = nbi_fail(NB_EFORMAT, "two tensors are named '%s'", s[i]->name);
            free(s);
            return rc;
        }
    *sorted = s;
    return NB_OK;
}

static struct nbi_part *find_part(struct nbi_part **sorted, int64_t count, const char *name)
{
    int64_t lo = 0, hi = count;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        int order = strcmp(name, sorted[mid]->name);
        if (order == 0)
            return sorted[mid];
        if (order < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

/* ---- pairing ---- */

struct pairing {
    struct nbi_store *store;
    struct nbi_part **sorted;
    int64_t count;
};

/* Returns the part named STEM + SUFFIX, or NULL. stem is stem_len bytes long. */
static struct nbi_part *sibling(const struct pairing *p, const char *stem, size_t stem_len,
                                const char *suffix)
{
    char name[NBI_NAME_MAX + 64];
    snprintf(name, sizeof name, "%.*s%s", (int)stem_len, stem, suffix);
    return find_part(p->sorted, p->count, name);
}

static enum nb_status set_name(struct nbi_store *store, struct nbi_entry *e, const char *name)
{
    char *copy;
    NBI_TRY(nbi_arena_string(&store->arena, "names", name, strlen(name), &copy));
    e->name = copy;
    return NB_OK;
}

/* Reads a tensor scale as stored. */
static enum nb_status read_scalar(const struct pairing *p, struct nbi_part *part,
                                  struct nbi_entry *e, float *v)
{
    if (part->dtype != NBI_F32 || part->count != 1)
        return nbi_fail(NB_EFORMAT, "'%s' must be one f32 value", part->name);
    uint8_t b[4];
    NBI_TRY(nbi_source_read(p->store->files[part->span.file], part->span.offset, b, 4));
    memcpy(v, b, 4);
    if (!isnormal(*v) || *v < 0)
        return nbi_fail(NB_EFORMAT, "'%s' is %g; a tensor scale must be finite and positive",
                        part->name, (double)*v);
    part->used = true;
    e->tensor_scale_bytes = part->span.bytes;
    return NB_OK;
}

static bool scale_dtype_allowed(enum nbi_layout layout, enum nbi_dtype d)
{
    if (d == NBI_E4M3)
        return true;
    return layout == NBI_LAYOUT_DAT && (d == NBI_U8 || nbi_dtype_is_float(d));
}

/* Joins codes [out, in / 2] and block scales [out, in / 16] of one weight. */
static enum nb_status join(struct pairing *p, struct nbi_entry *e, struct nbi_part *codes,
                           struct nbi_part *scale, enum nbi_layout layout)
{
    if (p->store->layout != NBI_LAYOUT_NONE && p->store->layout != layout)
        return nbi_fail(NB_EFORMAT, "'%s' uses another NVFP4 layout than the tensors before it",
                        codes->name);
    if (codes->ndim != 2 || scale->ndim != 2 || codes->shape[0] != scale->shape[0] ||
        codes->shape[1] % (NBI_NVFP4_BLOCK / 2) != 0 ||
        codes->shape[1] / (NBI_NVFP4_BLOCK / 2) != scale->shape[1])
        return nbi_fail(NB_EFORMAT,
                        "'%s' and '%s' do not fit: codes [out, in/2] need scales [out, in/16]",
                        codes->name, scale->name);
    if (!scale_dtype_allowed(layout, scale->dtype))
        return nbi_fail(NB_EFORMAT, "block scales '%s' have type %s", scale->name,
                        nbi_dtypes[scale->dtype].name);
    codes->used = scale->used = true;
    p->store->layout = layout;
    e->dtype = NBI_NVFP4;
    e->ndim = 2;
    e->shape[0] = codes->shape[0];
    e->shape[1] = 2 * codes->shape[1];
    e->count = 2 * codes->count;
    e->data = codes->span;
    e->scale = scale->span;
    e->scale_dtype = scale->dtype == NBI_U8 ? NBI_E4M3 : scale->dtype;
    return NB_OK;
}

static bool has_suffix(const struct nbi_part *part, const char *suffix)
{
    return suffix && nbi_ends_with(part->name, suffix);
}

static bool is_codes(const struct nbi_part *part)
{
    return part->dtype == NBI_U8 || part->dtype == NBI_E2M1X2;
}

static enum nb_status missing(const struct nbi_part *part, const char *suffix)
{
    return nbi_fail(NB_EFORMAT, "'%s' has no '%s' beside it", part->name, suffix);
}

/* `.dat`: STEM.qdata and STEM.scale; STEM may lack the final ".weight". */
static enum nb_status pair_dat(struct pairing *p, struct nbi_part *part, struct nbi_entry *e)
{
    const struct nbi_layout_info *suffix = &nbi_layouts[NBI_LAYOUT_DAT];
    size_t stem = strlen(part->name) - strlen(suffix->codes);
    struct nbi_part *scale = sibling(p, part->name, stem, suffix->block_scales);
    struct nbi_part *tscale = sibling(p, part->name, stem, suffix->tensor_scale);
    if (!scale)
        return missing(part, suffix->block_scales);
    if (!is_codes(part))
        return nbi_fail(NB_EFORMAT, "'%s' has type %s, codes must be bytes", part->name,
                        nbi_dtypes[part->dtype].name);
    NBI_TRY(join(p, e, part, scale, NBI_LAYOUT_DAT));
    if (tscale)
        NBI_TRY(read_scalar(p, tscale, e, &e->tensor_scale));
    e->two_level = tscale != NULL;
    char name[NBI_NAME_MAX + 16];
    snprintf(name, sizeof name, "%.*s", (int)stem, part->name);
    if (!nbi_is_weight_name(name))
        snprintf(name + stem, sizeof name - stem, ".weight");
    return set_name(p->store, e, name);
}

static const char *const activation_suffixes[] = {".input_scale", ".input_global_scale", ".k_scale",
                                                  ".v_scale", NULL};

/* Skips the activation and cache scales of a calibrated model, which nibble does not use. */
static void drop_activation_scales(struct pairing *p, const char *stem, size_t len)
{
    for (const char *const *suffix = activation_suffixes; *suffix; suffix++) {
        struct nbi_part *part = sibling(p, stem, len, *suffix);
        if (part && part->dtype == NBI_F32 && part->count == 1) {
            part->used = true;
            nbi_log(NB_LOG_DEBUG, "'%s' is not used", part->name);
        }
    }
}

/* Safetensors layouts always store a tensor scale. Weights need none above 1, so a larger one is
 * probably a divisor taken for a factor, or the reverse. */
static void set_two_level(struct nbi_entry *e)
{
    e->two_level = e->tensor_scale != 1.0f;
    if (e->tensor_scale > 1.0f)
        nbi_log(NB_LOG_WARN,
                "'%s' has tensor scale %g, unusually large: is it stored the other way round?",
                e->name, (double)e->tensor_scale);
}

static enum nb_status pair_modelopt(struct pairing *p, struct nbi_part *part,
                                    struct nbi_part *scale, struct nbi_entry *e)
{
    const char *suffix = nbi_layouts[NBI_LAYOUT_MODELOPT].tensor_scale;
    size_t stem = nbi_stem_length(part->name);
    struct nbi_part *tscale = sibling(p, part->name, stem, suffix);
    if (!tscale)
        return missing(part, suffix);
    NBI_TRY(join(p, e, part, scale, NBI_LAYOUT_MODELOPT));
    NBI_TRY(read_scalar(p, tscale, e, &e->tensor_scale));
    drop_activation_scales(p, part->name, stem);
    e->name = part->name;
    set_two_level(e);
    return NB_OK;
}

static enum nb_status pair_compressed(struct pairing *p, struct nbi_part *part, struct nbi_entry *e)
{
    const struct nbi_layout_info *suffix = &nbi_layouts[NBI_LAYOUT_COMPRESSED_TENSORS];
    size_t stem = strlen(part->name) - strlen(suffix->codes);
    struct nbi_part *scale = sibling(p, part->name, stem, suffix->block_scales);
    struct nbi_part *divisor = sibling(p, part->name, stem, suffix->tensor_scale);
    if (!scale || !divisor)
        return missing(part, scale ? suffix->tensor_scale : suffix->block_scales);
    if (part->dtype != NBI_U8)
        return nbi_fail(NB_EFORMAT, "'%s' has type %s, codes must be bytes", part->name,
                        nbi_dtypes[part->dtype].name);
    NBI_TRY(join(p, e, part, scale, NBI_LAYOUT_COMPRESSED_TENSORS));
    NBI_TRY(read_scalar(p, divisor, e, &e->divisor));
    e->tensor_scale = 1.0f / e->divisor;
    if (!isnormal(e->tensor_scale))
        return nbi_fail(NB_EFORMAT, "'%s' is %g, its inverse is not a usable scale", divisor->name,
                        (double)e->divisor);
    drop_activation_scales(p, part->name, stem);
    char name[NBI_NAME_MAX + 1];
    snprintf(name, sizeof name, "%.*s.weight", (int)stem, part->name);
    NBI_TRY(set_name(p->store, e, name));
    set_two_level(e);
    return NB_OK;
}

/* GGUF stores codes and block scales together; the tensor scale of X.weight is X.scale. */
static enum nb_status pair_gguf(struct pairing *p, struct nbi_part *part, struct nbi_entry *e)
{
    p->store->layout = NBI_LAYOUT_GGUF;
    if (!nbi_is_weight_name(part->name))
        return NB_OK;
    size_t stem = nbi_stem_length(part->name);
    struct nbi_part *scale =
        sibling(p, part->name, stem, nbi_layouts[NBI_LAYOUT_GGUF].tensor_scale);
    if (!scale)
        scale = sibling(p, part->name, stem, ".weight.scale");
    if (scale)
        NBI_TRY(read_scalar(p, scale, e, &e->tensor_scale));
    e->two_level = scale != NULL;
    drop_activation_scales(p, part->name, stem);
    return NB_OK;
}

static void make_plain_entry(struct nbi_part *part, struct nbi_entry *e)
{
    part->used = true;
    e->name = part->name;
    e->dtype = part->dtype;
    e->ndim = part->ndim;
    memcpy(e->shape, part->shape, sizeof e->shape);
    e->count = part->count;
    e->data = part->span;
}

static enum nb_status make_entry(struct pairing *p, struct nbi_part *part, struct nbi_entry *e)
{
    enum nbi_format format = p->store->format;
    struct nbi_part *scale = NULL;
    if (format == NBI_FORMAT_DAT && has_suffix(part, nbi_layouts[NBI_LAYOUT_DAT].codes))
        return pair_dat(p, part, e);
    if (format == NBI_FORMAT_SAFETENSORS &&
        has_suffix(part, nbi_layouts[NBI_LAYOUT_COMPRESSED_TENSORS].codes))
        return pair_compressed(p, part, e);
    if (format == NBI_FORMAT_SAFETENSORS && part->dtype == NBI_U8 &&
        nbi_is_weight_name(part->name) &&
        (scale = sibling(p, part->name, nbi_stem_length(part->name),
                         nbi_layouts[NBI_LAYOUT_MODELOPT].block_scales)))
        return pair_modelopt(p, part, scale, e);
    if (part->dtype == NBI_NVFP4)
        NBI_TRY(pair_gguf(p, part, e));
    make_plain_entry(part, e);
    return NB_OK;
}

/* Whether a part belongs to another, whose entry takes it in. */
static bool is_companion(const struct pairing *p, const struct nbi_part *part)
{
    enum nbi_format format = p->store->format;
    for (int i = 0; i < NBI_LAYOUTS; i++)
        if (nbi_layouts[i].format == format && (has_suffix(part, nbi_layouts[i].block_scales) ||
                                                has_suffix(part, nbi_layouts[i].tensor_scale)))
            return true;
    if (format == NBI_FORMAT_GGUF)
        return has_suffix(part, ".input_scale");
    for (const char *const *s = activation_suffixes; format == NBI_FORMAT_SAFETENSORS && *s; s++)
        if (has_suffix(part, *s))
            return true;
    return false;
}

static int by_entry_name(const void *a, const void *b)
{
    return strcmp((*(struct nbi_entry *const *)a)->name, (*(struct nbi_entry *const *)b)->name);
}

static enum nb_status index_entries(struct nbi_store *store)
{
    void *p;
    NBI_TRY(nbi_arena_array(&store->arena, "name index", (size_t)store->count,
                            sizeof *store->by_name, &p));
    store->by_name = p;
    for (int64_t i = 0; i < store->count; i++)
        store->by_name[i] = &store->entries[i];
    if (store->count)
        qsort(store->by_name, (size_t)store->count, sizeof *store->by_name, by_entry_name);
    for (int64_t i = 1; i < store->count; i++)
        if (strcmp(store->by_name[i - 1]->name, store->by_name[i]->name) == 0)
            return nbi_fail(NB_EFORMAT, "two tensors are named '%s'", store->by_name[i]->name);
    return NB_OK;
}

static enum nb_status pair_all(struct pairing *p, struct nbi_parts *parts)
{
    struct nbi_store *store = p->store;
    void *entries;
    NBI_TRY(nbi_arena_array(&store->arena, "entries", (size_t)parts->count, sizeof *store->entries,
                            &entries));
    store->entries = entries;
    for (int64_t i = 0; i < parts->count; i++) {
        if (is_companion(p, &parts->p[i]))
            continue;
        store->entries[store->count].tensor_scale = 1.0f;
        NBI_TRY(make_entry(p, &parts->p[i], &store->entries[store->count]));
        store->count++;
    }
    for (int64_t i = 0; i < parts->count; i++)
        if (!parts->p[i].used)
            return nbi_fail(NB_EFORMAT, "'%s' is a scale without a quantised tensor",
                            parts->p[i].name);
    return index_entries(store);
}

enum nb_status nbi_join_parts(struct nbi_store *store, struct nbi_parts *parts)
{
    struct pairing p = {.store = store, .count = parts->count};
    NBI_TRY(sort_parts(parts, &p.sorted));
    enum nb_status rc = pair_all(&p, parts);
    free(p.sorted);
    return rc;
}

enum nb_status nbi_store_rename(struct nbi_store *store, nbi_name_fn translate)
{
    for (int64_t i = 0; i < store->count; i++) {
        char name[NBI_NAME_MAX + 1];
        if (translate(store->entries[i].name, name, sizeof name))
            NBI_TRY(set_name(store, &store->entries[i], name));
    }
    return index_entries(store);
}
