/* fuzz_data.c - reads arbitrary bytes as a data file; the first byte selects the kind. Records are
 * compared with a second reader, and the micro-batches must add up to the same totals as the
 * examples. A text whose first byte has the high bit set is placed across the boundary of two
 * pieces. */
#include <fcntl.h>

#include "data/loader.h"
#include "fuzz/text_target.h"

/* Tokens per row of a micro-batch: few, but enough that no document takes too many rows. */
static size_t row;

/* Totals of one pass over the records. */
struct sums {
    int64_t examples, documents, tokens, trained, longest, bad;
    int64_t pairs, trained_pairs; /* tokens with a successor in the same row */
};

static void check_sample(const struct nb_tokenizer *t, const struct nbi_example *s)
{
    MUST(s->ids.count == 0 || s->trained);
    for (size_t i = 0; i < s->ids.count; i++)
        MUST(s->ids.p[i] >= 0 && s->ids.p[i] < nb_tokenizer_size(t) && s->trained[i] <= 1);
}

/* An example shortened to a row must be a contiguous part of it that contains the start of the last
 * answer. */
static void check_shortened(struct nbi_example *s)
{
    size_t n = s->ids.count, answer = n, start = 0;
    int32_t *before = malloc((n + 1) * sizeof *before);
    MUST(before);
    memcpy(before, s->ids.p, n * sizeof *before);
    while (answer > 0 && !s->trained[answer - 1])
        answer--;
    while (answer > 0 && s->trained[answer - 1])
        answer--;
    MUST(nbi_example_truncate(s, row + 1) == (n > row + 1));
    MUST(s->ids.count == (n > row + 1 ? row + 1 : n));
    while (start + s->ids.count < n && memcmp(before + start, s->ids.p, (row + 1) * 4) != 0)
        start++;
    MUST(memcmp(before + start, s->ids.p, s->ids.count * 4) == 0);
    MUST(n <= row + 1 || start <= answer);
    free(before);
}

static void add_sample(struct sums *sums, const struct nb_tokenizer *t, struct nbi_example *s)
{
    check_sample(t, s);
    int64_t n = (int64_t)s->ids.count;
    if (n < 2)
        return;
    sums->examples++;
    sums->documents += s->document;
    sums->tokens += n;
    sums->longest = n > sums->longest ? n : sums->longest;
    for (int64_t i = 0; i < n; i++)
        sums->trained += s->trained[i];
    if (!s->document)
        check_shortened(s);
    sums->pairs += (int64_t)s->ids.count - 1;
    for (size_t i = 1; i < s->ids.count; i++)
        sums->trained_pairs += s->trained[i];
}

static void check_record(const struct nbi_record *r, const char *text, const uint8_t *data,
                         size_t size)
{
    uint64_t line = 1;
    MUST(r->offset <= size && r->len <= size - r->offset);
    MUST(memcmp(text, data + r->offset, r->len) == 0);
    for (uint64_t i = 0; i < r->offset; i++)
        line += data[i] == '\n';
    MUST(r->line == line);
}

/* Between two records of a text there are only line breaks and document separators. */
static void check_gap(const uint8_t *p, size_t len, bool inside, bool start)
{
    static const char mark[] = "\xEF\xBB\xBF", separator[] = "<|endoftext|>";
    MUST(!inside || len == 0);
    for (size_t i = start && len >= 3 && memcmp(p, mark, 3) == 0 ? 3 : 0; i < len;) {
        size_t n = sizeof separator - 1;
        if (p[i] == '\n' || p[i] == '\r')
            n = 1;
        else
            MUST(len - i >= n && memcmp(p + i, separator, n) == 0);
        i += n;
    }
}

/* A record that is accepted as a prompt must give messages that can be parsed. */
static void check_prompt(enum nbi_data_kind kind, const char *text, size_t len)
{
    struct nbi_prompt p = {0};
    struct nbi_jspan messages;
    enum nb_status rc = nbi_example_prompt(kind, text, len, &p);
    MUST(rc == NB_OK || (rc == NB_EFORMAT && nb_last_error()[0]));
    if (rc == NB_OK) {
        MUST(p.text.len > 0 && strlen(p.text.p) == p.text.len);
        MUST(nbi_jscan(&messages, p.messages.p, p.messages.len) == NB_OK);
        MUST(p.count > 0 && nbi_jcount(messages) == (size_t)p.count);
    }
    nbi_prompt_release(&p);
}

