#!/usr/bin/env -S python3 -B
"""Checks a report that test_report.c wrote, with parsers that are not ours.

usage: check_report.py FILE {full|empty}
"""
import html.parser
import re
import sys
import xml.etree.ElementTree

SVG = "{http://www.w3.org/2000/svg}"
HTML = "{http://www.w3.org/1999/xhtml}"
HOSTILE = "</td><script>alert(1)</script>&amp;\"'\ufffd\ufffd\n\u4f60"


class Tags(html.parser.HTMLParser):
    """What a browser's parser would see."""

    def __init__(self):
        super().__init__()
        self.seen, self.attributes = {}, []

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs


def points(svg, style):
    """The points of the line of that style."""
    line = svg.find(f"{SVG}polyline[@class='{style}']")
    return [tuple(map(float, p.split(","))) for p in line.get("points").split()]


def legend(page):
    """What the legend of the loss names."""
    return [b.text for b in page.findall(f".//{HTML}p[@class='key']/{HTML}b")]


def check_axes(svg):
    """Ticks are round numbers inside of the picture, at places that rise evenly."""
    for axis in "x", "y":
        ticks = svg.findall(f"{SVG}text[@class='axis {axis}']")
        assert 2 <= len(ticks) <= 12, len(ticks)
        for tick in ticks:
            digits = re.sub(r"e.*|[-.]", "", tick.text).strip("0")
            assert len(digits) <= 4, tick.text
            assert 0 <= float(tick.get("x")) <= 720 and 0 <= float(tick.get("y")) <= 250
        values = [float(t.text) for t in ticks]
        assert values == sorted(values), values


def check_charts(page):
    """Lines, dots and hover titles of the run that test_report.c makes up: 5000 steps, a spike at
    1234, the loss of every hundredth not finite, three evaluations, one of them NaN."""
    svgs = {s.get("id"): s.findall(f".//{SVG}svg") for s in page.iter(HTML + "section")}
    assert set(svgs) == {"loss", "lr", "grad-norm", "speed", "memory"}, svgs
    assert [len(v) for v in svgs.values()] == [2, 1, 1, 1, 1]
    linear, logarithmic = svgs["loss"]
    for svg in svgs["loss"]:
        raw = points(svg, "raw")
        assert 500 < len(raw) <= 1000 and len(points(svg, "line")) <= 1000, len(raw)
        assert len(svg.findall(f"{SVG}circle")) == 2
        assert len(svg.findall(f"{SVG}rect[@class='hover']")) == 60
    for group in svgs.values():
        for svg in group:
            check_axes(svg)
    top = min(points(linear, "raw"), key=lambda p: p[1])
    assert abs(top[0] - (66 + 630 * 1233 / 4999)) < 0.2, top  # the spike is there
    assert points(logarithmic, "raw")[0][0] == 66.0
    assert linear.find(f"{SVG}circle/{SVG}title").text == "step 1000, held-out loss 1.5"
    hover = linear.find(f"{SVG}rect/{SVG}title").text
    assert hover == "step 1, loss 4, smoothed 4", hover


def main():
    """One report."""
    with open(sys.argv[1], encoding="utf-8", newline="") as file:
        text = file.read()
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.seen and "link" not in tags.seen and "img" not in tags.seen
    assert not [a for a in tags.attributes if a[0] in ("src", "href", "onload")]
    assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xhtml))|url\(|@import", text)
    assert "nan" not in text.replace("finance", "").lower() and ",inf" not in text.lower()
    assert "prefers-color-scheme: dark" in text
    page = xml.etree.ElementTree.fromstring(text)
    if sys.argv[2] == "empty":
        shown = [t.text for t in page.iter(SVG + "text")]
        assert shown == ["nothing to show"] * 6, shown
        assert legend(page) == [], legend(page)
        return
    check_charts(page)
    assert legend(page) == ["each step", "smoothed", "held-out"], legend(page)
    assert page.find(f".//{HTML}h1").text == HOSTILE
    rows = page.findall(f".//{HTML}table[@id='samples']/{HTML}tr")
    assert len(rows) == 3, len(rows)
    cells = [td.text for td in rows[1]]
    assert cells == [HOSTILE, "I am nobody", HOSTILE], cells
    assert [td.text for td in rows[2]] == ["hi", None, "yes"]
    settings = page.findall(f".//{HTML}table[@id='settings']/{HTML}tr")
    assert [(r[0].text, r[1].text) for r in settings] == [("lr", "1e-05"), (HOSTILE, HOSTILE)]
    assert [li.text for li in page.iter(HTML + "li")] == [HOSTILE]
    summary = {r[0].text: r[1].text for r in page.findall(f".//{HTML}table[@id='summary']/*")}
    assert summary["steps"] == "5000" and summary["tokens"] == "5000000", summary
    assert summary["steps with loss or gradient not finite"] == "50", summary
    assert len(text) < 300000, len(text)


if __name__ == "__main__":
    main()
