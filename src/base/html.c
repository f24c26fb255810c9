/* html.c - escaping, and the beginning and end of every page. */
#include "base/html.h"

#include <string.h>

#include "base/utf8.h"

static bool is_xml_char(uint32_t c)
{
    return c >= 0x20 ? c != 0xFFFE && c != 0xFFFF && (c < 0x7F || c > 0x9F)
                     : c == '\n' || c == '\t' || c == '\r';
}

static void put_char(struct nbi_str *out, uint32_t c)
{
    switch (c) {
    case '&':
        nbi_str_puts(out, "&amp;");
        break;
    case '<':
        nbi_str_puts(out, "&lt;");
        break;
    case '>':
        nbi_str_puts(out, "&gt;");
        break;
    case '"':
        nbi_str_puts(out, "&quot;");
        break;
    case '\'':
        nbi_str_puts(out, "&#39;");
        break;
    default:
        nbi_str_put_char(out, is_xml_char(c) ? c : 0xFFFD);
    }
}

void nbi_html_bytes(struct nbi_str *out, const char *text, size_t len)
{
    const char *end = text + len;
    while (text < end) {
        bool cut;
        int n = nbi_utf8_length(text, end);
        put_char(out, n ? nbi_utf8_decode(text) : 0xFFFD);
        text += n ? n : nbi_utf8_bad_length(text, end, &cut);
    }
}

void nbi_html_text(struct nbi_str *out, const char *text)
{
    nbi_html_bytes(out, text, strlen(text));
}

/* ---- pages ---- */

static const char head[] =
    "<meta charset=\"utf-8\"/>\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
    "<meta http-equiv=\"Content-Security-Policy\" "
    "content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n"
    "<style>\n"
    ":root { color-scheme: light dark; --text: #1c1c1e; --soft: #6b6b70; --back: #fff;\n"
    "  --grid: #e4e4e8; --raw: #9fc0e8; --line: #1f5fa8; --eval: #c2410c; }\n"
    "@media (prefers-color-scheme: dark) { :root { --text: #e8e8ea; --soft: #9a9aa0;\n"
    "  --back: #17171a; --grid: #303036; --raw: #35557c; --line: #7db4f0; --eval: #fb923c; } }\n"
    "body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);\n"
    "  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }\n"
    "h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }\n"
    "table { border-collapse: collapse; width: 100%; }\n"
    "th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;\n"
    "  border-top: 1px solid var(--grid); overflow-wrap: anywhere; }\n"
    "th { font-weight: 600; color: var(--soft); } td.text { white-space: pre-wrap; }\n";

void nbi_html_begin(struct nbi_str *out, const char *title, const char *style)
{
    nbi_str_puts(out, "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" "
                      "lang=\"en\">\n<head>\n");
    nbi_str_puts(out, head);
    nbi_str_puts(out, style);
    nbi_str_puts(out, "</style>\n<title>");
    nbi_html_text(out, title);
    nbi_str_puts(out, "</title>\n</head>\n<body>\n<h1>");
    nbi_html_text(out, title);
    nbi_str_puts(out, "</h1>\n");
}

void nbi_html_end(struct nbi_str *out)
{
    nbi_str_puts(out, "</body>\n</html>\n");
}

void nbi_html_cell(struct nbi_str *out, const char *text)
{
    nbi_str_puts(out, "<td class=\"text\">");
    nbi_html_text(out, text);
    nbi_str_puts(out, "</td>");
}

void nbi_html_row(struct nbi_str *out, const char *key, const char *value)
{
    nbi_str_puts(out, "<tr><th>");
    nbi_html_text(out, key);
    nbi_str_puts(out, "</th>");
    nbi_html_cell(out, value);
    nbi_str_puts(out, "</tr>\n");
}
