/* chat_log.c - the lines of a chat's log. */
#include "cli/chat_log.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/jscan.h"
#include "base/syscall.h"
#include "cli/model_options.h"

static enum nb_status write_all(const struct cli_chat_log *log, const char *bytes, size_t len)
{
    while (len > 0) {
        ssize_t n = write(log->fd, bytes, len);
        if (n < 0 && errno != EINTR)
            return nbi_fail(NB_EIO, "cannot write '%s': %s", log->path, strerror(errno));
        bytes += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
    }
    return NB_OK;
}

enum nb_status cli_chat_log_open(struct cli_chat_log *log, const char *path)
{
    char last = '\n';
    *log = (struct cli_chat_log){.path = path, .fd = -1};
    if (!path)
        return NB_OK;
    log->fd = nbi_sys_open(path, O_RDWR | O_APPEND | O_CREAT, 0666);
    if (log->fd < 0)
        return nbi_fail(NB_EIO, "cannot open '%s': %s", path, strerror(errno));
    /* Terminate an incomplete last line, so that ours does not become part of it. */
    off_t size = lseek(log->fd, 0, SEEK_END);
    if (size > 0 && pread(log->fd, &last, 1, size - 1) == 1 && last != '\n')
        return write_all(log, "\n", 1);
    return NB_OK;
}

void cli_chat_log_close(struct cli_chat_log *log)
{
    if (log->path && log->fd >= 0)
        close(log->fd);
}

/* Writes the line {"time":"...",MEMBERS} and releases members. */
static enum nb_status put_line(const struct cli_chat_log *log, struct nbi_str *members)
{
    struct nbi_str line = {0};
    char date[32];
    struct tm tm;
    time_t now = time(NULL);
    gmtime_r(&now, &tm);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &tm);
    nbi_str_printf(&line, "{\"time\":\"%s\",", date);
    nbi_str_append(&line, nbi_str_text(members), members->len);
    nbi_str_puts(&line, "}\n");
    enum nb_status rc = nbi_str_status(members);
    if (rc == NB_OK)
        rc = nbi_str_status(&line);
    if (rc == NB_OK && log->path)
        rc = write_all(log, line.p, line.len);
    nbi_str_release(&line);
    nbi_str_release(members);
    return rc;
}

static void put_message(struct nbi_str *out, enum nb_role role, const char *text, size_t len)
{
    nbi_str_printf(out, "\"role\":\"%s\",\"content\":", nb_role_name(role));
    nbi_jquote(out, text, len);
}

enum nb_status cli_chat_log_start(struct cli_chat_log *log, const struct cli_chat_settings *s)
{
    const struct nb_sampling *p = &s->generate->sampling;
    struct nbi_str line = {0};
    nbi_str_puts(&line, "\"event\":\"start\",\"version\":");
    nbi_jquote(&line, nb_version(), strlen(nb_version()));
    nbi_str_puts(&line, ",\"model\":");
    nbi_jquote(&line, s->model, strlen(s->model));
    nbi_str_printf(&line,
                   ",\"settings\":{\"seed\":%llu,\"temperature\":%g,\"top_k\":%lld,\"top_p\":%g,"
                   "\"min_p\":%g,\"repeat_penalty\":%g,\"presence_penalty\":%g,"
                   "\"frequency_penalty\":%g,\"max_tokens\":%lld,\"context\":%lld,\"think\":%s}",
                   (unsigned long long)p->seed, p->temperature, (long long)p->top_k, p->top_p,
                   p->min_p, p->repeat_penalty, p->presence_penalty, p->frequency_penalty,
                   (long long)s->generate->max_tokens, (long long)s->context,
                   s->think ? "true" : "false");
    return put_line(log, &line);
}

enum nb_status cli_chat_log_reset(struct cli_chat_log *log)
{
    struct nbi_str line = {0};
    nbi_str_puts(&line, "\"event\":\"reset\"");
    return put_line(log, &line);
}

enum nb_status cli_chat_log_load(struct cli_chat_log *log, const struct nb_conversation *c)
{
    struct nbi_str line = {0};
    struct nb_conversation_info info;
    nb_conversation_info(c, &info);
    nbi_str_puts(&line, "\"event\":\"load\",\"messages\":[");
    for (int64_t i = 0; i < info.messages; i++) {
        struct nb_message m;
        nb_conversation_message(c, i, &m);
        nbi_str_puts(&line, i ? ",{" : "{");
        put_message(&line, m.role, m.text, m.len);
        nbi_str_puts(&line, "}");
    }
    nbi_str_puts(&line, "]");
    return put_line(log, &line);
}

enum nb_status cli_chat_log_message(struct cli_chat_log *log, enum nb_role role, const char *text,
                                    size_t len)
{
    struct nbi_str line = {0};
    put_message(&line, role, text, len);
    return put_line(log, &line);
}

void cli_chat_put_answer(struct nbi_str *out, const struct nb_generate_result *r, bool interrupted)
{
    put_message(out, NB_ROLE_ASSISTANT, r->text, r->len);
    nbi_str_printf(out,
                   ",\"prompt_tokens\":%lld,\"completion_tokens\":%zu,\"reused_tokens\":%lld,"
                   "\"finish_reason\":\"%s\",\"prompt_ms\":%.3f,\"decode_ms\":%.3f,"
                   "\"interrupted\":%s",
                   (long long)r->prompt_tokens, r->count, (long long)r->reused_tokens,
                   interrupted ? "interrupted" : cli_finish_reason(r->finish),
                   r->prompt_seconds * 1e3, r->seconds * 1e3, interrupted ? "true" : "false");
}

enum nb_status cli_chat_log_answer(struct cli_chat_log *log, const struct nb_generate_result *r,
                                   bool interrupted)
{
    struct nbi_str line = {0};
    cli_chat_put_answer(&line, r, interrupted);
    return put_line(log, &line);
}
