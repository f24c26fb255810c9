/* keys.c - decodes the bytes of a terminal into keys. */
#include "cli/keys.h"

#include <string.h>

#include "base/utf8.h"
#include "cli/edit_buffer.h"

#define ESC           0x1B
#define PARAMETER_MAX 10000 /* larger ones mean nothing, and must not overflow */

void cli_keys_release(struct cli_keys *k)
{
    nbi_str_release(&k->text);
    *k = (struct cli_keys){0};
}

void cli_keys_reset(struct cli_keys *k)
{
    k->state = CLI_KEYS_PLAIN;
    k->text.len = 0;
}

static enum cli_key control_key(unsigned char byte)
{
    static const enum cli_key keys[0x20] = {
        ['A' - '@'] = CLI_KEY_HOME,
        ['B' - '@'] = CLI_KEY_LEFT,
        ['D' - '@'] = CLI_KEY_DELETE_OR_LEAVE,
        ['E' - '@'] = CLI_KEY_END,
        ['F' - '@'] = CLI_KEY_RIGHT,
        ['G' - '@'] = CLI_KEY_CANCEL,
        ['H' - '@'] = CLI_KEY_BACKSPACE,
        ['J' - '@'] = CLI_KEY_ENTER,
        ['K' - '@'] = CLI_KEY_CUT_TO_END,
        ['L' - '@'] = CLI_KEY_REDRAW,
        ['M' - '@'] = CLI_KEY_ENTER,
        ['N' - '@'] = CLI_KEY_DOWN,
        ['P' - '@'] = CLI_KEY_UP,
        ['R' - '@'] = CLI_KEY_SEARCH,
        ['T' - '@'] = CLI_KEY_TRANSPOSE,
        ['U' - '@'] = CLI_KEY_CUT_TO_START,
        ['W' - '@'] = CLI_KEY_CUT_BLANK_BEFORE,
        ['Y' - '@'] = CLI_KEY_YANK,
        ['Z' - '@'] = CLI_KEY_SUSPEND,
        ['\\' - '@'] = CLI_KEY_QUIT,
    };
    return byte == 0x7F ? CLI_KEY_BACKSPACE : keys[byte];
}

/* Appends a byte to the character; its key when it is complete. */
static enum cli_key take_char(struct cli_keys *k, unsigned char byte)
{
    bool cut = false;
    nbi_str_append(&k->text, &byte, 1);
    if (k->text.failed)
        return CLI_KEY_NONE;
    const char *end = k->text.p + k->text.len;
    bool whole = (size_t)nbi_utf8_length(k->text.p, end) == k->text.len;
    size_t bad = whole ? 0 : (size_t)nbi_utf8_bad_length(k->text.p, end, &cut);
    bool begun = !whole && cut && bad == k->text.len;
    k->state = begun ? CLI_KEYS_CHAR : CLI_KEYS_PLAIN;
    return whole ? CLI_KEY_TEXT : CLI_KEY_NONE;
}

static enum cli_key take_plain(struct cli_keys *k, unsigned char byte)
{
    k->text.len = 0;
    k->state = byte == ESC ? CLI_KEYS_ESCAPE : CLI_KEYS_PLAIN;
    if (byte == '\t')
        return take_char(k, byte);
    if (byte < 0x20 || byte == 0x7F)
        return control_key(byte);
    return take_char(k, byte);
}

/* After Esc: Alt and a key, or a sequence. */
static enum cli_key take_escape(struct cli_keys *k, unsigned char byte)
{
    k->state = CLI_KEYS_PLAIN;
    switch (byte) {
    case ESC:
        k->state = CLI_KEYS_ESCAPE;
        return CLI_KEY_NONE;
    case '[':
        k->state = CLI_KEYS_CSI;
        k->parameters = k->parameter[0] = k->parameter[1] = 0;
        k->other = false;
        return CLI_KEY_NONE;
    case 'O':
        k->state = CLI_KEYS_SS3;
        return CLI_KEY_NONE;
    case 'b':
    case 'B':
        return CLI_KEY_WORD_LEFT;
    case 'f':
    case 'F':
        return CLI_KEY_WORD_RIGHT;
    case 'd':
    case 'D':
        return CLI_KEY_CUT_WORD;
    case 0x08:
    case 0x7F:
        return CLI_KEY_CUT_WORD_BEFORE;
    default:
        /* Ctrl keys and Enter keep their meaning, other keys with Alt have none. */
        return byte < 0x20 ? take_plain(k, byte) : CLI_KEY_NONE;
    }
}

/* The final byte of a sequence that moves the cursor. */
static enum cli_key moving_key(unsigned char byte, bool by_word)
{
    switch (byte) {
    case 'A':
        return CLI_KEY_UP;
    case 'B':
        return CLI_KEY_DOWN;
    case 'C':
        return by_word ? CLI_KEY_WORD_RIGHT : CLI_KEY_RIGHT;
    case 'D':
        return by_word ? CLI_KEY_WORD_LEFT : CLI_KEY_LEFT;
    case 'F':
        return CLI_KEY_END;
    case 'H':
        return CLI_KEY_HOME;
    case 'c': /* rxvt, with Ctrl */
        return CLI_KEY_WORD_RIGHT;
    case 'd':
        return CLI_KEY_WORD_LEFT;
    default:
        return CLI_KEY_NONE;
    }
}

