/* keys.h - decodes the bytes of a terminal into keys: UTF-8, the sequences of xterm, rxvt and the
 * Linux console, and bracketed paste.
 *
 * in : bytes, one at a time, split in any way
 * out: a key for the last byte of each
 *
 * Malformed or unknown input gives CLI_KEY_NONE; no byte is ever an error. */
#pragma once

#include "base/str.h"

enum cli_key {
    CLI_KEY_NONE, /* more bytes are needed, or these mean nothing here */
    CLI_KEY_TEXT, /* a character, in `text` */
    CLI_KEY_PASTE,
    CLI_KEY_TOO_LONG, /* a paste longer than CLI_EDIT_MAX, which was dropped */
    CLI_KEY_ENTER,
    CLI_KEY_LEFT,
    CLI_KEY_RIGHT,
    CLI_KEY_UP,
    CLI_KEY_DOWN,
    CLI_KEY_HOME,
    CLI_KEY_END,
    CLI_KEY_WORD_LEFT,
    CLI_KEY_WORD_RIGHT,
    CLI_KEY_BACKSPACE,
    CLI_KEY_DELETE,
    CLI_KEY_DELETE_OR_LEAVE, /* Ctrl-D */
    CLI_KEY_CUT_WORD,
    CLI_KEY_CUT_WORD_BEFORE,
    CLI_KEY_CUT_BLANK_BEFORE, /* Ctrl-W */
    CLI_KEY_CUT_TO_START,
    CLI_KEY_CUT_TO_END,
    CLI_KEY_YANK,
    CLI_KEY_TRANSPOSE,
    CLI_KEY_SEARCH,
    CLI_KEY_CANCEL, /* Ctrl-G */
    CLI_KEY_ESCAPE, /* only from cli_keys_pause */
    CLI_KEY_REDRAW,
    CLI_KEY_SUSPEND,
    CLI_KEY_QUIT
};

enum cli_keys_state {
    CLI_KEYS_PLAIN,
    CLI_KEYS_CHAR,    /* inside of a character */
    CLI_KEYS_ESCAPE,  /* after Esc */
    CLI_KEYS_CSI,     /* after Esc [ */
    CLI_KEYS_SS3,     /* after Esc O */
    CLI_KEYS_CONSOLE, /* after Esc [ [ */
    CLI_KEYS_PASTE
};

struct cli_keys {
    enum cli_keys_state state;
    unsigned parameter[2], parameters; /* of a CSI sequence */
    bool other;                        /* the sequence has bytes of no known one */
    unsigned matched;                  /* bytes of the end mark of pasted text */
    bool too_long;
    struct nbi_str text; /* of CLI_KEY_TEXT and CLI_KEY_PASTE, until the next byte */
};

void cli_keys_release(struct cli_keys *k);

/* Forgets a key that has begun. */
void cli_keys_reset(struct cli_keys *k);

/* NB_ENOMEM: the pasted text is lost. */
enum nb_status cli_keys_feed(struct cli_keys *k, unsigned char byte, enum cli_key *key);

/* No byte came for a while: CLI_KEY_ESCAPE if Esc was the last one. */
enum cli_key cli_keys_pause(struct cli_keys *k);
