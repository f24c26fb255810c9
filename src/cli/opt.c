/* opt.c - parses options by table, and prints help from the same table. */
#include "cli/opt.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/predecessor.h"

const struct cli_opt cli_common_options[] = {
    {"device", 0, CLI_STRING, offsetof(struct cli_common, device), "DEVICE", "auto", 0, 0,
     "auto (a usable GPU if the command can run on one, else the CPU), cpu, cuda or cuda:N", NULL},
    {"threads", 0, CLI_INT, offsetof(struct cli_common, threads), "N", NULL, 1, 4096,
     "number of threads (default: the CPUs available to this process)", NULL},
    {"json", 0, CLI_FLAG, offsetof(struct cli_common, json), NULL, NULL, 0, 0,
     "print the result as JSON", NULL},
    {"quiet", 'q', CLI_FLAG, offsetof(struct cli_common, quiet), NULL, NULL, 0, 0,
     "print errors only, no progress and no notes", NULL},
    {"verbose", 'v', CLI_FLAG, offsetof(struct cli_common, verbose), NULL, NULL, 0, 0,
     "print more details", NULL},
};
const size_t cli_common_count = sizeof cli_common_options / sizeof *cli_common_options;

/* ---- finding options ---- */

static const struct cli_opt *option_at(const struct cli_command *c, size_t i)
{
    return i < c->option_count ? &c->options[i] : &cli_common_options[i - c->option_count];
}

static const struct cli_opt *find_long(const struct cli_command *c, const char *name, size_t len)
{
    for (size_t i = 0; i < c->option_count + cli_common_count; i++) {
        const struct cli_opt *o = option_at(c, i);
        if ((strlen(o->name) == len && memcmp(o->name, name, len) == 0) ||
            (o->alias && strlen(o->alias) == len && memcmp(o->alias, name, len) == 0))
            return o;
    }
    return NULL;
}

static const struct cli_opt *find_letter(const struct cli_command *c, char letter)
{
    for (size_t i = 0; i < c->option_count + cli_common_count; i++)
        if (option_at(c, i)->letter == letter)
            return option_at(c, i);
    return NULL;
}

/* Edit distance of two words of up to 63 characters; longer ones count as far apart. */
static size_t distance(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b), row[64];
    if (n > 63 || m > 63)
        return 64;
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t replace = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            size_t edit = 1 + (row[j] < row[j - 1] ? row[j] : row[j - 1]);
            row[j] = replace < edit ? replace : edit;
        }
    }
    return row[m];
}

const char *cli_nearest(const char *word, const char *const *candidates, size_t count)
{
    const char *best = NULL;
    size_t least = strlen(word) / 3 + 2;
    for (size_t i = 0; i < count; i++) {
        size_t d = distance(word, candidates[i]);
        if (d < least) {
            least = d;
            best = candidates[i];
        }
    }
    return best;
}

static int usage_error(const struct cli_command *c, const char *fmt, const char *what,
                       const char *more)
{
    fprintf(stderr, "nibble %s: ", c->name);
    fprintf(stderr, fmt, what, more);
    fprintf(stderr, "; see 'nibble help %s'\n", c->name);
    return CLI_EXIT_USAGE;
}

static int unknown_option(const struct cli_command *c, const char *arg)
{
    const char *names[128];
    char word[64];
    size_t n = 0;
    for (size_t i = 0; i < c->option_count + cli_common_count && n < 127; i++)
        names[n++] = option_at(c, i)->name;
    names[n++] = "help";
    if (arg[1] == '-')
        snprintf(word, sizeof word, "%.*s", (int)strcspn(arg + 2, "="), arg + 2);
    const char *near = arg[1] == '-' ? cli_nearest(word, names, n) : NULL;
    return near ? usage_error(c, "unknown option '%s' (did you mean '--%s'?)", arg, near)
                : usage_error(c, "unknown option '%s'%s", arg, "");
}

