"""Whatever text there is, it stays text: on one line, in its cell, in its code. Numbers read back as what they were."""

import math
import re

from hypothesis import given
from hypothesis import strategies as s
from markdown_it import MarkdownIt

from flow_grpo import text

MARKS = s.text(alphabet="`|\\*_[]()<>!#~$&@:/w. -\n\x1b\u202e\u2028a1", max_size=30)
page = MarkdownIt("gfm-like", {"linkify": False})


@given(s.text() | MARKS)
def test_a_terminal_and_a_page_get_one_line_of_printable_characters(words):
    assert text.visible(words).isprintable()
    shown = text.plain(words)
    assert len(shown.splitlines()) <= 1
    assert not set(shown) & {chr(code) for code in text.DIRECTIONS}
    assert shown.encode().decode() == shown, "no half of a surrogate pair"


@given(s.lists(s.tuples(MARKS, MARKS), min_size=1, max_size=3))
def test_no_cell_breaks_a_table(rows):
    cells = [(text.escape_markdown(one), text.inline_code(other)) for one, other in rows]
    made = page.render(text.markdown_table(("a", "b"), cells, left=1))
    assert made.count("<tr>") == len(rows) + 1
    assert made.count("<td") == 2 * len(rows)
    assert not re.findall(r"<(?!/?(?:table|thead|tbody|tr|th|td|code)\b)", made), "no markup but the table's own"


@given(MARKS)
def test_no_line_closes_a_block_of_code(words):
    made = page.render(f"{text.code_block(words, 'yaml')}\n\nafter")
    assert made.endswith("</code></pre>\n<p>after</p>\n")
    assert made.count("<pre>") == 1


def test_no_password_of_an_address_is_shown():
    for slashes in ("//", "/"):  # pathlib takes one slash out of an address
        for address in (f"https:{slashes}me:pa55@host/a?b=c@d", f"http:{slashes}pa55@host"):
            for shown in (text.visible, text.plain, text.inline_code, text.escape_markdown):
                assert "pa55" not in shown(f"there is no file {address}.")
    assert text.visible("https://host/a@b me@host C:/a@b") == "https://host/a@b me@host C:/a@b"


def test_markdown_links_mentions_and_computes_nothing():
    shown = text.escape_markdown("https://a.b WWW.a.b @me me@a.b $x$ at 1:2")
    assert shown == "https\\://a.b WWW\\.a.b @\u2060me me@\u2060a.b \\$x\\$ at 1:2"


@given(s.floats(-1e9, 1e9), s.integers(1, 5))
def test_a_number_reads_back_within_its_last_digit(value, decimals):
    shown = float(text.number(value, decimals).replace("−", "-").replace(",", ""))
    assert math.isclose(shown, value, rel_tol=0.05, abs_tol=0.5000001 * 10**-decimals)
    assert text.number(value, decimals, sign=True).lstrip("+") == text.number(value, decimals)


def test_numbers_as_people_write_them():
    numbers = {1.0: "1.000", 16.04: "16.0", 1280: "1,280", -0.25: "−0.250", 0.0: "0.000", 4e-5: "4.0e−5", math.nan: "–"}
    assert {value: text.number(value) for value in numbers} == numbers
    assert text.number(None) == "–"
    assert text.number(21.3456, decimals=4, large=100.0, sign=True) == "+21.3456"
    assert [text.counted(n, "image") for n in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert text.counted(3, "process") == "3 processes"
    assert text.duration(3 * 3600 + 125) == "3 h 2 min"
    assert text.duration(3599.8) == "1 h 0 min"


def test_the_first_line_of_an_error_has_a_space_between_its_sentences():
    assert text.first_line(ValueError("33 and 80.You can use 32.\nmore")) == "33 and 80. You can use 32."
    assert text.first_line(ValueError("0.5 of torch.Tensor")) == "0.5 of torch.Tensor"
    assert text.first_line(KeyError()) == "KeyError"
