"""The call of one reward: what it is given, copied so that nobody else sees what it changes, and what it may return.

A reward returns one number for each image, as a tensor, an array, a list or a generator of numbers. Also (numbers, details), of which the
details are left out, and a coroutine of any of these, which is awaited.
"""

import asyncio
import dataclasses
import functools
import inspect
import math
import os
import threading
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards import scopes
from flow_grpo.rewards.images import SOURCE, SOURCES, first_sources, has_sources
from flow_grpo.rewards.scopes import ALL, frame_indices, frames_of, is_video, signature
from flow_grpo.rewards.threads import in_thread
from flow_grpo.rewards.user_code import UserCodeError, guarded, one_sentence

ROWS = "metadata"  # a parameter that gets the metadata as one dict for each image
TEXTS = ("prompt", "prompts", "completion", "completions")
FORMS = {2: "(images, prompts, **metadata)", 3: "(first, second, prompts, **metadata)"}  # by the number of inputs
MAX_PROMPT_LENGTH = 200  # characters of a prompt in an error
HIDDEN = (ROWS, SOURCE, SOURCES, "rewards")  # metadata that no column of a prompt file has by these names
LARGEST = 1e15  # of a value: squares and sums of larger ones leave float32
_turn = threading.Lock()  # held by the thread that runs the loop of `_loop`
Given = TypeVar("Given")


class Reward(Protocol):
    """A callable that scores images: values (B,), larger is better. `rewards.calls` has the other shapes of an answer."""

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: Any) -> Any: ...


def score(
    name: str,
    reward: Reward,
    images: Tensor,
    prompts: list[str],
    group: Sequence[int] | None = None,
    /,
    **metadata: Any,
) -> Tensor:
    """Call a reward and check its values; returns (B,) float32 on the CPU.

    Args:
        group: which group each image belongs to, for a reward that sees several images; by default images of one prompt are a group.

    Raises:
        FlowGRPOError: the reward raised, or returned NaN, infinity or the wrong shape, or sees several images and a group has one. The
            message names the reward and the prompt.
    """
    values = call_reward(name, reward, images, prompts, metadata, group=group)
    check_finite(name, values, prompts)
    return values


def check_finite(name: str, values: Tensor, prompts: list[str]) -> None:
    for value, prompt in zip(values.tolist(), prompts, strict=True):
        if not math.isfinite(value):
            shown = prompt[:MAX_PROMPT_LENGTH]
            raise FlowGRPOError(f"reward {name} returned {value} for the prompt {shown!r}; every reward must be finite.")


def call_reward(
    name: str,
    reward: Reward,
    images: Tensor,
    prompts: list[str],
    metadata: dict[str, Any],
    *,
    group: Sequence[int] | None = None,
    graph: bool = False,
) -> Tensor:
    """Call a reward as `score` does, but allow values that are not finite. A reward of the user gets copies of its inputs.

    Args:
        graph: of a differentiable reward: keep the graph that leads to the images.
    """
    if not prompts:
        return images.flatten(1).sum(1).cpu()  # no values, with the graph that `graph` asks for
    frames = frames_of(reward)
    if is_video(images) and frames != ALL:
        indices = frame_indices(frames, images.shape[1])
        by_frame = [call_reward(name, reward, images[:, i], prompts, metadata, group=group, graph=graph) for i in indices]
        return torch.stack(by_frame).mean(0)
    if frames == ALL and not is_video(images):
        raise FlowGRPOError(f"reward {name} sees whole videos (B, F, 3, H, W), and these are images: leave it out.")
    batch = RewardInputs(images, prompts, metadata)
    scope = scopes.scope_of(reward)
    if scope == scopes.IMAGE:
        return _call(name, reward, batch, graph)
    members = scopes.rows_by_group(prompts if group is None else group)
    single = next((rows[0] for rows in members if len(rows) < 2), None)
    if single is not None:
        raise FlowGRPOError(
            f"reward {name} sees the images of a prompt together, but there is one of {prompts[single][:MAX_PROMPT_LENGTH]!r}: "
            "give it two or more."
        )
    if hasattr(reward, "score_groups"):  # it scores several groups in one call
        group_of_row = {row: i for i, rows in enumerate(members) for row in rows}
        return _call(name, partial(reward.score_groups, [group_of_row[row] for row in range(len(prompts))]), batch)
    if scope == scopes.PAIR:
        opponents = scopes.opponents_of(reward)
        pairs = [pair for rows in members for pair in scopes.pairs_of(rows, opponents)]
        return scopes.win_rates(len(prompts), pairs, _first_wins(name, reward, batch, pairs))
    values = torch.empty(len(prompts))
    for rows in members:
        values[rows] = _call(name, reward, batch.take(rows))
    return values


