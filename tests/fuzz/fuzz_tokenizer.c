/* fuzz_tokenizer.c - reads arbitrary bytes as tokenizer.json. An accepted tokenizer must encode and
 * decode a text, and survive a round trip through our writer. */
#include <sys/mman.h>

#include "fuzz/text_target.h"

static void check_vocab(const struct nbi_vocab *v)
{
    MUST(v->count >= 0 && v->count <= NBI_VOCAB_MAX && v->split.count <= NBI_SPLIT_STAGES);
    for (int64_t i = 0; i < v->count; i++)
        MUST(!v->tokens[i].text || (strlen(v->tokens[i].text) == v->tokens[i].len &&
                                    nbi_utf8_valid(v->tokens[i].text, v->tokens[i].len)));
    for (int64_t i = 0; i < v->merge_count; i++)
        MUST(strchr(v->merges[i], ' '));
}

/* Encodes the input itself. A split pattern may give up on it with an error. */
static void check_use(const struct nbi_vocab *v, const char *text, size_t len)
{
    struct nb_tokenizer *t;
    int32_t *ids;
    char *back;
    size_t count, back_len, unknown;
    if (nbi_tokenizer_new(&t, v) != NB_OK) {
        MUST(nb_last_error()[0] != 0);
        return;
    }
    MUST(nb_tokenizer_size(t) == v->count);
    for (int special = 0; special < 2; special++) {
        if (nb_tokenizer_encode(t, text, len, special, &ids, &count) != NB_OK) {
            MUST(nb_last_error()[0] != 0);
            continue;
        }
        for (size_t i = 0; i < count; i++)
            MUST(ids[i] >= 0 && ids[i] < v->count && v->tokens[ids[i]].text);
        MUST(nb_tokenizer_decode(t, ids, count, &back, &back_len, &unknown) == NB_OK);
        MUST(unknown == 0);
        check_stream(t, ids, count, back, back_len);
        free(ids);
        free(back);
    }
    nb_tokenizer_close(t);
}

static void check_copy(const struct nbi_vocab *v)
{
    struct nbi_vocab copy;
    const char *path = scratch_path(".json");
    if (nbi_vocab_write_json(v, path) == NB_OK) {
        MUST(nbi_vocab_read_json(&copy, path) == NB_OK);
        MUST(copy.count == v->count && copy.merge_count == v->merge_count);
        for (int64_t i = 0; i < v->count; i++) {
            const struct nbi_token *a = &v->tokens[i], *b = &copy.tokens[i];
            MUST(!a->text == !b->text && a->type == b->type);
            MUST(!a->text || strcmp(a->text, b->text) == 0);
            MUST((a->flags & ~NBI_TOKEN_MODEL) == (b->flags & ~NBI_TOKEN_MODEL));
        }
        for (int64_t i = 0; i < v->merge_count; i++)
            MUST(strcmp(v->merges[i], copy.merges[i]) == 0);
        nbi_vocab_release(&copy);
    }
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int input = -1; /* an unnamed file */
    struct nbi_vocab v;
    char path[64];
    if (input < 0)
        input = memfd_create("tokenizer", MFD_CLOEXEC);
    MUST(ftruncate(input, 0) == 0 && pwrite(input, data, size, 0) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", input);
    if (nbi_vocab_read_json(&v, path) != NB_OK) {
        MUST(nb_last_error()[0] != 0);
        return 0;
    }
    check_vocab(&v);
    check_use(&v, (const char *)data, size < 4096 ? size : 4096);
    if (nbi_vocab_is_qwen(&v) && v.count < 4096)
        check_copy(&v);
    nbi_vocab_release(&v);
    return 0;
}
