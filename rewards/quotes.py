"""The quoted texts of a prompt, in straight, curly, German, French, Japanese and Chinese quotation marks."""

import re

# The first kind that a prompt has counts: with straight ones it is read as ever, and single ones may be apostrophes.
KINDS = (
    re.compile(r'"([^"]+)"'),
    re.compile(
        r"[“”„‟]([^“”„‟]+)[“”]|«([^«»]+)»|»([^«»]+)«|「([^「」]+)」|『([^『』]+)』|＂([^＂]+)＂|‹([^‹›]+)›|〝([^〝〞〟]+)[〞〟]"
    ),
    re.compile(r"(?<!\w)['‘‚]([^'‘‚]+?)['’‘](?!\w)"),
)
WHAT_COUNTS = "text in quotation marks, such as \"OPEN\", “OPEN”, „OPEN“, « OPEN », 「OPEN」 or 'OPEN'"


def quoted_texts(prompt: str) -> list[str]:
    """The texts in quotation marks, in their order and without spaces around them; [] if there are none."""
    for kind in KINDS:
        found = (next(text for text in match.groups() if text) for match in kind.finditer(prompt))
        texts = [text.strip() for text in found if text.strip()]
        if texts:
            return texts
    return []
