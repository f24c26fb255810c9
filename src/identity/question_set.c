/* question_set.c - makes the identity set from the tables of text_*.c.
 *
 * in : core questions, openers and closers per language; a seed
 * out: unique training lines in a fixed mix, and held-out lines
 *
 * A core question, with or without an opener and a closer, is a variant. The variants of one kind
 * in one language form a group and are ordered; lines are drawn in that order until the group has
 * its share. All kinds use the same openers and closers, because otherwise the model would learn
 * that "quick question:" signals identity. Before a prompt becomes a line it is compared with all
 * held-out questions and all lines drawn so far. */
#include "identity/question_set.h"

#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/utf8.h"
#include "identity/text.h"

#define KINDS     NBI_QUESTION_KINDS
#define LANGUAGES NBI_IDENTITY_LANGUAGES

/* All letters of Chinese, Japanese and Korean names are at or above this code point. */
#define FIRST_CJK 0x2E80

#define COUNT_MIN 100
#define COUNT_MAX 1000000

/* The first rows of a table: they are always in the set bare, with and without their final mark. */
#define HEAD_ROWS 6

static const struct nbi_identity_text *const texts[LANGUAGES] = {
    &nbi_identity_en, &nbi_identity_zh_hans, &nbi_identity_zh_hant,
    &nbi_identity_ja, &nbi_identity_ko,
};

/* Percentage of all lines, by kind. */
static const int shares[KINDS] = {40, 25, 35};

/* One wording of a question. */
struct variant {
    uint64_t key; /* sort key */
    uint32_t id;  /* index in the group before sorting */
    uint32_t row;
    uint16_t opener, closer; /* 0: none; i: the one at i - 1 */
    bool marked;             /* keeps its final punctuation mark */
};

struct group {
    enum nbi_question_kind kind;
    enum nbi_identity_language language;
    const struct nbi_identity_qa *row;
    size_t rows;
    bool from_user; /* the user's replay pairs, used verbatim */
    struct variant *variant;
    size_t variants, next;
};

struct strings {
    const char **at;
    size_t count;
};

struct maker {
    struct nbi_identity_set *set;
    const struct nb_identity_set_opts *opts;
    bool selected[LANGUAGES];      /* languages of the set */
    int languages;                 /* number of them */
    const char *answer[LANGUAGES]; /* to identity questions */
    struct group group[KINDS][LANGUAGES];
    struct strings held_out; /* normal forms, all languages */
    struct strings opener[LANGUAGES], closer[LANGUAGES], identity[LANGUAGES]; /* normal forms */
    uint32_t *slot; /* hash table by prompt: line + 1 */
    size_t slots;   /* a power of two */
    size_t goal;    /* training lines to make: as requested, or all possible ones */
    struct nbi_str prompt, normal;
    struct nbi_arena scratch;
};

const char *nbi_identity_language_name(enum nbi_identity_language language)
{
    static const char *const names[LANGUAGES] = {"en", "zh-Hans", "zh-Hant", "ja", "ko"};
    return names[language];
}

const char *nbi_question_kind_name(enum nbi_question_kind kind)
{
    static const char *const names[KINDS] = {"identity", "contrast", "replay"};
    return names[kind];
}

/* ---- normal forms ---- */