@dataclass(frozen=True)
class RewardInputs:
    """The inputs of a reward call: B images, or B pairs of images, of which these are the first."""

    images: Tensor
    prompts: list[str]
    metadata: dict[str, list]
    second: Tensor | None = None
    group: Sequence[int] | None = None

    def take(self, rows: list[int]) -> "RewardInputs":
        metadata = {key: [column[i] for i in rows] for key, column in self.metadata.items()}
        second = None if self.second is None else self.second[rows]
        group = None if self.group is None else [self.group[i] for i in rows]
        return RewardInputs(self.images[rows], [self.prompts[i] for i in rows], metadata, second, group)

    def keywords(self, reward: Reward, inputs: int) -> dict[str, Any]:
        """The metadata that the reward takes after its first `inputs` arguments, with `source` where prompts have images.

        A parameter `metadata` gets the columns as one dict for each image, as in flow_grpo, unless a column has that name.
        Where some prompts have none, a reward that names `source` cannot be called; one that takes any metadata goes without it.
        """
        named = SOURCE in scopes.signature(reward).parameters
        shows_sources = has_sources(self.metadata) and (named or all(self.metadata[SOURCES]))
        columns = {**self.metadata, SOURCE: None} if shows_sources else self.metadata
        keywords = dict(accepted_metadata(reward, columns, inputs))
        if shows_sources and SOURCE in keywords:
            keywords[SOURCE] = first_sources(self.metadata[SOURCES], self.images)
        if takes_rows(reward) and ROWS not in self.metadata:
            keywords[ROWS] = [{key: column[i] for key, column in self.metadata.items()} for i in range(len(self.prompts))]
        return keywords

    def pairs(self, first: list[int], second: list[int]) -> "RewardInputs":
        """Pairs of these images by their rows."""
        return replace(self.take(first), second=self.images[second])

    def with_second(self) -> "RewardInputs":
        """The 2 B images, each first one followed by its second one, as a group."""
        assert self.second is not None
        rows = [i for i in range(len(self.prompts)) for _ in range(2)]
        both = torch.stack([self.images, self.second.to(self.images)], 1).flatten(0, 1)
        return replace(self.take(rows), images=both, second=None, group=rows)


def _first_wins(name: str, reward: Reward, batch: RewardInputs, pairs: list[tuple[int, int]]) -> Tensor:
    """The probability (n,) that the first image of each pair of rows beats the second, the mean of asking in both orders.

    A preference for one of the two positions then cancels. A reward with `symmetric = True`, which has none, is asked once.
    """
    parts = []
    for start in range(0, len(pairs), scopes.PAIRS_PER_CALL):
        part = pairs[start : start + scopes.PAIRS_PER_CALL]
        first, second = [i for i, _ in part], [j for _, j in part]
        wins = _checked_probabilities(name, _call(name, reward, batch.pairs(first, second)))
        if not getattr(reward, "symmetric", False):
            wins = (wins + 1 - _checked_probabilities(name, _call(name, reward, batch.pairs(second, first)))) / 2
        parts.append(wins)
    return torch.cat(parts)


def _checked_probabilities(name: str, values: Tensor) -> Tensor:
    invalid = values[(values < 0) | (values > 1)]
    if len(invalid):
        raise FlowGRPOError(
            f"reward {name} returned {invalid[0].item():g} for a pair of images; it must return the probability, 0 to 1, that the "
            "first wins."
        )
    return values


def _call(name: str, reward: Any, batch: RewardInputs, graph: bool = False) -> Tensor:
    """The values (B,) of one call. FlowGRPOError if it raised, returned another shape, or can't be called so."""
    prompts = batch.prompts
    kind = "images" if batch.second is None else "pairs of images"
    on = f"on {len(prompts)} {kind}" + (f", the first for the prompt {prompts[0][:MAX_PROMPT_LENGTH]!r}" if prompts else "")
    inputs: list[Any] = [batch.images, prompts] if batch.second is None else [batch.images, batch.second, prompts]
    check_inputs(name, reward, len(inputs))
    keywords = batch.keywords(reward, len(inputs))
    check_metadata(name, reward, {*batch.metadata, *keywords}, len(inputs))
    if not is_ours(reward):
        inputs, keywords = copied((inputs, keywords))
    guard = one_sentence if is_concurrent(reward) else partial(guarded, f"reward {name}")
    try:
        with guard(lambda error: f"reward {name} raised {error} {on}"), torch.set_grad_enabled(graph):
            returned = finished(reward(*inputs, **keywords), graph)
    except UserCodeError as error:
        if hint := _hint(error, keywords):
            raise UserCodeError(f"{error}; {hint}.") from error.__cause__
        raise
    return as_values(name, returned, len(prompts), kind)


