/* records.h - a data file, record by record, from front to back.
 *
 * A record is a line of a TSV or JSONL file, or a piece of a text. Only one is in memory at a time;
 * its place in the file is enough to read it again. */
#pragma once

#include "base/file.h"

enum nbi_data_kind {
    NBI_DATA_TSV,   /* prompt <TAB> answer */
    NBI_DATA_TEXT,  /* documents with <|endoftext|> between them */
    NBI_DATA_JSONL, /* an object per line */
};

/* By the file's ending; an unknown one is an error that lists the known. */
enum nb_status nbi_data_kind_of(const char *path, enum nbi_data_kind *kind);

struct nbi_record {
    uint64_t offset;
    uint32_t len;
    bool ends;     /* text: a document ends here; lines always do */
    uint64_t line; /* where it starts, from 1 */
};

struct nbi_records {
    const struct nbi_source *src;
    enum nbi_data_kind kind;
    uint64_t offset, line; /* of what comes next */
    bool inside;           /* text: in the middle of a document */
    char *buffer;
    size_t capacity;
    uint64_t held_at; /* what the buffer holds */
    size_t held;
};

/* Longest line; a longer one is an error. */
#define NBI_RECORD_MAX ((size_t)64 << 20)

/* Longest piece of a text. A longer document is cut where no word goes on: after a line, else
 * before a space, else anywhere. */
#define NBI_PIECE_MAX ((size_t)64 << 10)

/* src must outlive r. */
void nbi_records_init(struct nbi_records *r, const struct nbi_source *src, enum nbi_data_kind kind);
void nbi_records_release(struct nbi_records *r);

/* The next record, and its text until the next call; *more false at the end. Blank lines, lines of
 * a TSV that start with '#', and the line ends around a document are passed over. A line that is
 * too long is NB_EFORMAT, and the call after it goes on behind it. */
enum nb_status nbi_records_next(struct nbi_records *r, struct nbi_record *record, const char **text,
                                bool *more);