/* ---- values ---- */

static int set_choice(const struct cli_command *c, const struct cli_opt *o, const char *value,
                      int *out)
{
    int index = 0;
    for (const char *p = o->arg; *p; index++) {
        size_t n = strcspn(p, "|");
        if (strlen(value) == n && memcmp(p, value, n) == 0) {
            *out = index;
            return 0;
        }
        p += n + (p[n] == '|');
    }
    char text[256];
    snprintf(text, sizeof text, "--%s takes %s, not", o->name, o->arg);
    return usage_error(c, "%s '%s'", text, value);
}

static int set_number(const struct cli_command *c, const struct cli_opt *o, const char *value,
                      void *slot)
{
    char *end, text[160];
    errno = 0;
    double number;
    if (o->kind == CLI_INT) {
        long long n = strtoll(value, &end, 10);
        number = (double)n;
        *(int64_t *)slot = n;
    } else {
        number = strtod(value, &end);
        *(double *)slot = number;
    }
    bool bad = *value == 0 || *end != 0 || errno != 0 || isnan(number) || number < o->min ||
               number > o->max ||
               (*value != '-' && *value != '+' && *value != '.' && (*value < '0' || *value > '9'));
    if (!bad)
        return 0;
    snprintf(text, sizeof text, "--%s takes a %snumber from %.16g to %.16g, not", o->name,
             o->kind == CLI_INT ? "whole " : "", o->min, o->max);
    return usage_error(c, "%s '%s'", text, value);
}

/* The words that stand for no number: NaN or INT64_MIN. */
static bool leaves_open(const struct cli_opt *o, const char *value)
{
    bool word = strcmp(value, "model's") == 0 || strcmp(value, "auto") == 0;
    return word && o->initial && strcmp(value, o->initial) == 0;
}

static int leave_open(const struct cli_opt *o, void *slot)
{
    if (o->kind == CLI_FLOAT)
        *(double *)slot = NAN;
    else
        *(int64_t *)slot = INT64_MIN;
    return 0;
}

static int set_value(const struct cli_command *c, const struct cli_opt *o, const char *value,
                     void *opts)
{
    void *slot = (char *)opts + o->offset;
    switch (o->kind) {
    case CLI_FLAG:
        if (strcmp(value, "true") != 0 && strcmp(value, "false") != 0)
            return usage_error(c, "--%s takes true or false, not '%s'", o->name, value);
        *(bool *)slot = *value == 't';
        return 0;
    case CLI_STRING:
        *(const char **)slot = value;
        return 0;
    case CLI_INT:
    case CLI_FLOAT:
        return leaves_open(o, value) ? leave_open(o, slot) : set_number(c, o, value, slot);
    case CLI_CHOICE:
        return set_choice(c, o, value, slot);
    case CLI_LIST: {
        struct cli_list *list = slot;
        if (list->count == CLI_MAX_LIST)
            return usage_error(c, "--%s was given too often%s", o->name, "");
        list->items[list->count++] = value;
        return 0;
    }
    }
    return CLI_EXIT_USAGE;
}

