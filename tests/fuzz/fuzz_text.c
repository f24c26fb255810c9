/* fuzz_text.c - encodes arbitrary bytes as text. Decoding the ids, at once and token by token, must
 * give the repaired text in NFC. Also decodes the bytes as ids: the stream must agree with decoding
 * at once. */
#include "fuzz/text_target.h"
#include "tokenizer/unicode.h"

static uint8_t classes[NBI_CHAR_COUNT];

/* Length of the longest recognised chat token at p, or 0. */
static size_t token_at(const struct nb_tokenizer *t, const char *p, size_t left, bool special)
{
    const struct nbi_bpe *bpe = nbi_tokenizer_bpe(t);
    size_t longest = 0, len;
    for (int64_t id = nbi_bpe_size(bpe) - 26; id < nbi_bpe_size(bpe); id++) {
        const char *text = nbi_bpe_token(bpe, id, &len);
        if (len <= left && len > longest && memcmp(p, text, len) == 0 &&
            (special || !nbi_bpe_special(bpe, id)))
            longest = len;
    }
    return longest;
}

/* The expected text: chat tokens unchanged, NFC of the text between them. */
static size_t expect(const struct nb_tokenizer *t, const char *text, size_t len, bool special,
                     struct nbi_str *out)
{
    size_t from = 0, tokens = 0;
    for (size_t i = 0; i <= len;) {
        size_t n = i < len && text[i] == '<' ? token_at(t, text + i, len - i, special) : 0;
        if (n == 0 && i < len) {
            i++;
            continue;
        }
        MUST(nbi_nfc(classes, text + from, i - from, out) == NB_OK);
        nbi_str_append(out, text + i, n);
        tokens += n > 0;
        i += n > 0 ? n : 1;
        from = i;
    }
    return tokens;
}

static void check_text(struct nb_tokenizer *t, const char *text, size_t len, bool special)
{
    struct nbi_str repaired = {0}, wanted = {0};
    int32_t *ids;
    char *back;
    size_t count, back_len, unknown, added = 0;
    nbi_utf8_repair(&repaired, text, len);
    size_t tokens = expect(t, nbi_str_text(&repaired), repaired.len, special, &wanted);
    MUST(nb_tokenizer_encode(t, text, len, special, &ids, &count) == NB_OK);
    for (size_t i = 0; i < count; i++) {
        MUST(ids[i] >= 0 && ids[i] < nb_tokenizer_size(t));
        added += ids[i] >= nb_tokenizer_size(t) - 26;
    }
    MUST(added == tokens);
    MUST(nb_tokenizer_decode(t, ids, count, &back, &back_len, &unknown) == NB_OK);
    MUST(unknown == 0 && back_len == wanted.len && back[back_len] == 0);
    MUST(memcmp(back, nbi_str_text(&wanted), back_len) == 0);
    check_stream(t, ids, count, back, back_len);
    free(ids);
    free(back);
    nbi_str_release(&repaired);
    nbi_str_release(&wanted);
}

/* Reads pairs of bytes as ids; some are not in the vocabulary. */
static void check_ids(const struct nb_tokenizer *t, const uint8_t *data, size_t size)
{
    size_t count = size / 2, len, unknown, missing = 0;
    int32_t *ids = malloc((count + 1) * sizeof *ids);
    char *text;
    for (size_t i = 0; ids && i < count; i++) {
        ids[i] = (data[2 * i] | data[2 * i + 1] << 8) % ((int32_t)nb_tokenizer_size(t) + 9);
        missing += ids[i] >= nb_tokenizer_size(t);
    }
    MUST(ids && nb_tokenizer_decode(t, ids, count, &text, &len, &unknown) == NB_OK);
    MUST(unknown == missing);
    check_stream(t, ids, count, text, len);
    free(ids);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct nb_tokenizer *t = small_tokenizer();
    static bool ready;
    if (!ready)
        nbi_char_table(classes);
    ready = true;
    check_text(t, (const char *)data, size, true);
    check_text(t, (const char *)data, size, false);
    check_ids(t, data, size);
    return 0;
}
