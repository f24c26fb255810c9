/* pretokenizer.c - splits text into words: Qwen's pattern in C, all others through PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer/pretokenizer.h"

#include <pcre2.h>
#include <string.h>

#include "base/utf8.h"

const char nbi_qwen_pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

const char nbi_gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

bool nbi_split_is_qwen(const struct nbi_split_rules *rules)
{
    return rules->count == 1 && !rules->prefix_space && rules->stage[0].keep == NBI_SPLIT_ALL &&
           strcmp(rules->stage[0].pattern, nbi_qwen_pattern) == 0;
}

/* ---- Qwen's pattern ---- */

struct text {
    const uint8_t *classes;
    const char *end;
};

/* Class and length of the character at p; p < end. */
static uint8_t class_at(const struct text *t, const char *p, int *len)
{
    unsigned char b = (unsigned char)*p;
    *len = nbi_char_length(p);
    return t->classes[b < 0x80 ? b : nbi_utf8_decode(p)] & NBI_CHAR_KIND;
}

/* Skips characters of one class. */
static const char *skip(const struct text *t, const char *p, uint8_t class)
{
    int n;
    while (p < t->end && class_at(t, p, &n) == class)
        p += n;
    return p;
}

static bool is_newline(char c)
{
    return c == '\r' || c == '\n';
}

/* Matches (?i:'s|'t|'re|'ve|'m|'ll|'d) at an apostrophe and returns its length, or 0. U+017F, long
 * s, equals s when case is ignored. */
static int contraction(const char *p, const char *end)
{
    size_t left = (size_t)(end - p);
    char a = left > 1 ? (char)(p[1] | 0x20) : 0, b = left > 2 ? (char)(p[2] | 0x20) : 0;
    if (left > 1 && (unsigned char)p[1] < 0x80) {
        if (a == 's' || a == 't' || a == 'm' || a == 'd')
            return 2;
        if (left > 2 && (unsigned char)p[2] < 0x80 &&
            ((b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l')))
            return 3;
    }
    return left > 2 && memcmp(p + 1, "\xC5\xBF", 2) == 0 ? 3 : 0;
}

/* End of a run of white space that is a word: after the last line break in it, or else before its
 * last character, which starts the next word; at the end of the text, all of it. */
static const char *space_end(const struct text *t, const char *p)
{
    const char *line = NULL, *last = p, *q = p;
    int n;
    while (q < t->end && class_at(t, q, &n) == NBI_CHAR_SPACE) {
        last = q;
        q += n;
        if (is_newline(*last))
            line = q;
    }
    if (line)
        return line;
    return q == t->end || last == p ? q : last;
}

/* End of the word that starts at p. */
static const char *qwen_word(const struct text *t, const char *p)
{
    int n, next_len;
    uint8_t class = class_at(t, p, &n);
    const char *next = p + n;
    if (class == NBI_CHAR_LETTER)
        return skip(t, next, NBI_CHAR_LETTER);
    if (class == NBI_CHAR_NUMBER)
        return next;
    if (*p == '\'' && (next_len = contraction(p, t->end)) > 0)
        return p + next_len;
    uint8_t following = next < t->end ? class_at(t, next, &next_len) : NBI_CHAR_SPACE;
    if (following == NBI_CHAR_LETTER && !is_newline(*p))
        return skip(t, next, NBI_CHAR_LETTER);
    if (class == NBI_CHAR_OTHER || (*p == ' ' && following == NBI_CHAR_OTHER)) {
        next = skip(t, next, NBI_CHAR_OTHER);
        while (next < t->end && is_newline(*next))
            next++;
        return next;
    }
    return space_end(t, p);
}

/* ---- other patterns ---- */

static const char spaces[] = "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}"
                             "\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
static const char not_spaces[] =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}"
    "\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}"
    "\\x{2060}-\\x{2fff}\\x{3001}-\\x{d7ff}\\x{e000}-\\x{10ffff}";

/* Letters and numbers of our table that the installed PCRE2 is too old to know, written as the
 * inside of a character set. */
struct new_characters {
    struct nbi_str letters, numbers;
};

static enum nb_status list_newer(struct nbi_str *out, const char *property, uint8_t kind)
{
    int error;
    PCRE2_SIZE at;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)property, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP, &error, &at, NULL);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (code && match) {
        pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
        for (int i = 0; i < nbi_char_range_count; i++) {
            const struct nbi_char_range *r = &nbi_char_ranges[i];
            for (uint32_t c = r->first, start = 0; c <= r->last + 1; c++) {
                char text[4];
                PCRE2_SIZE len = (PCRE2_SIZE)nbi_utf8_encode(text, c);
                bool missing = c <= r->last && (r->bits & NBI_CHAR_KIND) == kind &&
                               pcre2_match(code, (PCRE2_SPTR)text, len, 0, 0, match, NULL) < 0;
                if (!missing && start > 0)
                    nbi_str_printf(out, "\\x{%x}-\\x{%x}", (unsigned)start, (unsigned)c - 1);
                start = !missing ? 0 : start ? start : c;
            }
        }
    }
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return code && match ? nbi_str_status(out) : nbi_fail_memory("split pattern", 0);
}

