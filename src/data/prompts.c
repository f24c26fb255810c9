/* prompts.c - a list of prompts, from a file or from memory. */
#include "data/prompts.h"

#include <string.h>

#include "base/array.h"
#include "data/example.h"

struct item {
    struct nbi_prompt prompt;
    char *place; /* "FILE:LINE" */
};

struct nb_prompts {
    struct item *items;
    size_t count, capacity;
};

void nb_prompts_close(struct nb_prompts *p)
{
    if (!p)
        return;
    for (size_t i = 0; i < p->count; i++) {
        nbi_prompt_release(&p->items[i].prompt);
        free(p->items[i].place);
    }
    free(p->items);
    free(p);
}

int64_t nb_prompts_count(const struct nb_prompts *p)
{
    return (int64_t)p->count;
}

void nb_prompts_at(const struct nb_prompts *p, int64_t index, struct nb_prompt *out)
{
    const struct item *i = &p->items[index];
    const struct nbi_prompt *q = &i->prompt;
    *out = (struct nb_prompt){.text = q->text.p,
                              .messages = q->messages.p,
                              .tools = q->tools.len > 0 ? q->tools.p : NULL,
                              .expected = q->expected.len > 0 ? q->expected.p : NULL,
                              .place = i->place,
                              .count = q->count,
                              .system = q->system};
}

static enum nb_status add(struct nb_prompts *p, const char *path, enum nbi_data_kind kind,
                          const struct nbi_record *record, const char *text)
{
    if (kind == NBI_DATA_TSV && record->line == 1 && nbi_example_is_header(text, record->len))
        return NB_OK;
    NBI_TRY(NBI_ARRAY_RESERVE(p->items, p->capacity, p->count + 1, "prompts"));
    struct item *i = &p->items[p->count++];
    *i = (struct item){0};
    NBI_TRY(nbi_example_prompt(kind, text, record->len, &i->prompt));
    if (asprintf(&i->place, "%s:%llu", path, (unsigned long long)record->line) < 0) {
        i->place = NULL;
        return nbi_fail_memory("a prompt", strlen(path));
    }
    return NB_OK;
}

static enum nb_status read_all(struct nb_prompts *p, const struct nbi_source *src, const char *path,
                               enum nbi_data_kind kind)
{
    struct nbi_records records;
    struct nbi_record record = {0};
    const char *text;
    bool more = true;
    /* In a text each line is a prompt. Reading it as JSONL gives lines, and '#' starts no comment.
     */
    nbi_records_init(&records, src, kind == NBI_DATA_TEXT ? NBI_DATA_JSONL : kind);
    enum nb_status rc = NB_OK;
    while (rc == NB_OK && more) {
        rc = nbi_records_next(&records, &record, &text, &more);
        if (rc == NB_OK && more)
            rc = add(p, path, kind, &record, text);
        if (rc != NB_OK && rc != NB_EIO)
            nbi_context(rc, "%s:%llu", path, (unsigned long long)record.line);
    }
    nbi_records_release(&records);
    if (rc == NB_OK && p->count == 0)
        return nbi_fail(NB_EVALUE, "'%s' has no prompts", path);
    return rc;
}

enum nb_status nbi_prompts_make(struct nb_prompts **out, const struct nbi_prompt_pair *pairs,
                                size_t count, const char *place)
{
    struct nb_prompts *p = calloc(1, sizeof *p);
    struct nbi_str text = {0};
    enum nb_status rc = p ? NB_OK : nbi_fail_memory("prompts", sizeof *p);
    for (size_t i = 0; i < count && rc == NB_OK; i++) {
        text.len = 0;
        nbi_str_printf(&text, "%s\t%s", pairs[i].prompt, pairs[i].answer);
        const struct nbi_record record = {.line = i + 2, .len = (uint32_t)text.len};
        rc = nbi_str_status(&text);
        if (rc == NB_OK)
            rc = add(p, place, NBI_DATA_TSV, &record, nbi_str_text(&text));
    }
    nbi_str_release(&text);
    if (rc == NB_OK)
        *out = p;
    else
        nb_prompts_close(p);
    return rc;
}

enum nb_status nb_prompts_open(struct nb_prompts **out, const char *path)
{
    struct nbi_source *src = NULL;
    enum nbi_data_kind kind = NBI_DATA_TEXT;
    *out = NULL;
    if (nbi_has_extension(path, ".tsv"))
        kind = NBI_DATA_TSV;
    else if (nbi_has_extension(path, ".jsonl") || nbi_has_extension(path, ".ndjson"))
        kind = NBI_DATA_JSONL;
    NBI_TRY(nbi_source_open(&src, path));
    struct nb_prompts *p = calloc(1, sizeof *p);
    enum nb_status rc = p ? read_all(p, src, path, kind) : nbi_fail_memory("prompts", sizeof *p);
    nbi_source_close(src);
    if (rc == NB_OK)
        *out = p;
    else
        nb_prompts_close(p);
    return rc;
}
