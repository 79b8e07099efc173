"""Which texts of a prompt count as quoted."""

import pytest

from flow_grpo.rewards.ocr import quoted_texts


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign "STOP" and "GO"', ["STOP", "GO"]),
        ("a menu that says “SOUP” on a table", ["SOUP"]),
        ("一块木牌上写着“OPEN”", ["OPEN"]),
        ("a t-shirt with the text 'HELLO' on it", ["HELLO"]),
        ("ein Schild mit der Aufschrift „STOP“", ["STOP"]),
        ("ein Schild »STOP« und „GO”", ["STOP", "GO"]),
        ("une affiche avec le mot «\u00a0BIEN\u00a0»", ["BIEN"]),
        ("看板に「SALE」と『NOW』", ["SALE", "NOW"]),
        ("en skylt ”HEJ”", ["HEJ"]),
        ("the baker's sign ‘it’s OPEN’ at ten o'clock", ["it’s OPEN"]),
        ("the dogs' bowl, the cat's 'MILK' and the owner's hat", ["MILK"]),
        ('a “fancy” sign "OPEN"', ["OPEN"]),
        ('a 5" sign that says “OPEN”', ["OPEN"]),
        ("the baker's dogs' bowl", []),
        ("no text", []),
    ],
)
def test_quotation_marks_of_several_languages_count(prompt, texts):
    assert quoted_texts(prompt) == texts