/* Appends one escape. \s and \w are spelled out, because in PCRE2 \s matches U+180E and \w does not
 * match marks. */
static enum nb_status put_escape(struct nbi_str *out, char c, bool in_class)
{
    static const char word[] = "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}";
    if (c == 's' || c == 'S')
        nbi_str_printf(out, in_class ? "%s" : "[%s]", c == 's' ? spaces : not_spaces);
    else if (c == 'w')
        nbi_str_printf(out, in_class ? "%s" : "[%s]", word);
    else if (c == 'W' && !in_class)
        nbi_str_printf(out, "[^%s]", word);
    else if (c == 0)
        return nbi_fail(NB_EUNSUPPORTED, "a split pattern ends in a backslash");
    else if (strchr("WbBvhHKkgGXyYORQENC", c))
        return nbi_fail(NB_EUNSUPPORTED, "'\\%c' in a split pattern", c);
    else
        nbi_str_printf(out, "\\%c", c);
    return NB_OK;
}

/* Appends \p{L} or \p{N} together with the newer characters; false if p is neither. */
static bool put_property(struct nbi_str *out, const char *p, bool in_class,
                         const struct new_characters *newer)
{
    const struct nbi_str *more = strncmp(p, "p{L}", 4) == 0   ? &newer->letters
                                 : strncmp(p, "p{N}", 4) == 0 ? &newer->numbers
                                                              : NULL;
    if (!more)
        return false;
    nbi_str_printf(out, in_class ? "\\%.4s%s" : "[\\%.4s%s]", p, nbi_str_text(more));
    return true;
}

/* Length of the braces of \p{L} or \x{41} after the letter; they are no repeat count. */
static size_t braces_after(const char *letter)
{
    const char *end = strchr("pPx", *letter) && letter[1] == '{' ? strchr(letter, '}') : NULL;
    return end ? (size_t)(end - letter) : 0;
}

/* {3}? is lazy in PCRE2; in Oniguruma it means "three times or not at all". */
static bool is_optional_repeat(const char *p)
{
    size_t digits = *p == '{' ? strspn(p + 1, "0123456789") : 0;
    return digits > 0 && p[digits + 1] == '}' && p[digits + 2] == '?';
}

/* Inline options such as (?m...): only i means the same in both libraries. */
static bool has_other_option(const char *p)
{
    if (p[0] != '(' || p[1] != '?')
        return false;
    size_t letters = strspn(p + 2, "imsxnaduwyWDSPUJ-^"), plain = strspn(p + 2, "i-");
    return letters > plain && (p[2 + letters] == ':' || p[2 + letters] == ')');
}

/* Translates a pattern from Oniguruma's syntax to PCRE2's. Constructs that the two libraries
 * interpret differently are errors. */
