/* line_editor.c - edits a line: turns keys into changes of a text. */
#include "cli/line_editor.h"

#include <string.h>

#define PATTERN_MAX 256
#define BELL        "\a"

void cli_editor_release(struct cli_editor *e)
{
    cli_edit_release(&e->edit);
    cli_keys_release(&e->keys);
    nbi_str_release(&e->out);
    nbi_str_release(&e->typed);
    nbi_str_release(&e->pattern);
    nbi_str_release(&e->search_prompt);
    nbi_str_release(&e->before_search);
}

void cli_editor_begin(struct cli_editor *e, const char *prompt, const struct cli_history *history)
{
    cli_edit_clear(&e->edit);
    cli_display_begin(&e->display);
    e->prompt = prompt;
    e->history = history;
    e->entry = history->count;
    e->searching = e->clear = false;
    e->stale = true;
    e->typed.len = 0;
}

/* Replaces *s; empty after a failure. */
static enum nb_status keep(struct nbi_str *s, const char *text, size_t len)
{
    s->len = 0;
    nbi_str_append(s, text, len);
    enum nb_status rc = nbi_str_status(s);
    if (rc != NB_OK)
        nbi_str_release(s);
    return rc;
}

/* ---- history ---- */

static enum nb_status show_entry(struct cli_editor *e, size_t entry)
{
    const struct cli_history *h = e->history;
    bool typed = entry == h->count;
    if (e->entry == h->count)
        NBI_TRY(keep(&e->typed, e->edit.text, e->edit.len));
    const char *text = typed ? nbi_str_text(&e->typed) : h->entries[entry];
    NBI_TRY(cli_edit_set(&e->edit, text, typed ? e->typed.len : strlen(text)));
    e->entry = entry;
    return NB_OK;
}

static enum nb_status go_up(struct cli_editor *e)
{
    return e->entry > 0 ? show_entry(e, e->entry - 1) : NB_OK;
}

static enum nb_status go_down(struct cli_editor *e)
{
    return e->entry < e->history->count ? show_entry(e, e->entry + 1) : NB_OK;
}

/* ---- searching ---- */

static enum nb_status begin_search(struct cli_editor *e)
{
    NBI_TRY(keep(&e->before_search, e->edit.text, e->edit.len));
    e->cursor_before_search = e->edit.cursor;
    e->entry_before_search = e->entry;
    e->pattern.len = 0;
    e->searching = true;
    e->missed = false;
    return NB_OK;
}

/* Shows the last entry before `from` that contains the pattern. */
static enum nb_status search(struct cli_editor *e, size_t from)
{
    size_t found = cli_history_older(e->history, from, nbi_str_text(&e->pattern), e->pattern.len);
    e->missed = found == e->history->count;
    return e->missed ? NB_OK : show_entry(e, found);
}

static enum nb_status cancel_search(struct cli_editor *e)
{
    e->searching = false;
    NBI_TRY(cli_edit_set(&e->edit, nbi_str_text(&e->before_search), e->before_search.len));
    e->edit.cursor = e->cursor_before_search;
    e->entry = e->entry_before_search;
    return NB_OK;
}

static enum nb_status change_pattern(struct cli_editor *e, enum cli_key key)
{
    struct nbi_str *p = &e->pattern;
    if (key == CLI_KEY_TEXT) {
        if (p->len + e->keys.text.len > PATTERN_MAX)
            return NB_OK;
        nbi_str_append(p, e->keys.text.p, e->keys.text.len);
        NBI_TRY(nbi_str_status(p));
        return search(e, e->entry < e->history->count ? e->entry + 1 : e->entry);
    }
    while (p->len > 0 && ((unsigned char)p->p[p->len - 1] & 0xC0) == 0x80)
        p->len--;
    p->len -= p->len > 0;
    return search(e, e->history->count);
}

