/* text_similarity.c - splits texts into words and compares words and prefixes. */
#include "eval/text_similarity.h"

#include <ctype.h>
#include <string.h>

#include "base/utf8.h"
#include "tokenizer/chat_template.h"

/* ---- words ---- */

struct words {
    struct nbi_strview *list;
    size_t count;
};

enum { SPACE, LETTER, SINGLE };

/* Kind and length of the character at p; a malformed byte is a SINGLE. */
static int kind_of(const char *p, const char *end, size_t *len)
{
    unsigned char c = (unsigned char)*p;
    int n = nbi_utf8_length(p, end);
    *len = n > 0 ? (size_t)n : 1;
    if (c < 0x80)
        return isalnum(c) || c == '_' ? LETTER : c <= ' ' || c == 0x7F ? SPACE : SINGLE;
    if (n == 0)
        return SINGLE;
    uint32_t code = nbi_utf8_decode(p);
    if (code == 0xA0 || code == 0x3000 || (code >= 0x2000 && code <= 0x200A))
        return SPACE;
    return code < 0x2E80 ? LETTER : SINGLE;
}

static enum nb_status cut(struct nbi_strview text, struct words *w)
{
    const char *end = text.p + text.len;
    *w = (struct words){.list = malloc((text.len + 1) * sizeof *w->list)};
    if (!w->list)
        return nbi_fail_memory("words", text.len * sizeof *w->list);
    bool inside = false;
    size_t n;
    for (const char *p = text.p; p < end; p += n) {
        int kind = kind_of(p, end, &n);
        if (kind == LETTER && inside)
            w->list[w->count - 1].len += n;
        else if (kind != SPACE)
            w->list[w->count++] = (struct nbi_strview){p, n};
        inside = kind == LETTER;
    }
    return NB_OK;
}

static int compare(const void *a, const void *b)
{
    const struct nbi_strview *x = a, *y = b;
    int order = memcmp(x->p, y->p, x->len < y->len ? x->len : y->len);
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

static size_t in_common(struct words *a, struct words *b)
{
    size_t i = 0, j = 0, common = 0;
    qsort(a->list, a->count, sizeof *a->list, compare);
    qsort(b->list, b->count, sizeof *b->list, compare);
    while (i < a->count && j < b->count) {
        int order = compare(&a->list[i], &b->list[j]);
        common += order == 0;
        i += order <= 0;
        j += order >= 0;
    }
    return common;
}

enum nb_status nbi_word_f1(struct nbi_strview a, struct nbi_strview b, double *f1)
{
    struct words x = {0}, y = {0};
    enum nb_status rc = cut(a, &x);
    if (rc == NB_OK)
        rc = cut(b, &y);
    if (rc == NB_OK) {
        size_t all = x.count + y.count;
        *f1 = all ? 2 * (double)in_common(&x, &y) / (double)all : 1;
    }
    free(x.list);
    free(y.list);
    return rc;
}

static bool same_words(const struct nbi_strview *a, const struct nbi_strview *b, size_t count)
{
    size_t i = 0;
    while (i < count && nbi_strview_equal(a[i], b[i]))
        i++;
    return i == count;
}

enum nb_status nbi_repeats(struct nbi_strview text, size_t words, size_t times, bool *yes)
{
    struct words w;
    *yes = false;
    NBI_TRY(cut(text, &w));
    for (size_t i = 0; i + words <= w.count && !*yes; i++) {
        size_t seen = 0;
        for (size_t j = i; j + words <= w.count; j++)
            seen += same_words(w.list + i, w.list + j, words);
        *yes = seen >= times;
    }
    free(w.list);
    return NB_OK;
}

/* ---- prefixes ---- */

double nbi_common_prefix(struct nbi_strview a, struct nbi_strview b)
{
    size_t longer = a.len > b.len ? a.len : b.len, shorter = a.len + b.len - longer, n = 0, at = 0;
    while (n < shorter && a.p[n] == b.p[n])
        n++;
    while (at < n) { /* round down to a character boundary */
        int len = nbi_utf8_length(a.p + at, a.p + a.len);
        size_t step = len > 0 ? (size_t)len : 1;
        if (at + step > n)
            break;
        at += step;
    }
    return longer ? (double)at / (double)longer : 1;
}

struct nbi_strview nbi_strip_thinking(const char *text, size_t len)
{
    const size_t tag = strlen(NB_THINK_END);
    const char *p = text, *stop = text + len;
    for (const char *next; (next = memmem(p, (size_t)(stop - p), NB_THINK_END, tag)) != NULL;)
        p = next + tag;
    while (p < stop && isspace((unsigned char)*p))
        p++;
    while (stop > p && isspace((unsigned char)stop[-1]))
        stop--;
    return (struct nbi_strview){p, (size_t)(stop - p)};
}

bool nbi_strview_equal(struct nbi_strview a, struct nbi_strview b)
{
    return a.len == b.len && memcmp(a.p, b.p, a.len) == 0;
}
