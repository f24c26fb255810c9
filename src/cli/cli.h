/* cli.h - what the commands share. Only main.c exits. */
#pragma once

#include "base/json.h"
#include "base/progress.h"
#include "cli/opt.h"
#include "nibble.h"

extern const struct cli_command cli_inspect, cli_convert, cli_quantize, cli_synth, cli_doctor,
    cli_bench;

/* The whole command table, NULL-terminated. */
extern const struct cli_command *const cli_commands[];

/* Prints the error of a failed library call and gives the exit code for it; 0 for NB_OK. */
int cli_status(enum nb_status status);

/* Prints value on stdout as JSON, frees it and gives the exit code. */
int cli_print_json(json_t *value);

/* Progress on stderr, or none with --quiet or --json. */
void cli_progress(struct nbi_progress *p, const struct cli_common *common, const char *label);
