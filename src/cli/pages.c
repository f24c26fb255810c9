/* pages.c - writes the pages of docs/cli and the man pages from the table of commands. */
#include "cli/pages.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/status.h"
#include "cli/cli.h"
#include "cli/page_file.h"

/* ---- docs/cli ---- */

static void markdown(FILE *out, const void *command)
{
    cli_print_markdown(command, out);
}

enum nb_status cli_write_docs(const char *dir)
{
    for (size_t i = 0; cli_commands[i]; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.md", cli_commands[i]->name);
        NBI_TRY(cli_write_page(dir, name, markdown, cli_commands[i]));
    }
    return NB_OK;
}

/* ---- man pages ---- */

/* Text in which no character has a meaning for roff. */
static void roff(FILE *out, const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        bool first = i == 0 || text[i - 1] == '\n';
        if (first && (text[i] == '.' || text[i] == '\''))
            fputs("\\&", out);
        if (text[i] == '-')
            fputs("\\-", out);
        else if (text[i] == '\\')
            fputs("\\e", out);
        else
            putc(text[i], out);
    }
}

static void roff_line(FILE *out, const char *text)
{
    roff(out, text, strlen(text));
    putc('\n', out);
}

/* Paragraphs; one that begins with a space keeps its lines. */
static void roff_text(FILE *out, const char *text)
{
    for (const char *p = text; *p;) {
        const char *end = strstr(p, "\n\n");
        size_t len = end ? (size_t)(end - p) : strlen(p);
        bool kept = *p == ' ';
        fputs(kept ? ".PP\n.nf\n" : ".PP\n", out);
        roff(out, p, len);
        fputs(kept ? "\n.fi\n" : "\n", out);
        p += len + strspn(p + len, "\n");
    }
}

static void roff_options(FILE *out, const struct cli_opt *options, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct cli_opt *o = &options[i];
        fputs(".TP\n", out);
        if (o->letter)
            fprintf(out, "\\fB\\-%c\\fR, ", o->letter);
        fputs("\\fB\\-\\-", out);
        roff(out, o->name, strlen(o->name));
        fputs("\\fR", out);
        if (o->alias) {
            fputs(", \\fB\\-\\-", out);
            roff(out, o->alias, strlen(o->alias));
            fputs("\\fR", out);
        }
        if (o->arg) {
            fputs(" \\fI", out);
            roff(out, o->arg, strlen(o->arg));
            fputs("\\fR", out);
        }
        putc('\n', out);
        roff(out, o->help, strlen(o->help));
        if (o->initial) {
            fputs(" (default: ", out);
            roff(out, o->initial, strlen(o->initial));
            putc(')', out);
        }
        putc('\n', out);
    }
}

/* The version without the commit, so that pages do not change from build to build. */
static void roff_head(FILE *out, const char *title)
{
    const char *version = nb_version();
    fprintf(out, ".TH %s 1 \"\" \"nibble %.*s\" \"nibble\"\n.SH NAME\n", title,
            (int)strcspn(version, " ("), version);
}

static void command_page(FILE *out, const void *ctx)
{
    const struct cli_command *c = ctx;
    char title[64];
    snprintf(title, sizeof title, "NIBBLE-%s", c->name);
    for (char *p = title; *p; p++)
        *p = (char)(*p >= 'a' && *p <= 'z' ? *p - 'a' + 'A' : *p);
    roff_head(out, title);
    fprintf(out, "nibble\\-%s \\- ", c->name);
    roff_line(out, c->summary);
    fprintf(out, ".SH SYNOPSIS\n\\fBnibble %s\\fR ", c->name);
    roff(out, c->positional, strlen(c->positional));
    fputs(" [\\fIoptions\\fR]\n.SH DESCRIPTION\n", out);
    roff_text(out, c->text);
    if (c->option_count > 0)
        fputs(".SH OPTIONS\n", out);
    roff_options(out, c->options, c->option_count);
    fputs(".SH OPTIONS OF EVERY COMMAND\n", out);
    roff_options(out, cli_common_options, cli_common_count);
    if (c->examples) {
        fputs(".SH EXAMPLES\n.nf\n", out);
        roff(out, c->examples, strlen(c->examples));
        fputs(".fi\n", out);
    }
    fputs(".SH SEE ALSO\n.BR nibble (1)\n", out);
}

static void overview_page(FILE *out, const void *ctx)
{
    const char *group = "";
    (void)ctx;
    roff_head(out, "NIBBLE");
    fputs("nibble \\- Qwen3 language models in four bits, trained and run\n"
          ".SH SYNOPSIS\n\\fBnibble\\fR \\fICOMMAND\\fR [\\fIoptions\\fR]\n.SH COMMANDS\n",
          out);
    for (size_t i = 0; cli_commands[i]; i++) {
        const struct cli_command *c = cli_commands[i];
        if (strcmp(group, c->group) != 0)
            fprintf(out, ".SS %s\n", c->group);
        group = c->group;
        fprintf(out, ".TP\n\\fBnibble\\-%s\\fR(1)\n", c->name);
        roff_line(out, c->summary);
    }
    fputs(".SH OPTIONS OF EVERY COMMAND\n", out);
    roff_options(out, cli_common_options, cli_common_count);
    fputs(".SH EXIT STATUS\n"
          "0 done, 1 failed, 2 a mistake in the command line, 124 stopped by \\fBguard\\fR, 130\n"
          "interrupted. An error is one line on standard error.\n",
          out);
}

enum nb_status cli_write_man(const char *dir)
{
    NBI_TRY(cli_write_page(dir, "nibble.1", overview_page, NULL));
    for (size_t i = 0; cli_commands[i]; i++) {
        char name[64];
        snprintf(name, sizeof name, "nibble-%s.1", cli_commands[i]->name);
        NBI_TRY(cli_write_page(dir, name, command_page, cli_commands[i]));
    }
    return NB_OK;
}
