"""The prompts of scenes and of edits: one grammar, read and written.

    a red circle                                two green triangles
    a circle and a square                       a red circle and a blue square
    a red circle left of a blue square          two large red circles above a cross
    make the square green                       remove the red circle
    add a yellow triangle below the circle

What a scene does not name is free. Relations hold for every shape of the first group with every one of the second.
"""

import itertools
import re
import zlib
from dataclasses import dataclass, replace

from flow_grpo.errors import FlowGRPOError

COLORS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
MIRRORED = {"right of": "left of", "below": "above"}
NUMBERS = {"a": 1, "two": 2, "three": 3, "four": 4}
MOST_SHAPES = 4
SALT = 64  # with which some combinations of each category are held out, also of those with few
CATEGORIES = ("single", "two objects", "counting", "colours", "position", "attribute binding")
EXAMPLE = "a red circle left of a blue square"

_WORDS = {1: "a", 2: "two", 3: "three", 4: "four"}
_GROUP = (
    rf"(?:(?P<{{0}}count>{'|'.join(NUMBERS)}) (?:(?P<{{0}}size>{'|'.join(SIZES)}) )?"
    rf"(?:(?P<{{0}}color>{'|'.join(COLORS)}) )?(?P<{{0}}shape>{'|'.join(SHAPES)})(?:s|es)?)"
)
_SCENE = re.compile(rf"{_GROUP.format('a')}(?: (?P<relation>and|{'|'.join(RELATIONS)}) {_GROUP.format('b')})?")
_THE = rf"the (?:(?P<color>{'|'.join(COLORS)}) )?(?P<shape>{'|'.join(SHAPES)})"
_RECOLOR = re.compile(rf"make {_THE} (?P<new_color>{'|'.join(COLORS)})")
_REMOVE = re.compile(rf"remove {_THE}")
_ADD = re.compile(
    rf"add a (?P<new_color>{'|'.join(COLORS)}) (?P<new_shape>{'|'.join(SHAPES)}) (?P<relation>{'|'.join(RELATIONS)}) {_THE}"
)


@dataclass(frozen=True)
class Group:
    """Some shapes that a prompt names together; None is free."""

    shape: str
    count: int = 1
    color: str | None = None
    size: str | None = None

    def __str__(self) -> str:
        plural = "" if self.count == 1 else "es" if self.shape == "cross" else "s"
        return " ".join(word for word in (_WORDS[self.count], self.size, self.color, self.shape + plural) if word)


@dataclass(frozen=True)
class Scene:
    """One or two groups, with a relation between them or none; more groups in captions of edited images, which are no prompts."""

    groups: tuple[Group, ...]
    relation: str | None = None

    def __str__(self) -> str:
        return f" {self.relation or 'and'} ".join(map(str, self.groups))

    @property
    def count(self) -> int:
        """The number of shapes."""
        return sum(group.count for group in self.groups)

    @property
    def category(self) -> str:
        """The prompt's category, one of `CATEGORIES`, in the manner of GenEval (arXiv 2310.11513)."""
        first = self.groups[0]
        if len(self.groups) == 1:
            return "counting" if first.count > 1 else "colours" if first.color else "single"
        if self.relation:
            return "position"
        return "attribute binding" if first.color else "two objects"

    @property
    def meaning(self) -> str:
        """The same text for prompts that ask for the same: a relation said from the other side, groups in another order."""
        if self.relation in MIRRORED:
            return str(Scene(self.groups[::-1], MIRRORED[self.relation]))
        return str(self if self.relation else Scene(tuple(sorted(self.groups, key=str))))

    @property
    def is_held_out(self) -> bool:
        """Whether training never names this combination: a fifth of them, whatever the sizes."""
        combination = Scene(tuple(replace(group, size=None) for group in self.groups), self.relation)
        return zlib.crc32(f"{SALT}:{combination.meaning}".encode()) % 5 == 0


@dataclass(frozen=True)
class Edit:
    """A change of an image: `make` a shape of another colour, `remove` it, or `add` one beside it.

    Attributes:
        shape, color: the shape in the image that is meant; a colour of None is free.
        new_color, new_shape: what it becomes, or what is added.
        relation: of the added shape to the one that is meant.
    """

    kind: str
    shape: str
    color: str | None = None
    new_color: str | None = None
    new_shape: str | None = None
    relation: str | None = None

    def __str__(self) -> str:
        the = " ".join(word for word in ("the", self.color, self.shape) if word)
        if self.kind == "add":
            return f"add a {self.new_color} {self.new_shape} {self.relation} {the}"
        return f"make {the} {self.new_color}" if self.kind == "make" else f"remove {the}"

    @property
    def is_held_out(self) -> bool:
        """Whether training never names this edit: a fifth of them."""
        return zlib.crc32(str(self).encode()) % 5 == 0


def parse_scene(prompt: str) -> Scene:
    """The scene that a prompt asks for. FlowGRPOError if it is no prompt of a scene."""
    match = _SCENE.fullmatch(prompt.strip())
    groups = []
    for side in "ab" if match and match["bshape"] else "a":
        if match is not None:
            parts = {key: match[side + key] for key in ("shape", "color", "size")}
            groups.append(Group(count=NUMBERS[match[f"{side}count"]], **parts))
    if match is None or sum(group.count for group in groups) > MOST_SHAPES:
        raise FlowGRPOError(
            f"the prompt {prompt!r} is no scene of at most {MOST_SHAPES} shapes, such as {EXAMPLE!r}: {', '.join(SHAPES)} in "
            f"{', '.join(COLORS)}."
        )
    relation = match["relation"]
    return Scene(tuple(groups), None if relation == "and" else relation)


def parse_edit(prompt: str) -> Edit:
    """The edit that a prompt asks for. FlowGRPOError if it is no prompt of an edit."""
    text = prompt.strip()
    for kind, pattern in (("make", _RECOLOR), ("remove", _REMOVE), ("add", _ADD)):
        if match := pattern.fullmatch(text):
            return Edit(kind, **match.groupdict())
    raise FlowGRPOError(
        f"the prompt {prompt!r} is no edit of a scene, such as 'make the square green', 'remove the circle' or "
        "'add a yellow triangle below the circle'."
    )


def words() -> list[str]:
    """All words of the grammar, in order."""
    texts = [*NUMBERS, *SIZES, *COLORS, *SHAPES, *(f"{shape}s" for shape in SHAPES[:-1]), "crosses", "and", *RELATIONS]
    return list(dict.fromkeys(itertools.chain(*(text.split() for text in [*texts, "make the", "remove", "add"]))))