/* False: the key ends the search and applies to the line. */
static bool search_key(struct cli_editor *e, enum cli_key key, enum nb_status *rc)
{
    switch (key) {
    case CLI_KEY_TEXT:
    case CLI_KEY_BACKSPACE:
        *rc = change_pattern(e, key);
        return true;
    case CLI_KEY_SEARCH:
        *rc = e->pattern.len > 0 ? search(e, e->entry) : NB_OK;
        return true;
    case CLI_KEY_CANCEL:
    case CLI_KEY_ESCAPE:
        *rc = cancel_search(e);
        return true;
    case CLI_KEY_NONE:
    case CLI_KEY_TOO_LONG:
        return true;
    default:
        e->searching = false;
        return false;
    }
}

/* ---- keys ---- */

static enum nb_status move_to(struct cli_editor *e, enum cli_edit_place place)
{
    cli_edit_move(&e->edit, place);
    return NB_OK;
}

static enum nb_status delete_to(struct cli_editor *e, enum cli_edit_place place)
{
    cli_edit_delete(&e->edit, place);
    return NB_OK;
}

static enum nb_status insert(struct cli_editor *e, bool pasted)
{
    bool fits = true;
    struct nbi_str *text = &e->keys.text;
    while (pasted && text->len > 0 && strchr("\r\n", text->p[text->len - 1]))
        text->len--;
    NBI_TRY(cli_edit_insert(&e->edit, text->p, text->len, &fits));
    if (pasted) /* it may be large */
        nbi_str_release(text);
    if (!fits)
        nbi_str_puts(&e->out, BELL);
    return NB_OK;
}

static enum nb_status yank(struct cli_editor *e)
{
    bool fits = true;
    NBI_TRY(cli_edit_yank(&e->edit, &fits));
    if (!fits)
        nbi_str_puts(&e->out, BELL);
    return NB_OK;
}

/* A key that changes the text, or moves in it. */
static enum nb_status edit_key(struct cli_editor *e, enum cli_key key)
{
    switch (key) {
    case CLI_KEY_TEXT:
    case CLI_KEY_PASTE:
        return insert(e, key == CLI_KEY_PASTE);
    case CLI_KEY_LEFT:
        return move_to(e, CLI_EDIT_LEFT);
    case CLI_KEY_RIGHT:
        return move_to(e, CLI_EDIT_RIGHT);
    case CLI_KEY_HOME:
        return move_to(e, CLI_EDIT_START);
    case CLI_KEY_END:
        return move_to(e, CLI_EDIT_END);
    case CLI_KEY_WORD_LEFT:
        return move_to(e, CLI_EDIT_WORD_LEFT);
    case CLI_KEY_WORD_RIGHT:
        return move_to(e, CLI_EDIT_WORD_RIGHT);
    case CLI_KEY_BACKSPACE:
        return delete_to(e, CLI_EDIT_LEFT);
    case CLI_KEY_DELETE:
    case CLI_KEY_DELETE_OR_LEAVE:
        return delete_to(e, CLI_EDIT_RIGHT);
    case CLI_KEY_CUT_WORD:
        return cli_edit_cut(&e->edit, CLI_EDIT_WORD_RIGHT);
    case CLI_KEY_CUT_WORD_BEFORE:
        return cli_edit_cut(&e->edit, CLI_EDIT_WORD_LEFT);
    case CLI_KEY_CUT_BLANK_BEFORE:
        return cli_edit_cut(&e->edit, CLI_EDIT_BLANK_LEFT);
    case CLI_KEY_CUT_TO_START:
        return cli_edit_cut(&e->edit, CLI_EDIT_START);
    case CLI_KEY_CUT_TO_END:
        return cli_edit_cut(&e->edit, CLI_EDIT_END);
    case CLI_KEY_YANK:
        return yank(e);
    case CLI_KEY_TRANSPOSE:
        return cli_edit_transpose(&e->edit);
    case CLI_KEY_UP:
        return go_up(e);
    case CLI_KEY_DOWN:
        return go_down(e);
    case CLI_KEY_SEARCH:
        return begin_search(e);
    default:
        return NB_OK;
    }
}

