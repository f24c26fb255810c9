/* cli.h - what the commands share. Only main.c exits. */
#pragma once

#include "base/json.h"
#include "cli/opt.h"
#include "cli/progress.h"
#include "nibble.h"

extern const struct cli_command cli_inspect, cli_convert, cli_quantize, cli_synth, cli_tokenize,
    cli_detokenize, cli_render, cli_tokenizer, cli_data, cli_generate, cli_chat, cli_debug,
    cli_parity, cli_doctor, cli_bench, cli_eval, cli_stress, cli_guard, cli_train, cli_whoami,
    cli_plan;

/* The whole command table, NULL-terminated. */
extern const struct cli_command *const cli_commands[];

/* Prints the error of a failed library call and gives the exit code for it; 0 for NB_OK. */
int cli_status(enum nb_status status);

/* NB_EIO once a write to standard output has failed. main() checks it at the end, so only a command
 * that would run on for long without its output checks it earlier. */
enum nb_status cli_check_stdout(void);

/* The exit code after a signal. */
int cli_interrupted(void);

/* The first signal prints this on stderr; a second one ends the process. */
void cli_say_when_interrupted(const char *text);

/* From now on Ctrl-C only interrupts the running operation, however often it comes. */
void cli_survive_interrupts(void);

/* After an interruption: true if it was Ctrl-C and work may continue; false if we must exit. */
bool cli_resume(void);

json_t *cli_json_number(double v); /* null if it is not finite */

/* Refuses a GPU that --device names, since `what` runs on the CPU; 0, or the exit code. */
int cli_cpu_only(const struct cli_common *common, const char *what);

/* Prints value on stdout as JSON, frees it and returns the exit code. ok false, or value NULL: part
 * of it could not be allocated. */
int cli_print_json(json_t *value, bool ok);

/* From now on a failure to print also says that target, which the command has written, is in place.
 * Keeps the pointer; NULL: nothing was written. */
void cli_in_place(const char *target);

/* A path as a JSON string: malformed UTF-8 becomes '?'. */
json_t *cli_json_path(const char *path);

/* Progress on stderr; none with --quiet. */
void cli_progress_start(struct cli_progress *p, const struct cli_common *common, const char *label);