/* Esc [ N ~ */
static enum cli_key numbered_key(struct cli_keys *k, bool by_word)
{
    switch (k->parameter[0]) {
    case 1:
    case 7:
        return CLI_KEY_HOME;
    case 3:
        return by_word ? CLI_KEY_CUT_WORD : CLI_KEY_DELETE;
    case 4:
    case 8:
        return CLI_KEY_END;
    case 200:
        k->state = CLI_KEYS_PASTE;
        k->text.len = k->matched = 0;
        k->too_long = false;
        return CLI_KEY_NONE;
    default:
        return CLI_KEY_NONE;
    }
}

static enum cli_key end_csi(struct cli_keys *k, unsigned char byte)
{
    /* The second parameter says which keys are held: 3 is Alt, 5 is Ctrl, 7 both. */
    unsigned held = k->parameters > 0 ? k->parameter[1] : 0;
    bool by_word = held == 3 || held == 5 || held == 7;
    k->state = CLI_KEYS_PLAIN;
    if (k->other)
        return CLI_KEY_NONE;
    if (byte == '~')
        return numbered_key(k, by_word);
    return byte < 'a' ? moving_key(byte, by_word) : CLI_KEY_NONE;
}

static enum cli_key take_csi(struct cli_keys *k, unsigned char byte)
{
    unsigned *parameter = &k->parameter[k->parameters < 1 ? 0 : 1];
    if (byte == '[' && !k->other && k->parameters == 0 && *parameter == 0) {
        k->state = CLI_KEYS_CONSOLE;
        return CLI_KEY_NONE;
    }
    if (byte < 0x20 || byte >= 0x7F) /* it is cut off */
        return take_plain(k, byte);
    if (byte >= 0x40)
        return end_csi(k, byte);
    if (byte >= '0' && byte <= '9' && k->parameters < 2)
        *parameter = *parameter < PARAMETER_MAX ? *parameter * 10 + (byte - '0') : PARAMETER_MAX;
    else if (byte == ';')
        k->parameters++;
    else
        k->other = true;
    return CLI_KEY_NONE;
}

static enum nb_status take_pasted(struct cli_keys *k, unsigned char byte, enum cli_key *key)
{
    static const unsigned char mark[] = "\033[201~";
    const size_t mark_len = sizeof mark - 1;
    k->matched = byte == mark[k->matched] ? k->matched + 1 : byte == mark[0];
    if (k->text.len < CLI_EDIT_MAX + mark_len)
        nbi_str_append(&k->text, &byte, 1);
    else
        k->too_long = true;
    if (k->matched < mark_len)
        return NB_OK;
    k->state = CLI_KEYS_PLAIN;
    *key = k->too_long ? CLI_KEY_TOO_LONG : CLI_KEY_PASTE;
    enum nb_status rc = nbi_str_status(&k->text);
    if (rc != NB_OK)
        nbi_str_release(&k->text);
    else
        k->text.len -= k->too_long ? 0 : mark_len;
    return rc;
}

enum nb_status cli_keys_feed(struct cli_keys *k, unsigned char byte, enum cli_key *key)
{
    *key = CLI_KEY_NONE;
    switch (k->state) {
    case CLI_KEYS_PASTE:
        return take_pasted(k, byte, key);
    case CLI_KEYS_CHAR:
        if (byte >> 6 == 2)
            *key = take_char(k, byte);
        else /* it is cut off */
            *key = take_plain(k, byte);
        break;
    case CLI_KEYS_ESCAPE:
        *key = take_escape(k, byte);
        break;
    case CLI_KEYS_CSI:
        *key = take_csi(k, byte);
        break;
    case CLI_KEYS_SS3:
        k->state = CLI_KEYS_PLAIN;
        *key = byte < 0x20 || byte >= 0x7F ? take_plain(k, byte) : moving_key(byte, false);
        break;
    case CLI_KEYS_CONSOLE: /* the last byte of a function key */
        k->state = CLI_KEYS_PLAIN;
        *key = byte < 0x20 || byte >= 0x7F ? take_plain(k, byte) : CLI_KEY_NONE;
        break;
    case CLI_KEYS_PLAIN:
        *key = take_plain(k, byte);
        break;
    }
    enum nb_status rc = nbi_str_status(&k->text);
    if (rc != NB_OK)
        cli_keys_release(k);
    return rc;
}

enum cli_key cli_keys_pause(struct cli_keys *k)
{
    if (k->state != CLI_KEYS_ESCAPE)
        return CLI_KEY_NONE;
    k->state = CLI_KEYS_PLAIN;
    return CLI_KEY_ESCAPE;
}
