/* history.c - lines typed before. */
#include "cli/history.h"

#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/syscall.h"

#define LIBEDIT_HEADER "_HiStOrY_V2_"
#define FILE_MAX       (4 * CLI_HISTORY_BYTES) /* libedit's encoding takes four bytes for one */

/* ---- entries ---- */

void cli_history_release(struct cli_history *h)
{
    for (size_t i = 0; i < h->count; i++)
        free(h->entries[i]);
    free(h->entries);
    *h = (struct cli_history){0};
}

/* Removes the equal entry, if there is one. */
static void drop_equal(struct cli_history *h, const char *text)
{
    for (size_t i = 0; i < h->count; i++) {
        if (strcmp(h->entries[i], text) != 0)
            continue;
        h->bytes -= strlen(text) + 1;
        h->count--;
        free(h->entries[i]);
        memmove(h->entries + i, h->entries + i + 1, (h->count - i) * sizeof *h->entries);
        return;
    }
}

/* Drops the oldest entries until one of `size` bytes fits. */
static void drop_oldest(struct cli_history *h, size_t size)
{
    size_t gone = 0;
    while (gone < h->count &&
           (h->count - gone >= CLI_HISTORY_ENTRIES || h->bytes > CLI_HISTORY_BYTES - size)) {
        h->bytes -= strlen(h->entries[gone]) + 1;
        free(h->entries[gone++]);
    }
    h->count -= gone;
    if (gone > 0)
        memmove(h->entries, h->entries + gone, h->count * sizeof *h->entries);
}

enum nb_status cli_history_add(struct cli_history *h, const char *text)
{
    size_t size = strlen(text) + 1;
    if (size == 1 || size > CLI_HISTORY_BYTES)
        return NB_OK;
    if (!h->entries)
        *h = (struct cli_history){.entries = calloc(CLI_HISTORY_ENTRIES, sizeof *h->entries)};
    char *copy = h->entries ? strdup(text) : NULL;
    if (!copy)
        return nbi_fail_memory("the history", size);
    drop_equal(h, text);
    drop_oldest(h, size);
    h->entries[h->count++] = copy;
    h->bytes += size;
    return NB_OK;
}

size_t cli_history_older(const struct cli_history *h, size_t from, const char *part, size_t len)
{
    for (size_t i = from < h->count ? from : h->count; i-- > 0;)
        if (memmem(h->entries[i], strlen(h->entries[i]), part, len))
            return i;
    return h->count;
}

/* ---- the file ---- */

static bool is_octal(const char *p, const char *end, int digits)
{
    for (int i = 0; i < digits; i++)
        if (end - p <= i || p[i] < '0' || p[i] > '7')
            return false;
    return true;
}

/* Decodes one character of vis(3)'s encoding after the backslash; its length, 0 if malformed. */
static size_t decode_vis(const char *p, const char *end, char *out)
{
    size_t left = (size_t)(end - p);
    if (is_octal(p, end, 3)) {
        *out = (char)((p[0] - '0') * 64 + (p[1] - '0') * 8 + (p[2] - '0'));
        return 3;
    }
    if (left >= 1 && *p == '\\') {
        *out = '\\';
        return 1;
    }
    size_t meta = left >= 1 && *p == 'M';
    char high = meta ? (char)0x80 : 0;
    if (left < meta + 2)
        return 0;
    if (p[meta] == '^') {
        *out = (char)(high | (p[meta + 1] == '?' ? 0x7F : p[meta + 1] & 0x1F));
        return meta + 2;
    }
    if (meta && p[1] == '-') {
        *out = (char)(high | p[2]);
        return 3;
    }
    return 0;
}

/* Decodes our own encoding: a backslash followed by a backslash or 'n'. */
static size_t decode_own(const char *p, const char *end, char *out)
{
    if (p == end || (*p != 'n' && *p != '\\'))
        return 0;
    *out = *p == 'n' ? '\n' : '\\';
    return 1;
}