static int set_initial(const struct cli_command *c, void *opts)
{
    for (size_t i = 0; i < c->option_count + cli_common_count; i++) {
        const struct cli_opt *o = option_at(c, i);
        int rc = o->initial ? set_value(c, o, o->initial, opts) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- parsing ---- */

#define NOTES_MAX 16

/* A note on an option of the predecessor, to be printed once --quiet is known. */
struct note {
    const char *option, *value, *text;
};

struct parse {
    const struct cli_command *command;
    char **argv;
    int argc, at;
    void *opts;
    int positional;
    int rest; /* arguments kept at the front of argv, where they have been read already */
    struct note notes[NOTES_MAX];
    int note_count;
};

static int count_words(const char *s)
{
    int n = 0;
    for (; *s; n++) {
        s += strcspn(s, " ");
        s += strspn(s, " ");
    }
    return n;
}

static bool takes_rest(const struct cli_command *c)
{
    size_t n = strlen(c->positional);
    return n > 3 && strcmp(c->positional + n - 3, "...") == 0;
}

static int parse_positional(struct parse *p, char *arg)
{
    struct cli_common *common = p->opts;
    int words = count_words(p->command->positional);
    if (takes_rest(p->command) && p->positional >= words - 1) {
        p->positional = words;
        p->argv[p->rest++] = arg;
        return 0;
    }
    if (p->positional == words)
        return usage_error(p->command, "unexpected argument '%s'%s", arg, "");
    common->positional[p->positional++] = arg;
    return 0;
}

static int set_option(struct parse *p, const struct cli_opt *o, const char *value)
{
    struct cli_common *common = p->opts;
    for (size_t i = 0; i < p->command->option_count && i < CLI_MAX_OPTIONS; i++)
        if (o == &p->command->options[i])
            common->given[i] = true;
    return set_value(p->command, o, value, p->opts);
}

/* A flag may be followed by true or false, unless what follows may be a command to run. */
static const char *value_of_flag(struct parse *p)
{
    const char *next = p->at < p->argc ? p->argv[p->at] : "";
    if ((strcmp(next, "true") != 0 && strcmp(next, "false") != 0) || takes_rest(p->command))
        return "true";
    p->at++;
    return next;
}

/* An option of the predecessor. value: what follows its equals sign, or NULL. */
static int parse_former(struct parse *p, char *arg, size_t len, char *value)
{
    const struct cli_command *c = p->command;
    const struct cli_opt *own = find_long(c, arg + 2, len);
    const char *mapped;
    char name[64], buffer[32];
    snprintf(name, sizeof name, "%.*s", (int)len, arg + 2);
    if (!value && p->at == p->argc)
        return usage_error(c, "--%s needs a value%s", name, "");
    if (!value)
        value = p->argv[p->at++];
    const struct cli_former *f = cli_former_find(c->name, name, len, value, &mapped, buffer);
    if (!f && own)
        return set_option(p, own, value);
    if (!f)
        return usage_error(c, "--%s does not take '%s'", name, value);
    if (f->use == CLI_FORMER_REFUSED)
        return usage_error(c, "--%s has no meaning here: %s", name, f->say);
    if (f->say && p->note_count < NOTES_MAX)
        p->notes[p->note_count++] = (struct note){arg + 2, value, f->say};
    if (f->use == CLI_FORMER_ARGUMENT)
        return parse_positional(p, value);
    return f->use == CLI_FORMER_OPTION
               ? set_option(p, find_long(c, f->ours, strlen(f->ours)), mapped)
               : 0;
}

static int parse_option(struct parse *p, char *arg)
{
    const struct cli_command *c = p->command;
    const struct cli_opt *o;
    char *value = NULL;
    if (arg[1] == '-') {
        size_t n = strcspn(arg + 2, "=");
        o = find_long(c, arg + 2, n);
        value = arg[2 + n] == '=' ? arg + 3 + n : NULL;
        if (cli_former_has(c->name, arg + 2, n))
            return parse_former(p, arg, n, value);
    } else {
        o = find_letter(c, arg[1]);
        value = arg[2] ? arg + 2 + (arg[2] == '=') : NULL;
    }
    if (!o || !o->name)
        return unknown_option(c, arg);
    if (value)
        return set_option(p, o, value);
    if (o->kind == CLI_FLAG)
        return set_option(p, o, arg[1] == '-' ? value_of_flag(p) : "true");
    if (p->at == p->argc)
        return usage_error(c, "--%s needs a value (%s)", o->name, o->arg);
    return set_option(p, o, p->argv[p->at++]);
}

static void print_notes(const struct parse *p)
{
    const struct cli_common *common = p->opts;
    for (int i = 0; i < p->note_count && !common->quiet; i++)
        fprintf(stderr, "nibble: --%.*s %s: %s\n", (int)strcspn(p->notes[i].option, "="),
                p->notes[i].option, p->notes[i].value, p->notes[i].text);
}

/* Whether an option's help begins with a list such as "decode, prefill: " that lacks `what`. */
static bool is_foreign(const struct cli_opt *o, const char *what)
{
    const char *p = o->help;
    for (;;) {
        size_t word = strspn(p, "abcdefghijklmnopqrstuvwxyz");
        if (!what || word == 0 || (strlen(what) == word && memcmp(p, what, word) == 0))
            return false;
        if (p[word] == ':')
            return true;
        if (p[word] != ',' || p[word + 1] != ' ')
            return false; /* no list, so it is for all */
        p += word + 2;
    }
}

/* Refuses options that have no meaning for the requested subcommand. */
static int check_foreign(const struct parse *p)
{
    const struct cli_common *common = p->opts;
    if (strncmp(p->command->positional, "WHAT", 4) != 0)
        return 0;
    for (size_t i = 0; i < p->command->option_count && i < CLI_MAX_OPTIONS; i++)
        if (common->given[i] && is_foreign(&p->command->options[i], common->positional[0]))
            return usage_error(p->command, "--%s is not for '%s'", p->command->options[i].name,
                               common->positional[0]);
    return 0;
}

/* --model may replace the first argument: it is then put before the others. */
static int take_model(struct parse *p)
{
    struct cli_common *common = p->opts;
    size_t at = p->command->model_at;
    const char *model = at ? *(const char **)((char *)p->opts + at) : NULL;
    if (!model)
        return 0;
    if (p->positional == count_words(p->command->positional))
        return usage_error(p->command, "--model '%s' and all of %s were given", model,
                           p->command->positional);
    for (int i = p->positional++; i > 0; i--)
        common->positional[i] = common->positional[i - 1];
    common->positional[0] = model;
    return 0;
}

static bool is_choice(const char *choices, const char *word)
{
    for (const char *p = choices; *p; p += *p == '|') {
        size_t n = strcspn(p, "|");
        if (strlen(word) == n && memcmp(p, word, n) == 0)
            return true;
        p += n;
    }
    return false;
}

/* 'a', 'b' and 'c'. */
static void enumerate(char *out, size_t size, const char *choices)
{
    size_t used = 0;
    for (const char *p = choices; *p && used < size; p += *p == '|') {
        size_t n = strcspn(p, "|");
        const char *join = p == choices ? "" : strchr(p, '|') ? ", " : " and ";
        used += (size_t)snprintf(out + used, size - used, "%s'%.*s'", join, (int)n, p);
        p += n;
    }
}

/* Refuses a WHAT that the command does not have. */
static int check_what(const struct parse *p)
{
    const struct cli_common *common = p->opts;
    const char *choices = p->command->what;
    char text[256], all[160] = "";
    if (!choices || p->positional == 0 || is_choice(choices, common->positional[0]))
        return 0;
    enumerate(all, sizeof all, choices);
    snprintf(text, sizeof text, "there is no '%%s'; there %s %s%%s",
             strchr(choices, '|') ? "are" : "is", all);
    return usage_error(p->command, text, common->positional[0], "");
}

static int check_missing(const struct parse *p)
{
    const char *s = p->command->positional;
    for (int i = 0; *s; i++) {
        int n = (int)strcspn(s, " ");
        char name[32];
        snprintf(name, sizeof name, "%.*s", n, s);
        if (i >= p->positional && name[0] != '[')
            return usage_error(p->command, "%s is missing%s", name, "");
        s += n;
        s += strspn(s, " ");
    }
    return 0;
}

int cli_parse(const struct cli_command *command, int argc, char **argv, void *opts)
{
    struct parse p = {.command = command, .argv = argv, .argc = argc, .opts = opts};
    bool only_positional = false;
    int rc = set_initial(command, opts);
    while (!rc && p.at < argc) {
        char *arg = argv[p.at++];
        if (!only_positional && (strcmp(arg, "--") == 0 ||
                                 (p.rest == 0 && cli_former_ends_options(command->name, arg))))
            only_positional = true;
        else if (!only_positional && arg[0] == '-' && arg[1])
            rc = parse_option(&p, arg);
        else
            rc = parse_positional(&p, arg);
    }
    if (p.rest < argc)
        argv[p.rest] = NULL; /* argv[argc] is NULL already */
    ((struct cli_common *)opts)->rest = argv;
    if (!rc)
        rc = take_model(&p);
    if (!rc)
        rc = check_what(&p);
    if (!rc)
        rc = check_foreign(&p);
    if (!rc)
        rc = check_missing(&p);
    if (!rc)
        print_notes(&p);
    return rc;
}

/* ---- help ---- */

static void option_left(const struct cli_opt *o, char *buf, size_t size)
{
    char letter[8] = "    ";
    if (o->letter)
        snprintf(letter, sizeof letter, "-%c, ", o->letter);
    snprintf(buf, size, "%s--%s%s%s", letter, o->name, o->arg ? " " : "", o->arg ? o->arg : "");
}

static void print_options(const struct cli_opt *options, size_t n, FILE *out)
{
    for (size_t i = 0; i < n; i++) {
        char left[96];
        option_left(&options[i], left, sizeof left);
        if (strlen(left) > 26)
            fprintf(out, "  %s\n  %-26s", left, "");
        else
            fprintf(out, "  %-26s", left);
        fprintf(out, "  %s", options[i].help);
        if (options[i].initial)
            fprintf(out, " (default: %s)", options[i].initial);
        fprintf(out, "\n");
    }
}

void cli_print_help(const struct cli_command *c, FILE *out)
{
    fprintf(out, "usage: nibble %s%s%s [options]\n\n%s\n", c->name, *c->positional ? " " : "",
            c->positional, c->text);
    if (c->option_count) {
        fprintf(out, "\noptions:\n");
        print_options(c->options, c->option_count, out);
    }
    fprintf(out, "\n"
                 "options common to all commands:\n");
    print_options(cli_common_options, cli_common_count, out);
    fprintf(out, "  %-26s  %s\n", "-h, --help", "print this text");
    if (c->examples)
        fprintf(out, "\nexamples:\n%s", c->examples);
}

static void markdown_options(const struct cli_opt *options, size_t n, FILE *out)
{
    for (size_t i = 0; i < n; i++) {
        const struct cli_opt *o = &options[i];
        fprintf(out, "| `--%s`", o->name);
        if (o->letter)
            fprintf(out, ", `-%c`", o->letter);
        if (o->alias)
            fprintf(out, ", `--%s`", o->alias);
        fprintf(out, " | ");
        for (const char *p = o->arg ? o->arg : ""; *p; p++)
            fprintf(out, *p == '|' ? "\\|" : "%c", *p);
        fprintf(out, " | %s | %s |\n", o->initial ? o->initial : "", o->help);
    }
}

void cli_print_markdown(const struct cli_command *c, FILE *out)
{
    fprintf(out,
            "<!-- Made by `make docs` from the option table of src/cli; do not edit. -->\n"
            "# nibble %s\n\n%c%s.\n\n    nibble %s%s%s [options]\n\n%s\n\n"
            "| option | value | default | meaning |\n|---|---|---|---|\n",
            c->name, toupper((unsigned char)c->summary[0]), c->summary + 1, c->name,
            *c->positional ? " " : "", c->positional, c->text);
    markdown_options(c->options, c->option_count, out);
    markdown_options(cli_common_options, cli_common_count, out);
    if (c->examples)
        fprintf(out, "\n## Examples\n\n```sh\n%s```\n", c->examples);
}
