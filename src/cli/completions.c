/* completions.c - completions for bash, zsh and fish from the table of commands.
 *
 * Each script completes commands, the WHAT of those that have several, options, and their values:
 * choices, devices, or files. */
#include <string.h>

#include "base/status.h"
#include "cli/cli.h"
#include "cli/page_file.h"
#include "cli/pages.h"

#define HEAD "made by 'nibble help --write-completions' from the table of commands"

/* ---- what options take ---- */

static const struct cli_opt *option_at(const struct cli_command *c, size_t i)
{
    return i < c->option_count ? &c->options[i] : &cli_common_options[i - c->option_count];
}

static size_t option_count(const struct cli_command *c)
{
    return c->option_count + cli_common_count;
}

/* The values an option can have, "a|b|c"; empty: a number or a text. */
static const char *values_of(const struct cli_opt *o)
{
    if (o->kind == CLI_CHOICE)
        return o->arg;
    return strcmp(o->name, "device") == 0 ? "auto|cpu|cuda" : "";
}

static bool takes_file(const struct cli_opt *o)
{
    return (o->kind == CLI_STRING || o->kind == CLI_LIST) && !*values_of(o);
}

/* Choices separated by spaces. */
static void print_choices(FILE *out, const char *choices)
{
    for (const char *p = choices; *p; p++)
        putc(*p == '|' ? ' ' : *p, out);
}

/* Text inside of single quotes of a shell; `special` gets a backslash. */
static void print_quoted(FILE *out, const char *text, const char *special)
{
    for (const char *p = text; *p; p++) {
        if (*p == '\'')
            fputs("'\\''", out);
        else if (strchr(special, *p))
            fprintf(out, "\\%c", *p);
        else
            putc(*p, out);
    }
}

/* ---- bash ---- */

static void bash_names(FILE *out, const struct cli_opt *o)
{
    fprintf(out, "--%s", o->name);
    if (o->letter)
        fprintf(out, "|-%c", o->letter);
    if (o->alias)
        fprintf(out, "|--%s", o->alias);
}

static void bash_command(FILE *out, const struct cli_command *c)
{
    fprintf(out, "    %s)\n        case $prev in\n", c->name);
    for (size_t i = 0; i < option_count(c); i++) {
        const struct cli_opt *o = option_at(c, i);
        if (o->kind == CLI_FLAG)
            continue;
        fputs("        ", out);
        bash_names(out, o);
        fputs(") values='", out);
        print_choices(out, values_of(o));
        fputs("' ;;\n", out);
    }
    fputs("        *)\n            options='--help", out);
    for (size_t i = 0; i < option_count(c); i++)
        fprintf(out, " --%s", option_at(c, i)->name);
    fputs("'\n            what='", out);
    print_choices(out, c->what ? c->what : "");
    fputs("' ;;\n        esac ;;\n", out);
}

static void bash(FILE *out, const void *ctx)
{
    (void)ctx;
    fputs("# bash completion for nibble; " HEAD "\n"
          "_nibble() {\n"
          "    local current=$2 prev=$3 values= options= what= words=\n"
          "    COMPREPLY=()\n"
          "    if [ \"$current\" = = ]; then\n"
          "        current=\n"
          "    elif [ \"$prev\" = = ]; then\n"
          "        prev=${COMP_WORDS[COMP_CWORD - 2]}\n"
          "    fi\n"
          "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
          "        COMPREPLY=($(compgen -W 'help --help --version",
          out);
    for (size_t i = 0; cli_commands[i]; i++)
        fprintf(out, " %s", cli_commands[i]->name);
    fputs("' -- \"$current\"))\n        return\n    fi\n    case ${COMP_WORDS[1]} in\n    help)\n"
          "        what='",
          out);
    for (size_t i = 0; cli_commands[i]; i++)
        fprintf(out, "%s%s", i ? " " : "", cli_commands[i]->name);
    fputs("' ;;\n", out);
    for (size_t i = 0; cli_commands[i]; i++)
        bash_command(out, cli_commands[i]);
    fputs("    esac\n"
          "    words=$values\n"
          "    [ \"$COMP_CWORD\" -ne 2 ] || words=\"$words $what\"\n"
          "    [[ $current != -* ]] || words=\"$words $options\"\n"
          "    COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
          "}\n"
          "complete -o bashdefault -o default -F _nibble nibble\n",
          out);
}

/* ---- zsh ---- */

