"""What a reward sees at a time: one image, the images of a group, or pairs of them; and which frames of a video.

A reward says so by its attributes `scope` and `frames`; `rewards.load(name, frames=...)` sets the frames from outside.

Its `scope` is `image` (the default), `group` or `pair`:

    group: `reward(images, prompts, **metadata)` gets the images of one group (G, 3, H, W), their prompt G times, and returns G values.
    pair:  `reward(first, second, prompts, **metadata)` gets n pairs, two times (n, 3, H, W), and returns for each the probability, or
           0 or 1, that the first image is better. An image's value is its win rate within its group (Pref-GRPO, arXiv 2508.20751).
           Each pair is asked in both orders, unless the reward has the attribute `symmetric = True`. With the attribute `opponents`
           each image is compared with about so many others of its group, see `pairs_of`.

A reward of images gets one frame of each video at a time, and its value is the mean over the `frames`:

    4:       four frames, evenly spaced from the first to the last; any number. This is the default; 1 is the frame in the middle.
    "first": the first frame.
    "last":  the last frame.
    "all":   whole videos (B, F, 3, H, W) in one call.
"""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError

IMAGE, GROUP, PAIR = SCOPES = ("image", "group", "pair")
PAIRS_PER_CALL = 32  # a pair reward gets no more at a time, since they are copies of the images
# of a reward; they say how it is called
ATTRIBUTES = ("scope", "symmetric", "opponents", "costly", "frames", "differentiable")
Frames = int | Literal["first", "last", "all"]
FIRST, LAST, ALL = "first", "last", "all"
DEFAULT_FRAMES = 4


class Framed:
    """A reward that sees other frames of a video, see `rewards.scopes`; it keeps its other attributes. Raises as `checked_frames`."""

    def __init__(self, reward: Any, frames: Frames) -> None:
        self._reward, self.frames = reward, checked_frames(frames)
        self.__module__ = getattr(reward, "__module__", "")  # the module of the wrapped reward
        self.__signature__ = signature(reward)

    def __call__(self, *inputs: Any, **metadata: Any) -> Any:
        return self._reward(*inputs, **metadata)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._reward, name)


def scope_of(reward: Any) -> str:
    """`image`, `group` or `pair`. FlowGRPOError if the reward's attribute `scope` is another text."""
    scope = getattr(reward, "scope", IMAGE)
    if not isinstance(scope, str):  # something else of an object by that name
        return IMAGE
    if scope not in SCOPES:
        raise FlowGRPOError(f"scope={scope} of {_named(reward)} is none of {', '.join(SCOPES)}: set one of them.")
    return scope


def _named(reward: Any) -> str:
    return f"the reward {getattr(reward, '__name__', type(reward).__name__)}"


def opponents_of(reward: Any) -> int | None:
    """With how many others of its group an image is compared; None with all. FlowGRPOError if the attribute is no number from 1."""
    opponents = getattr(reward, "opponents", None)
    if opponents is None or (isinstance(opponents, int) and not isinstance(opponents, bool) and opponents > 0):
        return opponents
    raise FlowGRPOError(
        f"opponents={opponents} of {_named(reward)} is no number from 1: set one, or leave it out to compare all pairs."
    )


def with_attributes_of(reward: Any, call: Any) -> Any:
    """The function `call`, which calls the reward, with the reward's attributes, among them whose code it is."""
    call.__module__, call.__name__ = getattr(reward, "__module__", ""), getattr(reward, "__name__", type(reward).__name__)
    for name in ATTRIBUTES:
        if hasattr(reward, name):
            setattr(call, name, getattr(reward, name))
    return call


def rows_by_group(group: Sequence[Hashable]) -> list[list[int]]:
    """The rows of each group, in the order of their first rows."""
    rows: dict[Hashable, list[int]] = {}
    for row, number in enumerate(group):
        rows.setdefault(number, []).append(row)
    return list(rows.values())


def pairs_of(rows: list[int], opponents: int | None = None) -> list[tuple[int, int]]:
    """The pairs of a group's rows that are compared: all, or enough for each image to be compared with about `opponents` others.

    With `opponents`, image i meets i + 1, i + 2, ... around a ring, and so those before it: all images meet equally many, an even
    number of at least `opponents`. Nothing is random here: the images of a group are independent samples, so their order is random already.
    """
    size = len(rows)
    shifts = size if opponents is None else -(-opponents // 2)
    if 2 * shifts >= size - 1:
        return [(rows[i], rows[j]) for i in range(size) for j in range(i + 1, size)]
    return [(rows[i], rows[(i + shift) % size]) for shift in range(1, shifts + 1) for i in range(size)]


def win_rates(size: int, pairs: list[tuple[int, int]], first_wins: Tensor) -> Tensor:
    """Values (size,) in [0, 1] of images: the share of its opponents that each beats; a tie, 0.5, is half a win.

    Args:
        first_wins: (n,) of the pairs; a probability counts as such, so that the value is the expected share.
    """
    rows = torch.tensor(pairs)
    wins = torch.zeros(size).index_add(0, rows[:, 0], first_wins).index_add(0, rows[:, 1], 1 - first_wins)
    return wins / torch.bincount(rows.flatten(), minlength=size)


def signature(reward: Any) -> inspect.Signature:
    """The signature of a reward; of a module without a `__call__` of its own, that of its `forward`. FlowGRPOError if it has none."""
    is_plain_module = isinstance(reward, torch.nn.Module) and type(reward).__call__ is torch.nn.Module.__call__
    try:
        return inspect.signature(reward.forward if is_plain_module else reward)
    except ValueError as error:  # of a function written in C
        raise FlowGRPOError(f"{reward} does not say what it takes: wrap it in a function(images, prompts).") from error


def is_video(images: Tensor) -> bool:
    """Whether these are videos (B, F, 3, H, W), not images (B, 3, H, W)."""
    return images.ndim == 5


def frames_of(reward: Any) -> Frames:
    """The frames that a reward sees: its attribute `frames`, else 4. FlowGRPOError if that is no such choice."""
    frames = getattr(reward, "frames", DEFAULT_FRAMES)
    # an object may have something else by that name
    is_choice = isinstance(frames, int | str) and not isinstance(frames, bool)
    return checked_frames(frames, _named(reward)) if is_choice else DEFAULT_FRAMES


def checked_frames(frames: Any, reward: str = "a reward") -> Frames:
    """The choice itself. FlowGRPOError, which names the reward, if there is no such choice."""
    if frames in (FIRST, LAST, ALL) or (isinstance(frames, int) and not isinstance(frames, bool) and frames > 0):
        return frames
    raise FlowGRPOError(f"frames={frames} of {reward} is neither a number from 1 nor first, last or all: set one of them.")


def check_sendable(name: str, frames: Frames) -> None:
    """Check the frames of a reward that runs in another process. FlowGRPOError for frames=all: only images can be sent."""
    if frames == ALL:
        raise FlowGRPOError(f"reward {name}: frames=all is for a reward in this process: leave remote and isolate out.")


def frame_indices(frames: Frames, count: int) -> list[int]:
    """The indices of the frames, of `count`, that a reward of images sees."""
    if frames in (FIRST, LAST):
        return [0 if frames == FIRST else count - 1]
    assert isinstance(frames, int)
    return evenly_spaced(frames, count)


def evenly_spaced(number: int, count: int) -> list[int]:
    """At most `number` of `count` indices, evenly spaced, with the first and the last; a single one is in the middle."""
    if number >= count:
        return list(range(count))
    return [round(i * (count - 1) / (number - 1)) for i in range(number)] if number > 1 else [(count - 1) // 2]