def _hint(error: UserCodeError, keywords: dict[str, Any]) -> str:
    """What is often the cause of such an error of a reward; "" if nothing is known."""
    text = str(error)  # the cause's own text may fail
    if isinstance(error.__cause__, AttributeError) and "'Tensor' object" in text:
        return "images are a tensor: decorate it with flow_grpo.rewards.takes_pil if it takes PIL images"
    if isinstance(error.__cause__, RuntimeError) and "on Tensor that requires grad" in text:
        return "its gradient is asked for, so that torch alone must compute it, without NumPy and PIL"
    empty = [
        key
        for key, column in keywords.items()
        if key not in HIDDEN and isinstance(column, list) and any(value is None for value in column)
    ]
    return f"some prompts have no {' and no '.join(empty)}, which is None" if empty and "None" in text else ""


def accepted_metadata(reward: Any, metadata: dict[str, Any], inputs: int) -> dict[str, Any]:
    """The metadata that the reward's signature names after its first `inputs` parameters; all of it if the signature has **kwargs."""
    parameters = signature(reward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return metadata
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:inputs]
    named = {p.name for p in parameters} - set(positional)
    return {key: value for key, value in metadata.items() if key in named}


def named_columns(reward: Any) -> list[str] | None:
    """The metadata that a reward may be given, by its parameters; None for any."""
    parameters = signature(reward).parameters.values()
    takes_any = takes_rows(reward) or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else [p.name for p in parameters]


def takes_rows(reward: Any) -> bool:
    """Whether a reward has a parameter `metadata` (not **metadata), as those of flow_grpo and ddpo-pytorch."""
    parameter = signature(reward).parameters.get(ROWS)
    return parameter is not None and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def check_inputs(name: str, reward: Any, inputs: int = 2) -> None:
    """Check that a reward can be called with images and prompts. FlowGRPOError with the parameters that it has."""
    takes = signature(reward)
    must = f"reward {name} takes {takes}, but it must take {FORMS[inputs]}"
    try:
        takes.bind_partial(*range(inputs))
    except TypeError:
        raise FlowGRPOError(f"{must}.") from None
    if next(iter(takes.parameters)) in TEXTS:
        raise FlowGRPOError(f"{must}: images come first, then prompts.")


def check_signature(name: str, reward: Any, columns: Collection[str]) -> None:
    """Check that a reward can be called for prompts with these columns of metadata. FlowGRPOError if not."""
    if hasattr(reward, "score_groups"):
        return  # it runs in another process, which checks
    inputs = 3 if scopes.scope_of(reward) == scopes.PAIR else 2
    check_inputs(name, reward, inputs)
    check_metadata(name, reward, {*columns, ROWS} if takes_rows(reward) else columns, inputs)


