/* fuzz_chat.c - renders arbitrary bytes as chat messages with every template. The output must be
 * valid text, and each range one answer that ends with the end-of-message token. */
#include "fuzz/text_target.h"
#include "tokenizer/chat_template.h"

static bool ends_in(const char *text, size_t len, const char *ending)
{
    size_t n = strlen(ending);
    return len >= n && memcmp(text + len - n, ending, n) == 0;
}

static void check_ranges(enum nbi_chat_kind kind, const struct nbi_rendered *r)
{
    size_t at = 0;
    for (size_t i = 0; i < r->range_count; i++) {
        const struct nbi_range *range = &r->ranges[i];
        MUST(range->start >= at && range->end >= range->start && range->end <= r->text.len);
        MUST(ends_in(r->text.p, range->end, "<|im_end|>"));
        MUST(range->end - range->start >= strlen("<|im_end|>"));
        MUST(range->end < r->text.len && r->text.p[range->end] == '\n');
        MUST(ends_in(r->text.p, range->start, "<|im_start|>assistant\n") ||
             (kind == NBI_CHAT_QWEN3 && ends_in(r->text.p, range->start, "</think>\n\n")));
        at = range->end;
    }
}

static void render(enum nbi_chat_kind kind, struct nbi_jspan request)
{
    struct nbi_rendered r, again;
    if (nbi_chat_render(kind, request, &r) != NB_OK) {
        MUST(nb_last_error()[0] != 0 && r.text.p == NULL && r.ranges == NULL);
        return;
    }
    MUST(nbi_utf8_valid(nbi_str_text(&r.text), r.text.len));
    check_ranges(kind, &r);
    MUST(nbi_chat_render(kind, request, &again) == NB_OK && again.text.len == r.text.len);
    MUST(memcmp(nbi_str_text(&again.text), nbi_str_text(&r.text), r.text.len) == 0);
    nbi_rendered_release(&again);
    nbi_rendered_release(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct nbi_jspan request;
    if (nbi_jscan(&request, (const char *)data, size) != NB_OK) {
        MUST(nb_last_error()[0] != 0);
        return 0;
    }
    render(NBI_CHAT_CHATML, request);
    render(NBI_CHAT_QWEN3_2507, request);
    render(NBI_CHAT_QWEN3, request);
    return 0;
}
