/* fuzz_transcript.c - reads arbitrary bytes as a transcript. The messages of an accepted one,
 * written as one line each, must read back. A conversation may be empty. */
#include "infer/transcript.h"

#include "base/jscan.h"
#include "fuzz/text_target.h"

static enum nb_status put_message(void *ctx, const struct nb_transcript_item *item)
{
    struct nbi_str *out = ctx;
    MUST(item->cut >= 0 && item->kind <= NB_ITEM_LOADED);
    if (item->kind == NB_ITEM_START || item->kind == NB_ITEM_RESET)
        return NB_OK;
    nbi_str_printf(out, "{\"role\":\"%s\",\"content\":", nb_role_name(item->message.role));
    nbi_jquote(out, item->message.text, item->message.len);
    nbi_str_puts(out, "}\n");
    return NB_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct nbi_str once = {0}, twice = {0};
    if (nbi_transcript_parse((const char *)data, size, "it", put_message, &once) == NB_OK &&
        once.len > 0) {
        MUST(nbi_transcript_parse(once.p, once.len, "it", put_message, &twice) == NB_OK);
        MUST(once.len == twice.len && memcmp(once.p, twice.p, once.len) == 0);
    }
    nbi_str_release(&once);
    nbi_str_release(&twice);
    return 0;
}