static enum nb_status take_key(struct cli_editor *e, enum cli_key key, enum cli_editor_event *event)
{
    enum nb_status rc = NB_OK;
    e->stale = true;
    if (e->searching && search_key(e, key, &rc))
        return rc;
    switch (key) {
    case CLI_KEY_ENTER:
        *event = CLI_EDITOR_ACCEPTED;
        return NB_OK;
    case CLI_KEY_SUSPEND:
        *event = CLI_EDITOR_SUSPEND;
        return NB_OK;
    case CLI_KEY_QUIT:
        *event = CLI_EDITOR_QUIT;
        return NB_OK;
    case CLI_KEY_REDRAW:
        e->clear = true;
        return NB_OK;
    case CLI_KEY_TOO_LONG:
        nbi_str_puts(&e->out, BELL);
        return NB_OK;
    case CLI_KEY_DELETE_OR_LEAVE:
        if (e->edit.len == 0) {
            *event = CLI_EDITOR_ENDED;
            return NB_OK;
        }
        return edit_key(e, key);
    default:
        return edit_key(e, key);
    }
}

enum nb_status cli_editor_feed(struct cli_editor *e, unsigned char byte,
                               enum cli_editor_event *event)
{
    enum cli_key key;
    *event = CLI_EDITOR_GOES_ON;
    NBI_TRY(cli_keys_feed(&e->keys, byte, &key));
    return key == CLI_KEY_NONE ? NB_OK : take_key(e, key, event);
}

enum nb_status cli_editor_pause(struct cli_editor *e)
{
    enum cli_editor_event event;
    /* Outside a search, Esc followed by a letter is Alt, however late the letter comes. */
    enum cli_key key = e->searching ? cli_keys_pause(&e->keys) : CLI_KEY_NONE;
    return key == CLI_KEY_NONE ? NB_OK : take_key(e, key, &event);
}

/* ---- the screen ---- */

static enum nb_status show(struct cli_editor *e, struct cli_shown *s)
{
    *s = (struct cli_shown){
        .prompt = e->prompt, .text = e->edit.text, .len = e->edit.len, .cursor = e->edit.cursor};
    if (!e->searching)
        return NB_OK;
    e->search_prompt.len = 0;
    nbi_str_puts(&e->search_prompt, e->missed ? "(nothing has '" : "(search '");
    nbi_str_append(&e->search_prompt, nbi_str_text(&e->pattern), e->pattern.len);
    nbi_str_puts(&e->search_prompt, "') ");
    s->prompt = nbi_str_text(&e->search_prompt);
    return nbi_str_status(&e->search_prompt);
}

void cli_editor_resize(struct cli_editor *e, size_t columns, size_t rows)
{
    struct cli_display before = e->display;
    cli_display_resize(&e->display, columns, rows);
    if (before.columns != e->display.columns || before.rows != e->display.rows)
        e->stale = true;
}

enum nb_status cli_editor_refresh(struct cli_editor *e)
{
    struct cli_shown s;
    if (!e->stale)
        return NB_OK;
    NBI_TRY(show(e, &s));
    if (e->clear)
        cli_display_clear(&e->display, &s, &e->out);
    else
        cli_display_draw(&e->display, &s, &e->out);
    e->stale = e->clear = false;
    return nbi_str_status(&e->out);
}

void cli_editor_draw_anew(struct cli_editor *e)
{
    cli_display_begin(&e->display);
    e->stale = true;
}

enum nb_status cli_editor_leave(struct cli_editor *e, bool whole)
{
    struct cli_shown s;
    if (e->searching) { /* its prompt goes */
        e->searching = false;
        e->stale = true;
    }
    NBI_TRY(cli_editor_refresh(e));
    NBI_TRY(show(e, &s));
    cli_display_leave(&e->display, &s, whole, &e->out);
    return nbi_str_status(&e->out);
}

enum nb_status cli_editor_erase(struct cli_editor *e)
{
    cli_display_erase(&e->display, &e->out);
    return nbi_str_status(&e->out);
}
