"""Reports without a picture: the same figures as text, as a page and as a fragment."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from graphcore.drawing import Document
from graphcore.drawing.document import MOST_ROWS, Part, Table, share
from graphcore.errors import ConfigurationError

HOSTILE = "</td></section><script>alert('1')</script>\x1b[31m & \"name\""


def report(**more):
    given = {
        "title": "A report",
        "subtitle": "of one run",
        "cards": [("Facts", {"steps": 12}), ("Words", "line one\nline two")],
        "bar": [Part("replay", 9, "kernel"), Part("none", 0, "memset"), Part("rest", 3, "memcpy")],
        "bar_heading": "Steps",
        "tables": [
            Table("Times", ("kind", "us", "memory", "of all"),
                  (("replay", "1.5", "12 bytes", 0.75), ("rest", 30, "-", 0.25)), "Of the host."),
            Table("Nothing", ("a",), ()),
        ],
    }  # fmt: skip
    return Document(**{**given, **more})


class Reading(HTMLParser):
    """Tags that are open, and the text outside style."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def read(markup):
    reading = Reading()
    reading.feed(markup)
    assert reading.open == []
    return reading


@pytest.mark.parametrize("form", ["to_html_page", "to_html"])
def test_a_page_and_a_fragment_say_all_that_the_text_says(form):
    made = report()
    seen = " ".join(read(getattr(made, form)()).text)
    for word in re.findall(r"[\w.%]+", made.to_text()):
        assert word in seen, word
    assert "Nothing" not in seen


def test_a_page_loads_nothing_and_follows_the_readers_theme():
    page = report().to_html_page()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert "prefers-color-scheme:dark" in page
    assert 'name="color-scheme" content="light dark"' in page


def test_hostile_names_stay_names_wherever_they_stand():
    made = report(
        title=HOSTILE, subtitle=HOSTILE, bar=[Part(HOSTILE, 1, HOSTILE)], bar_heading=HOSTILE,
        cards=[(HOSTILE, {HOSTILE: HOSTILE}), (HOSTILE, HOSTILE)],
        tables=[Table(HOSTILE, (HOSTILE, "n"), ((HOSTILE, 1),), HOSTILE, is_folded)
                for is_folded in (False, True)],
    )  # fmt: skip
    for markup in (made.to_html_page(), made.to_html()):
        reading = read(markup)
        assert "script" not in reading.tags
        assert "\x1b" not in markup
        assert "".join(reading.text).count("alert('1')") >= 14
    assert "\x1b" not in made.to_text()


def test_text_aligns_numbers_and_sizes_to_the_right():
    lines = report().to_text().splitlines()
    start = lines.index("Times") + 1
    assert lines[start : start + 4] == [
        "  kind     us    memory  of all",
        "  replay  1.5  12 bytes  75.0 %",
        "  rest     30         -  25.0 %",
        "  Of the host.",
    ]


def test_the_bar_has_a_legend_in_words_and_no_empty_part():
    page = report().to_html_page()
    assert "replay 9 (75.0 %)" in page
    assert "flex-grow:9" in page
    assert "none 0" not in page
    assert "gc-stack" not in re.sub(r"(?s)<style>.*?</style>", "", report(bar=[]).to_html())


def test_a_long_table_is_cut_and_says_so():
    long = Table("Long", ("n",), tuple((number,) for number in range(MOST_ROWS + 5)))
    made = report(tables=[long])
    assert "and 5 more" in made.to_text()
    assert "and 5 more" in made.to_html_page()
    assert made.to_html().count("<tr>") == MOST_ROWS + 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tables": [Table("T", ("a", "b"), ((1,),))]}, "expected 2 cells in a row, got"),
        ({"bar": [Part("x", -1, "kernel")]}, "expected parts of 0 or more"),
    ],
    ids=["cells", "part"],
)
def test_what_is_no_report_is_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        report(**given)


@pytest.mark.parametrize(
    ("value", "words"), [(1.0, "100.0 %"), (0.99999, "99.9 %"), (0.0, "0.0 %"), (0.5, "50.0 %")]
)
def test_only_all_is_called_all(value, words):
    assert share(value) == words
