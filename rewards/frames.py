"""Rewards of videos: the frames of a video that a reward sees.

A reward of images gets one frame of each video at a time, and its value is the mean over the frames. Its attribute `frames` says which
ones; `rewards.load(name, frames=...)` sets it from outside.

    4:       four frames, evenly spaced from the first to the last; any number. This is the default; 1 is the frame in the middle.
    "first": the first frame.
    "last":  the last frame.
    "all":   whole videos (B, F, 3, H, W) in one call.
"""

from typing import Any, Literal

from torch import Tensor

from flow_grpo.errors import FlowGRPOError

Frames = int | Literal["first", "last", "all"]
FIRST, LAST, ALL = "first", "last", "all"
DEFAULT_FRAMES = 4


def is_video(images: Tensor) -> bool:
    """Whether these are videos (B, F, 3, H, W), not images (B, 3, H, W)."""
    return images.ndim == 5


def frames_of(reward: Any) -> Frames:
    """The frames that a reward sees: its attribute `frames`, else 4. FlowGRPOError if that is no such choice."""
    frames = getattr(reward, "frames", DEFAULT_FRAMES)
    # an object may have something else by that name
    return checked_frames(frames) if isinstance(frames, int | str) and not isinstance(frames, bool) else DEFAULT_FRAMES


def checked_frames(frames: Any) -> Frames:
    """The choice itself. FlowGRPOError if there is no such choice."""
    if frames in (FIRST, LAST, ALL) or (isinstance(frames, int) and not isinstance(frames, bool) and frames > 0):
        return frames
    raise FlowGRPOError(f"frames={frames} of a reward is neither a number from 1 nor first, last or all: set one of them.")


def check_sendable(name: str, frames: Frames) -> None:
    """Check the frames of a reward that runs in another process. ValueError for frames=all: only images can be sent."""
    if frames == ALL:
        raise FlowGRPOError(f"reward {name}: frames=all is for a reward in this process: leave remote and isolate out.")


def frame_indices(frames: Frames, count: int) -> list[int]:
    """Which of `count` frames a reward of images sees."""
    if frames in (FIRST, LAST):
        return [0 if frames == FIRST else count - 1]
    assert isinstance(frames, int)
    return evenly_spaced(frames, count)


def evenly_spaced(number: int, count: int) -> list[int]:
    """At most `number` of `count` indices, evenly spaced, with the first and the last; a single one is in the middle."""
    if number >= count:
        return list(range(count))
    return [round(i * (count - 1) / (number - 1)) for i in range(number)] if number > 1 else [(count - 1) // 2]