/* Malformed escapes stand for themselves. */
static enum nb_status parse_line(struct cli_history *h, const char *p, const char *end,
                                 bool libedit, struct nbi_str *entry)
{
    entry->len = 0;
    while (p < end) {
        char c = *p++;
        if (c == '\\')
            p += libedit ? decode_vis(p, end, &c) : decode_own(p, end, &c);
        if (c)
            nbi_str_append(entry, &c, 1);
    }
    NBI_TRY(nbi_str_status(entry));
    return entry->len > 0 ? cli_history_add(h, entry->p) : NB_OK;
}

enum nb_status cli_history_parse(struct cli_history *h, const char *bytes, size_t len)
{
    const char *end = bytes + len;
    const size_t header = strlen(LIBEDIT_HEADER);
    bool libedit = len > header && memcmp(bytes, LIBEDIT_HEADER "\n", header + 1) == 0;
    struct nbi_str entry = {0};
    enum nb_status rc = NB_OK;
    for (const char *p = bytes + (libedit ? header + 1 : 0); rc == NB_OK && p < end;) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        stop = stop ? stop : end;
        rc = parse_line(h, p, stop, libedit, &entry);
        p = stop < end ? stop + 1 : end;
    }
    nbi_str_release(&entry);
    return rc;
}

void cli_history_print(const struct cli_history *h, struct nbi_str *out)
{
    for (size_t i = 0; i < h->count; i++) {
        for (const char *p = h->entries[i]; *p; p++) {
            if (*p == '\n' || *p == '\\')
                nbi_str_puts(out, *p == '\n' ? "\\n" : "\\\\");
            else
                nbi_str_append(out, p, 1);
        }
        nbi_str_puts(out, "\n");
    }
}

char *cli_history_find(void)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    struct nbi_str path = {0};
    if (state && *state == '/')
        nbi_str_puts(&path, state);
    else if (home && *home == '/')
        nbi_str_printf(&path, "%s/.local/state", home);
    else
        return NULL;
    nbi_str_puts(&path, "/nibble/history");
    char *found = nbi_str_take(&path);
    for (char *p = found ? found + 1 : NULL; p && (p = strchr(p, '/')); *p++ = '/') {
        *p = 0;
        nbi_sys_mkdir(found, 0700); /* fails where it is there */
    }
    return found;
}

/* False: the file exists but cannot be read, so it must not be replaced. */
static bool read_file(struct cli_history *h, const char *path)
{
    char *bytes = NULL;
    size_t len;
    enum nb_status rc = nbi_file_read(path, FILE_MAX, &bytes, &len);
    if (rc == NB_OK)
        rc = cli_history_parse(h, bytes, len);
    free(bytes);
    return nbi_unless_absent(rc) == NB_OK;
}

void cli_history_load(struct cli_history *h, const char *path)
{
    if (path)
        (void)read_file(h, path);
}

/* Creates an empty file that only its owner may read; its replacement keeps the mode. */
static bool make_private(const char *path)
{
    int fd = nbi_sys_open(path, O_WRONLY | O_CREAT | O_NONBLOCK, 0600);
    if (fd < 0)
        return false;
    bool ok = nbi_path_is_file(path) && nbi_sys_fchmod(fd, 0600) == 0;
    close(fd);
    return ok;
}

void cli_history_remember(struct cli_history *h, const char *path, const char *text)
{
    struct cli_history all = {0};
    struct nbi_str bytes = {0};
    bool added = cli_history_add(h, text) == NB_OK;
    if (path && added && read_file(&all, path) && cli_history_add(&all, text) == NB_OK) {
        cli_history_print(&all, &bytes);
        if (nbi_str_status(&bytes) == NB_OK && make_private(path) &&
            nbi_file_write(path, bytes.p, bytes.len) != NB_OK) {
            /* the entry is in memory */
        }
    }
    cli_history_release(&all);
    nbi_str_release(&bytes);
}