static enum nb_status translate(const char *pattern, const struct new_characters *newer,
                                struct nbi_str *out)
{
    bool in_class = false;
    for (const char *p = pattern; *p; p++) {
        if (*p == '\\' && put_property(out, p + 1, in_class, newer)) {
            p += 4;
            continue;
        }
        if (*p == '\\') {
            NBI_TRY(put_escape(out, *++p, in_class));
            size_t more = braces_after(p);
            nbi_str_append(out, p + 1, more);
            p += more;
            continue;
        }
        if (in_class && (*p == '[' || (p[0] == '&' && p[1] == '&')))
            return nbi_fail(NB_EUNSUPPORTED, "a set inside a set in a split pattern");
        if (!in_class && ((p[0] == '}' && p[1] == '+') || (p[0] == '{' && p[1] == ',')))
            return nbi_fail(NB_EUNSUPPORTED, "'%c%c' in a split pattern", p[0], p[1]);
        if (!in_class && p[0] == '(' && p[1] == '*')
            return nbi_fail(NB_EUNSUPPORTED, "'(*' in a split pattern");
        if (!in_class && is_optional_repeat(p))
            return nbi_fail(NB_EUNSUPPORTED, "'{n}?' in a split pattern");
        if (!in_class && has_other_option(p))
            return nbi_fail(NB_EUNSUPPORTED, "an option other than i in a split pattern");
        if (*p == '[')
            in_class = true;
        else if (*p == ']')
            in_class = false;
        nbi_str_append(out, p, 1);
    }
    return nbi_str_status(out);
}

struct stage {
    pcre2_code *code; /* NULL: Qwen's pattern */
    enum nbi_split_keep keep;
};

struct nbi_splitter {
    const uint8_t *classes;
    int count;
    bool prefix_space;
    struct stage stage[NBI_SPLIT_STAGES];
};

static enum nb_status compile(struct stage *stage, const char *pattern)
{
    struct nbi_str text = {0};
    struct new_characters newer = {0};
    int error = 0;
    PCRE2_SIZE at = 0;
    enum nb_status rc = list_newer(&newer.letters, "\\p{L}", NBI_CHAR_LETTER);
    if (rc == NB_OK)
        rc = list_newer(&newer.numbers, "\\p{N}", NBI_CHAR_NUMBER);
    if (rc == NB_OK)
        rc = translate(pattern, &newer, &text);
    nbi_str_release(&newer.letters);
    nbi_str_release(&newer.numbers);
    if (rc == NB_OK) {
        pcre2_compile_context *context = pcre2_compile_context_create(NULL);
        if (context)
            pcre2_set_newline(context, PCRE2_NEWLINE_LF); /* the default is a build option */
        stage->code =
            pcre2_compile((PCRE2_SPTR)nbi_str_text(&text), text.len,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                          &at, context);
        pcre2_compile_context_free(context);
        if (!stage->code) {
            PCRE2_UCHAR why[128];
            pcre2_get_error_message(error, why, sizeof why);
            rc = nbi_fail(NB_EUNSUPPORTED, "the split pattern: %s", (const char *)why);
        } else {
            /* May fail where PCRE2 has no JIT; its interpreter then gives the same matches. */
            pcre2_jit_compile(stage->code, PCRE2_JIT_COMPLETE);
        }
    }
    nbi_str_release(&text);
    return rc;
}

enum nb_status nbi_splitter_new(struct nbi_splitter **out, const struct nbi_split_rules *rules,
                                const uint8_t *classes)
{
    struct nbi_splitter *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return nbi_fail_memory("splitter", sizeof *s);
    s->classes = classes;
    s->prefix_space = rules->prefix_space;
    enum nb_status rc = NB_OK;
    for (; s->count < rules->count && rc == NB_OK; s->count++) {
        const struct nbi_split_stage *r = &rules->stage[s->count];
        s->stage[s->count].keep = r->keep;
        if (r->keep != NBI_SPLIT_ALL || strcmp(r->pattern, nbi_qwen_pattern) != 0)
            rc = compile(&s->stage[s->count], r->pattern);
    }
    if (rc == NB_OK)
        *out = s;
    else
        nbi_splitter_free(s);
    return rc;
}

void nbi_splitter_free(struct nbi_splitter *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->count; i++)
        pcre2_code_free(s->stage[i].code);
    free(s);
}