static void zsh_option(FILE *out, const struct cli_opt *o)
{
    fputs("            ", out);
    if (o->letter)
        fprintf(out, "'(-%c --%s)'{-%c,--%s%s}'[", o->letter, o->name, o->letter, o->name,
                o->kind == CLI_FLAG ? "" : "=");
    else
        fprintf(out, "'%s--%s%s[", o->kind == CLI_LIST ? "*" : "", o->name,
                o->kind == CLI_FLAG ? "" : "=");
    print_quoted(out, o->help, "[]:\\");
    putc(']', out);
    if (o->kind != CLI_FLAG) {
        putc(':', out);
        print_quoted(out, *values_of(o) ? o->name : o->arg, "[]:\\");
        putc(':', out);
    }
    if (*values_of(o)) {
        putc('(', out);
        print_choices(out, values_of(o));
        putc(')', out);
    } else if (takes_file(o)) {
        fputs("_files", out);
    }
    fputs("' \\\n", out);
}

static void zsh_command(FILE *out, const struct cli_command *c)
{
    fprintf(out, "        %s)\n            _arguments \\\n", c->name);
    for (size_t i = 0; i < option_count(c); i++)
        zsh_option(out, option_at(c, i));
    if (c->what) {
        fputs("            '1:what:(", out);
        print_choices(out, c->what);
        fputs(")' \\\n", out);
    }
    fputs("            '*:file:_files' ;;\n", out);
}

static void zsh(FILE *out, const void *ctx)
{
    (void)ctx;
    fputs("#compdef nibble\n# zsh completion for nibble; " HEAD "\n"
          "_nibble() {\n"
          "    local curcontext=$curcontext state\n"
          "    local -a commands=(\n"
          "        'help:list the commands, or describe one'\n",
          out);
    for (size_t i = 0; cli_commands[i]; i++) {
        fprintf(out, "        '%s:", cli_commands[i]->name);
        print_quoted(out, cli_commands[i]->summary, ":\\");
        fputs("'\n", out);
    }
    fputs("    )\n"
          "    _arguments -C '1: :->command' '*:: :->arguments'\n"
          "    case $state in\n"
          "    command) _describe command commands ;;\n"
          "    arguments)\n"
          "        case $words[1] in\n"
          "        help) _describe command commands ;;\n",
          out);
    for (size_t i = 0; cli_commands[i]; i++)
        zsh_command(out, cli_commands[i]);
    fputs("        esac ;;\n    esac\n}\n"
          "if [ \"$funcstack[1]\" = _nibble ]; then\n    _nibble\nelse\n"
          "    compdef _nibble nibble\nfi\n",
          out);
}

/* ---- fish ---- */

/* Text inside of single quotes. */
static void fish_text(FILE *out, const char *text)
{
    for (const char *p = text; *p; p++)
        fprintf(out, *p == '\'' || *p == '\\' ? "\\%c" : "%c", *p);
}

static void fish_option(FILE *out, const struct cli_command *c, const struct cli_opt *o)
{
    fprintf(out, "complete -c nibble -n '__fish_seen_subcommand_from %s' -l %s", c->name, o->name);
    if (o->letter)
        fprintf(out, " -s %c", o->letter);
    if (o->kind != CLI_FLAG)
        fputs(takes_file(o) ? " -r -F" : " -x", out);
    if (*values_of(o)) {
        fputs(" -a '", out);
        print_choices(out, values_of(o));
        putc('\'', out);
    }
    fputs(" -d '", out);
    fish_text(out, o->help);
    fputs("'\n", out);
}

static void fish_command(FILE *out, const struct cli_command *c)
{
    fprintf(out, "complete -c nibble -n __fish_use_subcommand -a %s -d '", c->name);
    fish_text(out, c->summary);
    fprintf(out, "'\ncomplete -c nibble -n '__fish_seen_subcommand_from %s' %s", c->name,
            c->what ? "-a '" : "-F\n");
    if (c->what) {
        print_choices(out, c->what);
        fputs("' -F\n", out);
    }
    for (size_t i = 0; i < option_count(c); i++)
        fish_option(out, c, option_at(c, i));
}

static void fish(FILE *out, const void *ctx)
{
    (void)ctx;
    fputs("# fish completion for nibble; " HEAD "\n"
          "complete -c nibble -f\n"
          "complete -c nibble -n __fish_use_subcommand -a help -d 'list the commands, or describe "
          "one'\n"
          "complete -c nibble -n '__fish_seen_subcommand_from help' -a '",
          out);
    for (size_t i = 0; cli_commands[i]; i++)
        fprintf(out, "%s%s", i ? " " : "", cli_commands[i]->name);
    fputs("'\n", out);
    for (size_t i = 0; cli_commands[i]; i++)
        fish_command(out, cli_commands[i]);
}

enum nb_status cli_write_completions(const char *dir)
{
    NBI_TRY(cli_write_page(dir, "nibble.bash", bash, NULL));
    NBI_TRY(cli_write_page(dir, "_nibble", zsh, NULL));
    return cli_write_page(dir, "nibble.fish", fish, NULL);
}