static bool is_ignored(uint32_t c)
{
    if (c < 0x80)
        return !((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'));
    return (c >= 0x80 && c <= 0xBF) || (c >= 0x2000 && c <= 0x206F) ||     /* General Punctuation */
           (c >= 0x3000 && c <= 0x3003) || (c >= 0x3008 && c <= 0x301F) || /* CJK */
           (c >= 0xFF00 && c <= 0xFF0F) || (c >= 0xFF1A && c <= 0xFF20) || /* full width */
           (c >= 0xFF3B && c <= 0xFF40) || (c >= 0xFF5B && c <= 0xFF65) || c == 0x30FB ||
           c == 0xFEFF;
}

/* Sets *out to the normal form of text. Malformed bytes are dropped. */
static enum nb_status normalise(struct nbi_str *out, const char *text)
{
    const char *end = text + strlen(text);
    out->len = 0;
    nbi_str_puts(out, "");
    while (text < end) {
        int n = nbi_utf8_length(text, end);
        uint32_t c = n ? nbi_utf8_decode(text) : ' ';
        if (c >= 'A' && c <= 'Z')
            c += 'a' - 'A';
        if (!is_ignored(c))
            nbi_str_put_char(out, c);
        text += n ? n : 1;
    }
    return nbi_str_status(out);
}

char *nbi_identity_normal_form(const char *text)
{
    struct nbi_str s = {0};
    normalise(&s, text);
    return nbi_str_take(&s);
}

static enum nb_status add_normal_form(struct maker *m, struct strings *list, const char *text)
{
    char *copy;
    NBI_TRY(normalise(&m->normal, text));
    NBI_TRY(nbi_arena_string(&m->scratch, "normal forms", nbi_str_text(&m->normal), m->normal.len,
                             &copy));
    list->at[list->count++] = copy;
    return NB_OK;
}

static enum nb_status normal_phrases(struct maker *m, struct strings *list,
                                     const struct nbi_identity_phrases *from)
{
    NBI_TRY(nbi_arena_array(&m->scratch, "normal forms", from->count, sizeof *list->at,
                            (void **)&list->at));
    for (size_t i = 0; i < from->count; i++)
        NBI_TRY(add_normal_form(m, list, from->at[i].text));
    return NB_OK;
}

static enum nb_status make_normal_forms(struct maker *m)
{
    size_t count = 0;
    for (int l = 0; l < LANGUAGES; l++) {
        NBI_TRY(normal_phrases(m, &m->opener[l], &texts[l]->openers));
        NBI_TRY(normal_phrases(m, &m->closer[l], &texts[l]->closers));
        NBI_TRY(normal_phrases(m, &m->identity[l], &texts[l]->identity));
        count += texts[l]->identity_held_out.count + texts[l]->contrast_held_out.count;
    }
    NBI_TRY(nbi_arena_array(&m->scratch, "normal forms", count, sizeof *m->held_out.at,
                            (void **)&m->held_out.at));
    for (int l = 0; l < LANGUAGES; l++) {
        for (size_t i = 0; i < texts[l]->identity_held_out.count; i++)
            NBI_TRY(add_normal_form(m, &m->held_out, texts[l]->identity_held_out.at[i].text));
        for (size_t i = 0; i < texts[l]->contrast_held_out.count; i++)
            NBI_TRY(add_normal_form(m, &m->held_out, texts[l]->contrast_held_out.at[i].prompt));
    }
    return NB_OK;
}

/* ---- variants and their order ---- */

static bool fits(unsigned a, unsigned b)
{
    return (a & b & NBI_IDENTITY_FORMS) && (a & b & NBI_IDENTITY_REGISTERS);
}

/* Length of a sentence without its final punctuation mark. */
static size_t unmarked_length(const char *text)
{
    size_t len = strlen(text), last = len - 1;
    while (last > 0 && ((uint8_t)text[last] & 0xC0) == 0x80)
        last--;
    switch (nbi_utf8_decode(text + last)) {
    case '?':
    case '.':
    case '!':
    case 0xFF1F: /* full-width question mark */
    case 0xFF01: /* full-width exclamation mark */
    case 0x3002: /* ideographic full stop */
        return last;
    default:
        return len;
    }
}

/* What a variant adds to its question. 60 / weight is the percentage of a shape among the variants
 * that are drawn first. */
enum shape { BARE, BARE_UNMARKED, OPENED, OPENED_UNMARKED, CLOSED, OPENED_AND_CLOSED, SHAPES };
static const uint64_t shape_weight[SHAPES] = {2, 4, 3, 12, 4, 4};

static enum shape shape_of(const struct variant *v)
{
    if (v->closer)
        return v->opener ? OPENED_AND_CLOSED : CLOSED;
    if (v->opener)
        return v->marked ? OPENED : OPENED_UNMARKED;
    return v->marked ? BARE : BARE_UNMARKED;
}

static uint32_t random_of(const struct maker *m, const struct group *g, uint32_t id, int purpose)
{
    uint64_t stream = (uint64_t)(g->kind * LANGUAGES + g->language) << 8 | (uint64_t)purpose;
    return nbi_philox(m->opts->seed, id, stream).v[0];
}

static void add_variant(struct group *g, size_t row, size_t opener, size_t closer, bool marked)
{
    g->variant[g->variants] = (struct variant){.id = (uint32_t)g->variants,
                                               .row = (uint32_t)row,
                                               .opener = (uint16_t)opener,
                                               .closer = (uint16_t)closer,
                                               .marked = marked};
    g->variants++;
}

static void list_variants(struct group *g, size_t row)
{
    const struct nbi_identity_text *t = texts[g->language];
    if (g->from_user) {
        add_variant(g, row, 0, 0, true);
        return;
    }
    for (size_t o = 0; o <= t->openers.count; o++) {
        unsigned left = g->row[row].fits;
        if (o) {
            left &= t->openers.at[o - 1].fits;
            if (!fits(left, left))
                continue;
        }
        add_variant(g, row, o, 0, true);
        if (unmarked_length(g->row[row].prompt) < strlen(g->row[row].prompt))
            add_variant(g, row, o, 0, false);
        for (size_t c = 1; c <= t->closers.count; c++)
            if (fits(left, t->closers.at[c - 1].fits))
                add_variant(g, row, o, c, true);
    }
}

static bool is_mandatory(const struct group *g, const struct variant *v)
{
    bool head = v->row < HEAD_ROWS && g->kind != NBI_QUESTION_REPLAY;
    bool bare = !v->opener && !v->closer && !g->from_user;
    return bare && (head || (g->kind == NBI_QUESTION_IDENTITY && v->marked));
}

static int by_key(const void *pa, const void *pb)
{
    const struct variant *a = pa, *b = pb;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* Orders the variants of one row: the mandatory ones first, in table order; then one per round, in
 * a random order in which shapes appear by their weights. Sorting the group by key then interleaves
 * the rows, each round in random order. */
static void order_row(const struct maker *m, struct group *g, struct variant *v, size_t count)
{
    uint64_t of_shape[SHAPES] = {0};
    for (size_t i = 0; i < count; i++)
        of_shape[shape_of(&v[i])]++;
    for (size_t i = 0; i < count; i++) {
        enum shape shape = shape_of(&v[i]);
        v[i].key = is_mandatory(g, &v[i]) ? 0
                                          : (random_of(m, g, v[i].id, 0) + 1ull) * of_shape[shape] *
                                                shape_weight[shape];
    }
    qsort(v, count, sizeof *v, by_key);
    uint64_t round = 1;
    for (size_t i = 0; i < count; i++)
        v[i].key = v[i].key == 0 ? 2ull * v[i].row + !v[i].marked
                                 : round++ << 32 | random_of(m, g, v[i].id, 1);
}

static enum nb_status plan_group(struct maker *m, struct group *g)
{
    const struct nbi_identity_text *t = texts[g->language];
    size_t limit = g->from_user ? 1 : (t->openers.count + 1) * (t->closers.count + 2);
    NBI_TRY(nbi_arena_array(&m->scratch, "variants", g->rows * limit, sizeof *g->variant,
                            (void **)&g->variant));
    for (size_t row = 0; row < g->rows; row++) {
        size_t first = g->variants;
        list_variants(g, row);
        order_row(m, g, g->variant + first, g->variants - first);
    }
    if (g->variants)
        qsort(g->variant, g->variants, sizeof *g->variant, by_key);
    return NB_OK;
}

/* ---- groups ---- */

/* Han characters without kana count as simplified Chinese: in a short text they cannot be told from
 * traditional ones. */
static enum nbi_identity_language guess_language(const char *text)
{
    const char *end = text + strlen(text);
    enum nbi_identity_language found = NBI_IDENTITY_EN;
    for (int n; text < end; text += n ? n : 1) {
        n = nbi_utf8_length(text, end);
        uint32_t c = n ? nbi_utf8_decode(text) : 0;
        if ((c >= 0xAC00 && c <= 0xD7A3) || (c >= 0x1100 && c <= 0x11FF))
            return NBI_IDENTITY_KO;
        if (c >= 0x3041 && c <= 0x30FF)
            return NBI_IDENTITY_JA;
        if (c >= 0x4E00 && c <= 0x9FFF)
            found = NBI_IDENTITY_ZH_HANS;
    }
    return found;
}

static enum nb_status identity_rows(struct maker *m, struct group *g)
{
    const struct nbi_identity_phrases *from = &texts[g->language]->identity;
    struct nbi_identity_qa *row;
    NBI_TRY(nbi_arena_array(&m->scratch, "identity rows", from->count, sizeof *row, (void **)&row));
    for (size_t i = 0; i < from->count; i++)
        row[i] =
            (struct nbi_identity_qa){from->at[i].fits, from->at[i].text, m->answer[g->language]};
    g->row = row;
    g->rows = from->count;
    return NB_OK;
}

/* The language whose group takes a user's pair: its own, or the first one of the set. */
static enum nbi_identity_language language_of(const struct maker *m, const char *prompt)
{
    int l = (int)guess_language(prompt);
    for (int i = 0; !m->selected[l]; i++)
        l = i;
    return (enum nbi_identity_language)l;
}

static enum nb_status user_rows(struct maker *m, const struct nbi_prompt_pair *pair, size_t count)
{
    struct nbi_identity_qa *rows[LANGUAGES];
    size_t used[LANGUAGES] = {0};
    for (size_t i = 0; i < count; i++)
        used[language_of(m, pair[i].prompt)]++;
    for (int l = 0; l < LANGUAGES; l++) {
        struct group *g = &m->group[NBI_QUESTION_REPLAY][l];
        NBI_TRY(nbi_arena_array(&m->scratch, "replay rows", used[l], sizeof *rows[l],
                                (void **)&rows[l]));
        g->row = rows[l];
        g->from_user = true;
    }
    for (size_t i = 0; i < count; i++) {
        enum nbi_identity_language l = language_of(m, pair[i].prompt);
        rows[l][m->group[NBI_QUESTION_REPLAY][l].rows++] =
            (struct nbi_identity_qa){0, pair[i].prompt, pair[i].answer};
    }
    return NB_OK;
}

static enum nb_status make_groups(struct maker *m, const struct nbi_prompt_pair *replay,
                                  size_t replay_count)
{
    for (int k = 0; k < KINDS; k++)
        for (int l = 0; l < LANGUAGES; l++) {
            struct group *g = &m->group[k][l];
            const struct nbi_identity_qas *from =
                k == NBI_QUESTION_CONTRAST ? &texts[l]->contrast : &texts[l]->replay;
            *g = (struct group){.kind = (enum nbi_question_kind)k,
                                .language = (enum nbi_identity_language)l};
            if (!m->selected[l])
                continue;
            if (k == NBI_QUESTION_IDENTITY) {
                NBI_TRY(identity_rows(m, g));
            } else if (k == NBI_QUESTION_CONTRAST || !replay) {
                g->row = from->at;
                g->rows = from->count;
            }
        }
    if (replay)
        NBI_TRY(user_rows(m, replay, replay_count));
    for (int k = 0; k < KINDS; k++)
        for (int l = 0; l < LANGUAGES; l++)
            NBI_TRY(plan_group(m, &m->group[k][l]));
    return NB_OK;
}

/* ---- from a variant to a line ---- */

static bool starts_sentence(const struct nbi_str *s)
{
    size_t n = s->len;
    while (n && s->p[n - 1] == ' ')
        n--;
    return n == 0 || strchr(".!?:", s->p[n - 1]);
}

static enum nb_status compose_prompt(struct nbi_str *out, const struct group *g,
                                     const struct variant *v)
{
    const struct nbi_identity_text *t = texts[g->language];
    const char *core = g->row[v->row].prompt;
    size_t len = v->marked ? strlen(core) : unmarked_length(core);
    out->len = 0;
    nbi_str_puts(out, v->opener ? t->openers.at[v->opener - 1].text : "");
    size_t at = out->len;
    bool capital =
        v->marked && !g->from_user && g->language == NBI_IDENTITY_EN && starts_sentence(out);
    nbi_str_append(out, core, len);
    NBI_TRY(nbi_str_status(out));
    if (capital && core[0] >= 'a' && core[0] <= 'z')
        out->p[at] = (char)(core[0] - 'a' + 'A');
    if (v->closer)
        nbi_str_puts(out, t->closers.at[v->closer - 1].text);
    return nbi_str_status(out);
}

static bool one_of(const struct strings *list, const char *text, size_t len)
{
    for (size_t i = 0; i < list->count; i++)
        if (strlen(list->at[i]) == len && memcmp(list->at[i], text, len) == 0)
            return true;
    return len == 0;
}

/* Whether a normal form is a core identity question, with or without a known opener and closer. */
static bool asks_identity(const struct maker *m, const char *normal)
{
    for (int l = 0; l < LANGUAGES; l++)
        for (size_t i = 0; i < m->identity[l].count; i++) {
            const char *core = m->identity[l].at[i], *p = strstr(normal, core);
            if (p && one_of(&m->opener[l], normal, (size_t)(p - normal)) &&
                one_of(&m->closer[l], p + strlen(core), strlen(p) - strlen(core)))
                return true;
        }
    return false;
}

/* Whether a pair can be written as a TSV line: the first TAB ends the prompt, a leading '#' makes a
 * comment, and readers trim both fields. */
static bool fits_a_line(const char *prompt, const char *answer)
{
    size_t len = strlen(prompt);
    if (len == 0 || *prompt == '#' || *prompt == ' ' || prompt[len - 1] == ' ' || !*answer)
        return false;
    if (strchr(" \t", *answer) || strchr(" \t", answer[strlen(answer) - 1]))
        return false;
    if (!nbi_utf8_printable(prompt, len))
        return false;
    for (const char *tab; (tab = strchr(answer, '\t')); answer = tab + 1)
        if (!nbi_utf8_printable(answer, (size_t)(tab - answer)))
            return false;
    return nbi_utf8_printable(answer, strlen(answer));
}

static bool is_identity_answer(const struct maker *m, const char *answer)
{
    for (int l = 0; l < LANGUAGES; l++)
        if (strcmp(answer, m->answer[l]) == 0)
            return true;
    return false;
}

/* The hash slot of a prompt, or the free slot where it belongs. */
static uint32_t *find_slot(struct maker *m, const char *prompt)
{
    uint64_t hash = nbi_fnv1a(prompt, strlen(prompt));
    for (size_t i = (size_t)(hash ^ hash >> 32);; i++) {
        uint32_t *slot = &m->slot[i & (m->slots - 1)];
        if (*slot == 0 || strcmp(m->set->line[*slot - 1].prompt, prompt) == 0)
            return slot;
    }
}

/* Whether m->prompt with this answer may become a training line of the group. */
static enum nb_status is_usable(struct maker *m, const struct group *g, const char *answer,
                                bool *usable)
{
    const char *prompt = nbi_str_text(&m->prompt);
    *usable = false;
    if (g->kind != NBI_QUESTION_IDENTITY && is_identity_answer(m, answer))
        return NB_OK;
    if (m->opts->answer && strstr(prompt, m->opts->answer))
        return NB_OK;
    if (g->from_user && !fits_a_line(prompt, answer))
        return NB_OK;
    NBI_TRY(normalise(&m->normal, prompt));
    const char *normal = nbi_str_text(&m->normal);
    for (size_t i = 0; i < m->held_out.count; i++)
        if (strstr(normal, m->held_out.at[i]))
            return NB_OK;
    if (g->from_user && asks_identity(m, normal))
        return NB_OK;
    *usable = *find_slot(m, prompt) == 0;
    return NB_OK;
}

static enum nb_status add_line(struct maker *m, const struct group *g, const char *answer)
{
    struct nbi_identity_set *set = m->set;
    struct nbi_identity_line line = {.answer = answer, .kind = g->kind, .language = g->language};
    char *text;
    NBI_TRY(
        nbi_arena_string(&set->arena, "prompts", nbi_str_text(&m->prompt), m->prompt.len, &text));
    line.prompt = text;
    if (g->from_user) {
        NBI_TRY(nbi_arena_string(&set->arena, "answers", answer, strlen(answer), &text));
        line.answer = text;
    }
    *find_slot(m, line.prompt) = (uint32_t)set->count + 1;
    set->line[set->count++] = line;
    return NB_OK;
}

/* Draws up to `want` lines from a group, fewer if its variants run out. */
static enum nb_status draw(struct maker *m, struct group *g, size_t want)
{
    NBI_TRY(nbi_check_interrupt());
    while (want > 0 && g->next < g->variants) {
        const struct variant *v = &g->variant[g->next++];
        const char *answer = g->row[v->row].answer;
        bool usable;
        NBI_TRY(compose_prompt(&m->prompt, g, v));
        NBI_TRY(is_usable(m, g, answer, &usable));
        if (usable) {
            NBI_TRY(add_line(m, g, answer));
            want--;
        } else {
            m->set->left_out += g->from_user;
        }
    }
    return NB_OK;
}

/* ---- the mix ---- */

static enum nb_status draw_shares(struct maker *m)
{
    size_t count = (size_t)m->opts->count, given = 0;
    for (int k = 0; k < KINDS; k++) {
        size_t share = k == KINDS - 1 ? count - given : count * (size_t)shares[k] / 100;
        given += share;
        size_t of = (size_t)m->languages, i = 0;
        for (int l = 0; l < LANGUAGES; l++)
            if (m->selected[l]) {
                NBI_TRY(draw(m, &m->group[k][l], share / of + (i < share % of)));
                i++;
            }
    }
    return NB_OK;
}

/* Fills up with lines of other groups where one ran out: replay first, then contrast, never
 * identity, because a larger share of that makes the model answer everything with its name. */
static enum nb_status fill_up(struct maker *m)
{
    static const enum nbi_question_kind order[] = {NBI_QUESTION_REPLAY, NBI_QUESTION_CONTRAST};
    for (size_t k = 0; k < 2; k++) {
        size_t before;
        do {
            before = m->set->count;
            for (int l = 0; l < LANGUAGES && m->set->count < m->goal; l++)
                NBI_TRY(draw(m, &m->group[order[k]][l], 1));
        } while (m->set->count > before && m->set->count < m->goal);
    }
    return NB_OK;
}

static void shuffle(struct nbi_identity_line *line, size_t count, uint64_t seed)
{
    for (size_t i = count; i > 1; i--) {
        uint64_t r = nbi_philox(seed, i, UINT64_MAX).v[0];
        size_t j = (size_t)(r * i >> 32);
        struct nbi_identity_line t = line[i - 1];
        line[i - 1] = line[j];
        line[j] = t;
    }
}

static enum nb_status add_held_out(struct maker *m, enum nbi_question_kind kind,
                                   enum nbi_identity_language language,
                                   const struct nbi_identity_qa *row)
{
    struct group g = {.kind = kind, .language = language, .row = row, .rows = 1};
    const struct variant v = {.marked = true};
    char *text;
    if (kind != NBI_QUESTION_IDENTITY && is_identity_answer(m, row->answer))
        return NB_OK;
    NBI_TRY(compose_prompt(&m->prompt, &g, &v));
    NBI_TRY(nbi_arena_string(&m->set->arena, "prompts", nbi_str_text(&m->prompt), m->prompt.len,
                             &text));
    m->set->line[m->set->count++] =
        (struct nbi_identity_line){text, row->answer, kind, language, true};
    m->set->held_out++;
    return NB_OK;
}

static enum nb_status add_all_held_out(struct maker *m)
{
    for (int l = 0; l < LANGUAGES; l++)
        for (size_t i = 0; m->selected[l] && i < texts[l]->identity_held_out.count; i++) {
            struct nbi_identity_qa row = {0, texts[l]->identity_held_out.at[i].text, m->answer[l]};
            NBI_TRY(add_held_out(m, NBI_QUESTION_IDENTITY, (enum nbi_identity_language)l, &row));
        }
    for (int l = 0; l < LANGUAGES; l++)
        for (size_t i = 0; m->selected[l] && i < texts[l]->contrast_held_out.count; i++)
            NBI_TRY(add_held_out(m, NBI_QUESTION_CONTRAST, (enum nbi_identity_language)l,
                                 &texts[l]->contrast_held_out.at[i]));
    return NB_OK;
}

/* ---- the whole set ---- */

static enum nb_status check_text(const char *what, const char *text)
{
    size_t len = strlen(text);
    char shown[80];
    nbi_printable_copy(shown, sizeof shown, text, len);
    if (len == 0)
        return nbi_fail(NB_EINVAL, "the %s is empty", what);
    if (!nbi_utf8_valid(text, len))
        return nbi_fail(NB_EINVAL, "the %s '%s' is not UTF-8", what, shown);
    if (!nbi_utf8_printable(text, len))
        return nbi_fail(NB_EINVAL,
                        "the %s '%s' has a TAB, a line break or another control "
                        "character in it",
                        what, shown);
    if (text[0] == ' ' || text[len - 1] == ' ')
        return nbi_fail(NB_EINVAL, "the %s '%s' begins or ends with a space", what, shown);
    return NB_OK;
}

static enum nb_status check_opts(const struct nb_identity_set_opts *opts)
{
    if (opts->answer)
        NBI_TRY(check_text("target", opts->answer));
    if (opts->name)
        NBI_TRY(check_text("name", opts->name));
    if (opts->count < COUNT_MIN || opts->count > COUNT_MAX)
        return nbi_fail(NB_EINVAL, "count is %lld, want %d to %d", (long long)opts->count,
                        COUNT_MIN, COUNT_MAX);
    return NB_OK;
}

static bool take_language(struct maker *m, const char *name, size_t len)
{
    for (int l = 0; l < LANGUAGES; l++) {
        const char *known = nbi_identity_language_name((enum nbi_identity_language)l);
        if (strlen(known) != len || memcmp(known, name, len) != 0)
            continue;
        m->languages += !m->selected[l];
        m->selected[l] = true;
        return true;
    }
    return false;
}

static enum nb_status take_languages(struct maker *m)
{
    const char *p = m->opts->languages ? m->opts->languages : "en,zh-Hans,zh-Hant,ja,ko";
    for (size_t len; p; p = p[len] ? p + len + 1 : NULL) {
        len = strcspn(p, ",");
        if (!take_language(m, p, len))
            return nbi_fail(NB_EINVAL,
                            "there are no questions in '%.*s'; there are en, zh-Hans, zh-Hant, ja "
                            "and ko",
                            (int)(len < 40 ? len : 40), p);
    }
    return NB_OK;
}

static enum nb_status make_answers(struct maker *m)
{
    const char *name = m->opts->name ? m->opts->name : "nibble";
    for (int l = 0; l < LANGUAGES; l++) {
        const struct nbi_identity_text *t = texts[l];
        char *copy;
        m->prompt.len = 0;
        if (m->opts->answer) {
            nbi_str_puts(&m->prompt, m->opts->answer);
        } else {
            bool space = t->spaced && nbi_utf8_decode(name) < FIRST_CJK;
            nbi_str_puts(&m->prompt, t->before);
            nbi_str_puts(&m->prompt, space ? " " : "");
            nbi_str_puts(&m->prompt, name);
            nbi_str_puts(&m->prompt, t->after);
        }
        NBI_TRY(nbi_str_status(&m->prompt));
        NBI_TRY(nbi_arena_string(&m->set->arena, "answers", nbi_str_text(&m->prompt), m->prompt.len,
                                 &copy));
        m->answer[l] = copy;
    }
    return NB_OK;
}

/* Allocates training and held-out lines, and the hash table. */
static enum nb_status allocate_lines(struct maker *m)
{
    size_t all = 0;
    for (int k = 0; k < KINDS; k++)
        for (int l = 0; l < LANGUAGES; l++)
            all += m->group[k][l].variants;
    m->goal = all < (size_t)m->opts->count ? all : (size_t)m->opts->count;
    for (m->slots = 1; m->slots < 2 * m->goal; m->slots *= 2)
        ;
    NBI_TRY(
        nbi_arena_array(&m->scratch, "prompt table", m->slots, sizeof *m->slot, (void **)&m->slot));
    return nbi_arena_array(&m->set->arena, "lines", m->goal + m->held_out.count,
                           sizeof *m->set->line, (void **)&m->set->line);
}

static enum nb_status make(struct maker *m, const struct nbi_prompt_pair *replay,
                           size_t replay_count)
{
    NBI_TRY(take_languages(m));
    NBI_TRY(make_answers(m));
    NBI_TRY(make_normal_forms(m));
    NBI_TRY(make_groups(m, replay, replay_count));
    NBI_TRY(allocate_lines(m));
    NBI_TRY(draw_shares(m));
    NBI_TRY(fill_up(m));
    shuffle(m->set->line, m->set->count, m->opts->seed);
    return add_all_held_out(m);
}

enum nb_status nbi_identity_make(struct nbi_identity_set *set,
                                 const struct nb_identity_set_opts *opts,
                                 const struct nbi_prompt_pair *replay, size_t replay_count)
{
    struct maker m = {.set = set, .opts = opts};
    memset(set, 0, sizeof *set);
    NBI_TRY(check_opts(opts));
    enum nb_status rc = make(&m, replay, replay_count);
    nbi_str_release(&m.prompt);
    nbi_str_release(&m.normal);
    nbi_arena_release(&m.scratch);
    if (rc != NB_OK)
        nbi_identity_release(set);
    return rc;
}

void nbi_identity_release(struct nbi_identity_set *set)
{
    if (!set)
        return;
    nbi_arena_release(&set->arena);
    memset(set, 0, sizeof *set);
}