void nbi_split_scratch_release(struct nbi_split_scratch *scratch)
{
    pcre2_match_data_free(scratch->match);
    pcre2_match_context_free(scratch->context);
    pcre2_jit_stack_free(scratch->stack);
    nbi_str_release(&scratch->text);
    *scratch = (struct nbi_split_scratch){0};
}

/* ---- the stages ---- */

struct job {
    const struct nbi_splitter *s;
    struct nbi_split_scratch *scratch;
    nbi_word_fn fn;
    void *ctx;
};

static enum nb_status run_stage(const struct job *job, int at, const char *text, size_t len);

static enum nb_status run_qwen(const struct job *job, int at, const char *text, size_t len)
{
    const struct text t = {job->s->classes, text + len};
    bool last = at + 1 == job->s->count;
    for (const char *p = text, *end; p < t.end; p = end) {
        end = qwen_word(&t, p);
        NBI_TRY(last ? job->fn(job->ctx, p, (size_t)(end - p))
                     : run_stage(job, at + 1, p, (size_t)(end - p)));
    }
    return NB_OK;
}

static enum nb_status prepare(struct nbi_split_scratch *scratch)
{
    if (scratch->match && scratch->context)
        return NB_OK;
    if (!scratch->match)
        scratch->match = pcre2_match_data_create(1, NULL);
    if (!scratch->context)
        scratch->context = pcre2_match_context_create(NULL);
    scratch->stack = pcre2_jit_stack_create((size_t)64 << 10, (size_t)8 << 20, NULL);
    if (!scratch->match || !scratch->context)
        return nbi_fail_memory("pattern matcher", 0);
    if (scratch->stack) /* NULL in a PCRE2 without JIT */
        pcre2_jit_stack_assign(scratch->context, NULL, scratch->stack);
    return NB_OK;
}

static enum nb_status run_regex(const struct job *job, int at, const char *text, size_t len)
{
    const struct stage *stage = &job->s->stage[at];
    size_t done = 0, from = 0;
    while (from <= len) {
        /* Later stages reuse the match data, so read the result before calling them. */
        int n = pcre2_match(stage->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK,
                            job->scratch->match, job->scratch->context);
        if (n == PCRE2_ERROR_NOMATCH)
            break;
        if (n < 0)
            return nbi_fail(NB_EUNSUPPORTED,
                            "the split pattern takes too long on this text (PCRE2 error %d)", n);
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(job->scratch->match);
        size_t start = range[0], end = range[1];
        if (end < start || start < done)
            return nbi_fail(NB_EUNSUPPORTED, "the split pattern matches backwards");
        if (start > done && stage->keep != NBI_SPLIT_MATCHES)
            NBI_TRY(run_stage(job, at + 1, text + done, start - done));
        if (end > start && stage->keep != NBI_SPLIT_REST)
            NBI_TRY(run_stage(job, at + 1, text + start, end - start));
        done = end;
        from = end;
        if (end == start) /* after an empty match, continue with the next character */
            from += end < len ? (size_t)nbi_char_length(text + end) : 1;
    }
    if (done < len && stage->keep != NBI_SPLIT_MATCHES)
        return run_stage(job, at + 1, text + done, len - done);
    return NB_OK;
}

static enum nb_status run_stage(const struct job *job, int at, const char *text, size_t len)
{
    if (at == job->s->count)
        return job->fn(job->ctx, text, len);
    if (!job->s->stage[at].code)
        return run_qwen(job, at, text, len);
    NBI_TRY(prepare(job->scratch));
    return run_regex(job, at, text, len);
}

enum nb_status nbi_split(const struct nbi_splitter *s, struct nbi_split_scratch *scratch,
                         const char *text, size_t len, nbi_word_fn fn, void *ctx)
{
    const struct job job = {s, scratch, fn, ctx};
    if (len == 0)
        return NB_OK;
    if (s->prefix_space && *text != ' ') {
        scratch->text.len = 0;
        nbi_str_append(&scratch->text, " ", 1);
        nbi_str_append(&scratch->text, text, len);
        NBI_TRY(nbi_str_status(&scratch->text));
        text = scratch->text.p;
        len = scratch->text.len;
    }
    return run_stage(&job, 0, text, len);
}