def check_metadata(name: str, reward: Any, metadata: Collection[str], inputs: int) -> None:
    """Check that the prompts have all columns that the reward needs. FlowGRPOError with the first one that is missing."""
    positional = signature(reward).bind_partial(*range(inputs)).arguments
    parameters = signature(reward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = next((p.name for p in needed if p.name not in positional and p.name not in metadata), None)
    if missing is not None:
        others = sorted(column for column in metadata if column not in HIDDEN)
        known = f" (they have {', '.join(others)})" if others else ""
        raise FlowGRPOError(
            f"reward {name} needs {missing}, but the prompts have no column {missing}{known}: give a file of prompts with this "
            "column, or a value among the reward's options."
        )


def finished(returned: Any, graph: bool = False) -> Any:
    """Wait for a coroutine, read a generator, and bring a tensor to the CPU: what still runs the user's code.

    Args:
        graph: keep a tensor's graph.
    """
    if inspect.isawaitable(returned):
        returned = _awaited(returned)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = returned[0]  # (scores, details), as in flow_grpo
    if isinstance(returned, Iterator):
        returned = list(returned)
    if isinstance(returned, Tensor):
        returned = (returned if graph else returned.detach()).cpu()
    elif hasattr(returned, "__array__"):
        returned = np.array(returned)  # of a column of a data frame, and of a reversed array, which torch does not read
    return returned


def as_values(name: str, returned: Any, count: int, kind: str) -> Tensor:
    """The values (count,) float32 in what a reward returned, as `finished` has left it.

    Args:
        kind: "images" or "pairs of images".

    Raises:
        FlowGRPOError: it is not one number for each image, or one is too large.
    """
    must = f"for {count} {kind}; it must return one number each"
    if returned is None:
        raise FlowGRPOError(f"reward {name} returned None {must}: is a `return` missing?")
    if isinstance(returned, Mapping):
        what = f"a dict with {', '.join(map(str, returned))}"[:200]
        raise FlowGRPOError(f"reward {name} returned {what} {must}: return one of its entries.")
    if isinstance(returned, list | tuple) and any(isinstance(value, str) for value in returned):
        raise FlowGRPOError(f"reward {name} returned a {type(returned).__name__} of str {must}: return numbers.")
    try:
        is_of_objects = isinstance(returned, np.ndarray) and returned.dtype == object  # such as Decimal
        numbers = returned.tolist() if is_of_objects else returned
        if isinstance(numbers, Tensor | np.ndarray) and torch.as_tensor(numbers).is_complex():
            raise TypeError("they are complex; return their abs() or real")
        values = torch.as_tensor(numbers, dtype=torch.float64)
        values = values if values.layout is torch.strided else values.to_dense()
    except Exception as error:  # the object's own conversion may raise anything
        what, reason = f"a {type(returned).__name__} that can't be read as numbers", " ".join(str(error).split()).rstrip(".")
        raise FlowGRPOError(f"reward {name} returned {what} {must}: {reason}.") from error
    if values.shape != (count,):
        over_all = values.shape == () and kind == "images"
        hint = (
            ": it is called once with all images of a batch, so average over the pixels, as images.mean((1, 2, 3)) does, and not over "
            "the batch"
        )
        hint = hint if over_all else ""
        raise FlowGRPOError(f"reward {name} returned shape {tuple(values.shape)} {must}{hint}.")
    large = values[values.isfinite() & (values.abs() > LARGEST)]
    if len(large):
        limit = f"values beyond {LARGEST:g} can't be compared in float32"
        raise FlowGRPOError(f"reward {name} returned {large[0].item():g}, and {limit}: scale them.")
    return values.float()


def _awaited(awaitable: Awaitable) -> Any:
    """Run it in one event loop for all calls, whichever thread makes them, so that a client can be kept between calls.

    It gets a loop of its own where that one is running: a reward may call another one, and a call in a thread may hang.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not _turn.acquire(blocking=False):
            return asyncio.run(_wait(awaitable))
        try:
            return _loop(os.getpid()).run_until_complete(awaitable)
        finally:
            _turn.release()
    return in_thread(functools.partial(_awaited, awaitable)).result()  # a notebook's cell: its thread runs a loop already


async def _wait(awaitable: Awaitable) -> Any:
    return await awaitable


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process; a forked process needs its own."""
    return asyncio.new_event_loop()


def copied(given: Given) -> Given:
    """A copy in which tensors, arrays, images, lists, dicts and dataclasses can be changed; gradients pass through it.

    Other objects are shared. An object that occurs twice is copied once, as the source image of a group's rows.
    """
    return _copied(given, {})


def is_ours(code: Any) -> bool:
    """Whether a reward is of this package, whose rewards leave their inputs unchanged, so that they need no copy."""
    code = code.func if isinstance(code, functools.partial) else code
    return (getattr(code, "__module__", None) or "").startswith("flow_grpo.rewards.")


def is_concurrent(reward: Any) -> bool:
    """Whether several threads may call a reward, or its method, at a time: it only asks other machines."""
    method = reward.func if isinstance(reward, functools.partial) else reward
    return getattr(getattr(method, "__self__", method), "concurrent", False) is True


def _copied(given: Any, known: dict[int, Any]) -> Any:
    if id(given) not in known:
        known[id(given)] = _new(given, known)
    return known[id(given)]


def _new(given: Any, known: dict[int, Any]) -> Any:
    if isinstance(given, Tensor):
        return given.clone()
    if isinstance(given, np.ndarray | Image.Image):
        return given.copy()
    if type(given) is dict:
        return {key: _copied(value, known) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_copied(value, known) for value in given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        fields = [field.name for field in dataclasses.fields(given) if field.init]
        return dataclasses.replace(given, **{name: _copied(getattr(given, name), known) for name in fields})
    return given
