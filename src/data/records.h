/* records.h - reads a data file record by record.
 *
 * A record is a line of a TSV or JSONL file, or a piece of a text. One record is in memory at a
 * time; offset and length are enough to read it again. */
#pragma once

#include "base/file.h"

enum nbi_data_kind {
    NBI_DATA_TSV,   /* prompt <TAB> answer */
    NBI_DATA_TEXT,  /* documents with <|endoftext|> between them */
    NBI_DATA_JSONL, /* a JSON object per line */
};

/* The kind of a file by its extension. NB_EUNSUPPORTED lists the known extensions. */
enum nb_status nbi_data_kind_of(const char *path, enum nbi_data_kind *kind);

struct nbi_record {
    uint64_t offset;
    uint32_t len;
    bool ends;     /* the document ends with this record; always true of a line */
    uint64_t line; /* its first line, from 1 */
};

struct nbi_records {
    const struct nbi_source *src;
    enum nbi_data_kind kind;
    uint64_t offset, line; /* of the next record */
    bool in_document;      /* the next record continues a document */
    char *buffer;
    size_t capacity;
    uint64_t buffered_at; /* the buffer holds file bytes [buffered_at, buffered_at + buffered) */
    size_t buffered;
};

/* Longest line; a longer one is an error. */
#define NBI_RECORD_MAX ((size_t)64 << 20)

/* Longest piece of a text. A longer document is cut after a line, else before a space, else
 * anywhere: so that tokens do not differ at the cut, if possible. */
#define NBI_PIECE_MAX ((size_t)64 << 10)

/* src is borrowed. */
void nbi_records_init(struct nbi_records *r, const struct nbi_source *src, enum nbi_data_kind kind);
void nbi_records_release(struct nbi_records *r);

/* Reads the next record; its text is valid until the next call. *more false: the file has ended.
 * Skips blank lines, TSV lines that start with '#', and line ends around a document. A line that is
 * too long is NB_EFORMAT, and the next call continues after it. */
enum nb_status nbi_records_next(struct nbi_records *r, struct nbi_record *record, const char **text,
                                bool *more);
