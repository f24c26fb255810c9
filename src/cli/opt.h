/* opt.h - the command line as data.
 *
 * A command is a row with a table of options; parser, help and docs/cli all read that row, so that
 * they cannot disagree. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define CLI_MAX_POSITIONAL 2
#define CLI_MAX_LIST       64
#define CLI_MAX_OPTIONS    64 /* of a command, for which it is known whether they were given */

enum cli_kind {
    CLI_FLAG,   /* bool */
    CLI_STRING, /* const char * */
    CLI_INT,    /* int64_t, min to max */
    CLI_FLOAT,  /* double, min to max */
    CLI_CHOICE, /* int: index into "a|b|c" */
    CLI_LIST    /* struct cli_list: may be repeated */
};

/* The names of a list in a public header as choices, "a|b|c". */
#define CLI_CHOICES(LIST)         (&("" LIST(CLI_CHOICE_NAME))[1])
#define CLI_CHOICE_NAME(id, name) "|" name

struct cli_list {
    const char *items[CLI_MAX_LIST + 1]; /* NULL-terminated */
    int count;
};

struct cli_opt {
    const char *name;
    char letter; /* 0: none */
    enum cli_kind kind;
    size_t offset;   /* into the command's option struct */
    const char *arg; /* what the value is called in the help; the choices for CLI_CHOICE */
    const char
        *initial; /* the default as text; NULL: zero; "model's" or "auto": NaN or INT64_MIN */
    double min, max;
    const char *help;  /* "show: ..." or "decode, prefill: ...": only for those WHAT */
    const char *alias; /* another long name that works too, or NULL */
};

/* Options that every command has; the first member of every option struct. */
struct cli_common {
    const char *device;
    int64_t threads;
    bool json, quiet, verbose;
    const char *positional[CLI_MAX_POSITIONAL];
    char **rest;                 /* NULL-terminated: arguments from the one named "X..." on */
    bool given[CLI_MAX_OPTIONS]; /* options on the command line, by their place in the table */
};

struct cli_command {
    const char *name;
    const char *group;
    const char *positional; /* "SRC DST"; "[X]" is optional, "X..." is one or more */
    const char *what;       /* what the first of them can be, "a|b"; NULL: anything */
    const char *summary;    /* one line */
    const char *text;       /* paragraphs of the help */
    const char *examples;   /* lines; NULL: none */
    const struct cli_opt *options;
    size_t option_count;
    size_t opts_size;
    size_t model_at;        /* offset of an option that may stand for the first argument; 0: none */
    bool any_device;        /* runs on GPUs too; else --device cuda is refused */
    bool absent_device;     /* only plans for the device, which need not be there */
    int (*run)(void *opts); /* returns the exit code */
};

extern const struct cli_opt cli_common_options[];
extern const size_t cli_common_count;

/* Fills opts (zeroed, opts_size bytes) from argv; 0, or an exit code after printing why. */
int cli_parse(const struct cli_command *command, int argc, char **argv, void *opts);

/* Help for people, and the page of docs/cli. */
void cli_print_help(const struct cli_command *command, FILE *out);
void cli_print_markdown(const struct cli_command *command, FILE *out);

/* The candidate nearest to word; NULL: none is near. */
const char *cli_nearest(const char *word, const char *const *candidates, size_t count);

#define CLI_EXIT_FAILED      1
#define CLI_EXIT_USAGE       2
#define CLI_EXIT_INTERRUPTED 130