/* sums NULL: check only the records. */
static void read_records(enum nbi_data_kind kind, const uint8_t *data, size_t size,
                         struct sums *sums)
{
    struct nbi_source *src;
    struct nbi_records r;
    struct nbi_example_encoder sampler = {.tokenizer = small_tokenizer(), .chat = NBI_CHAT_QWEN3};
    struct nbi_example sample = {0};
    uint64_t behind = 0;
    bool first = true, inside = false;
    MUST(nbi_source_memory(&src, data, size) == NB_OK);
    nbi_records_init(&r, src, kind);
    for (;;) {
        struct nbi_record record;
        const char *text;
        bool more;
        MUST(nbi_records_next(&r, &record, &text, &more) == NB_OK);
        if (!more)
            break;
        check_record(&record, text, data, size);
        MUST(record.offset >= behind && (kind == NBI_DATA_TEXT || record.ends));
        MUST(kind == NBI_DATA_TEXT ? record.len <= NBI_PIECE_MAX : !memchr(text, '\n', record.len));
        MUST(record.len > 0 || inside);
        if (kind == NBI_DATA_TEXT)
            check_gap(data + behind, record.offset - behind, inside, behind == 0);
        behind = record.offset + record.len;
        inside = !record.ends;
        if (first && kind == NBI_DATA_TSV && nbi_example_is_header(text, record.len)) {
            first = false;
            continue;
        }
        first = false;
        if (!sums)
            continue;
        if (kind != NBI_DATA_TEXT)
            check_prompt(kind, text, record.len);
        enum nb_status rc =
            nbi_example_make(&sampler, kind, text, record.len, record.ends, &sample);
        MUST(rc == NB_OK || (rc == NB_EFORMAT && nb_last_error()[0]));
        sums->bad += rc != NB_OK;
        if (rc == NB_OK)
            add_sample(sums, sampler.tokenizer, &sample);
    }
    if (kind == NBI_DATA_TEXT)
        check_gap(data + behind, size - behind, inside, behind == 0);
    MUST(!inside);
    nbi_records_release(&r);
    nbi_source_close(src);
    nbi_example_encoder_release(&sampler);
    nbi_example_release(&sample);
}

static void check_batch(const struct nbi_microbatch *batch)
{
    int64_t trained = 0;
    for (int64_t i = 0; i < batch->B * batch->T; i++) {
        int32_t target = batch->targets[i], position = batch->positions[i];
        trained += target != NBI_IGNORE;
        MUST(target == NBI_IGNORE || target >= 0);
        MUST(position == 0 || (i % batch->T > 0 && position == batch->positions[i - 1] + 1));
        if (i % batch->T > 0 && position > 0 && batch->targets[i - 1] != NBI_IGNORE)
            MUST(batch->targets[i - 1] == batch->ids[i]);
    }
    MUST(trained == batch->trained && batch->tokens <= batch->B * batch->T);
}

static void read_batches(struct nbi_dataset *d, const struct sums *sums, bool pack)
{
    struct nbi_loader b;
    struct nbi_microbatch batch;
    struct sums got = {0};
    bool more = true;
    const struct nbi_loader_opts opts = {
        .data = d, .seed = 1, .shuffle = true, .pack = pack, .epochs = 1, .padding = 3};
    MUST(nbi_loader_init(&b, &opts) == NB_OK &&
         nbi_microbatch_init(&batch, 3, (int64_t)row) == NB_OK);
    while (more) {
        MUST(nbi_loader_next(&b, &batch, &more) == NB_OK);
        check_batch(&batch);
        got.examples += batch.examples;
        got.pairs += batch.tokens;
        got.trained_pairs += batch.trained;
    }
    MUST(got.examples == sums->examples && got.pairs == sums->pairs);
    MUST(got.trained_pairs == sums->trained_pairs);
    nbi_microbatch_release(&batch);
    nbi_loader_release(&b);
}

static void read_dataset(const char *path, const struct sums *sums)
{
    const char *const paths[] = {path, NULL};
    struct nbi_dataset_opts opts = {
        .files = paths, .tokenizer = small_tokenizer(), .chat = NBI_CHAT_QWEN3};
    struct nbi_dataset *d;
    enum nb_status rc = nbi_dataset_open(&d, &opts);
    MUST((rc == NB_OK) == (sums->examples && sums->bad == 0));
    nbi_dataset_close(d);
    opts.skip_bad = true;
    rc = nbi_dataset_open(&d, &opts);
    unlink(path);
    MUST(rc == (sums->examples ? NB_OK : NB_EFORMAT));
    if (!d)
        return;
    const struct nbi_dataset_stats *s = nbi_dataset_stats(d);
    MUST(s->examples == sums->examples && s->documents == sums->documents);
    MUST(s->tokens == sums->tokens && s->trained == sums->trained);
    MUST(s->longest == sums->longest && s->bad == sums->bad);
    read_batches(d, sums, true);
    read_batches(d, sums, false);
    nbi_dataset_close(d);
}

static void check_file(enum nbi_data_kind kind, const uint8_t *data, size_t size)
{
    static const char *const endings[] = {
        [NBI_DATA_TSV] = ".tsv", [NBI_DATA_TEXT] = ".txt", [NBI_DATA_JSONL] = ".jsonl"};
    const char *path = scratch_path(endings[kind]);
    struct sums sums = {0};
    row = size < 2000 ? 24 : 8192;
    read_records(kind, data, size, &sums);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    MUST(fd >= 0 && write(fd, data, size) == (ssize_t)size && close(fd) == 0);
    read_dataset(path, &sums);
}

/* Places the input inside a long document, so that a piece (NBI_PIECE_MAX) ends in it. Checks only
 * records, because tokenizing the padding for each input would be too slow. */
static void check_long_text(const uint8_t *data, size_t size)
{
    size_t front = NBI_PIECE_MAX - (size < 64 ? size / 2 : 32), back = 40;
    uint8_t *text = malloc(front + size + back);
    MUST(text);
    memset(text, 'a', front + size + back);
    memcpy(text + front, data, size);
    read_records(NBI_DATA_TEXT, text, front + size + back, NULL);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    enum nbi_data_kind kind = (enum nbi_data_kind)(data[0] % 3);
    if (kind == NBI_DATA_TEXT && data[0] & 0x80)
        check_long_text(data + 1, size - 1);
    else
        check_file(kind, data + 1, size - 1);
    return 0;
}
