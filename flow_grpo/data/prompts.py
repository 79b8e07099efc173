"""Prompt sets, mixtures of several, each with rewards of its own, and the sampling of P prompts x G images for each training step."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import prompt_key
from flow_grpo.sampling import generator
from flow_grpo.text import counted
from flow_grpo.types import PromptBatch

SET_COLUMN = "prompt_set"  # metadata of each prompt of several sets: the name of its set
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in its default repr


@dataclass(frozen=True)
class PromptSet:
    """Prompts, each with a dict of metadata that rewards receive as keyword arguments.

    Attributes:
        prompts: N texts, or `ImagePrompt`s with images.
        metadata: N dicts with names of columns as keys.
        notes: sentences for the user on how they were read.

    Raises:
        FlowGRPOError: there are more prompts than dicts or fewer.
    """

    prompts: list[str]
    metadata: list[dict]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.metadata):
            numbers = f"{counted(len(self.prompts), 'prompt')} and {len(self.metadata)} dicts of metadata"
            raise FlowGRPOError(f"a PromptSet has {numbers}: give one for each prompt.")

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the prompts in their order, their metadata and the contents of their images."""
        digest = hashlib.sha256()
        for prompt, row in zip(self.prompts, self.metadata, strict=True):
            digest.update(json.dumps([prompt_key(prompt), row], sort_keys=True, default=_as_text).encode())
        return digest.hexdigest()

    def head(self, count: int | None) -> "PromptSet":
        """The first `count` prompts; all if None."""
        return PromptSet(self.prompts[:count], self.metadata[:count], self.notes)

    def repeat(self, images: int) -> PromptBatch:
        """All prompts with `images` images each."""
        return self.take(range(len(self)), images)

    def take(self, chosen: Sequence[int], images: int) -> PromptBatch:
        """The prompts at these indices with `images` images each."""
        rows = [i for i in chosen for _ in range(images)]
        return PromptBatch(
            [self.prompts[i] for i in rows],
            [self.metadata[i] for i in rows],
            torch.arange(len(rows)) // images,
            torch.arange(len(rows)) % images,
        )


def _as_text(value: object) -> str:
    """A text for a value that JSON can't hold, the same in every process: without the address of an object."""
    content = hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else ADDRESS.sub("", repr(value))
    return f"{type(value).__name__} {content}"


def json_value(value: object) -> str | None:
    """A value of metadata that JSON has no form for, such as a date: its text; None for bytes. For `json.dumps(default=...)`."""
    return None if isinstance(value, bytes) else str(value)


class PromptSampler:
    """Samples the prompts of training steps: shuffled epochs.

    Every epoch is a permutation drawn from (seed, epoch); prompts that don't fill a last step are left out of it.
    """

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self.epoch, self.position = 0, 0  # the position of the next prompt in the epoch's order

    def sample(self, step: int, prompts: int, images: int) -> PromptBatch:
        """Sample `prompts` different prompts with `images` images each."""
        return self.prompts.take(self.sample_indices(prompts), images)

    def sample_indices(self, prompts: int) -> list[int]:
        """The indices of `prompts` different prompts."""
        if prompts > len(self.prompts):
            raise FlowGRPOError(f"prompts_per_step={prompts}, but there are only {counted(len(self.prompts), 'prompt')}.")
        if self.position + prompts > len(self.prompts):
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(len(self.prompts), generator=generator(self.seed, "prompts", self.epoch)).tolist()
        first, self.position = self.position, self.position + prompts
        return order[first : self.position]

    def state_dict(self) -> dict:
        """Where the sampler is, for a checkpoint."""
        return {"epoch": self.epoch, "place": self.position}  # keys as in checkpoints of flow-grpo 0.3

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.epoch, self.position = state["epoch"], state["place"]


def rows_by_set(metadata: Sequence[dict]) -> dict[str, Tensor]:
    """The rows (B,) bool of each prompt set, in alphabetical order; empty if the prompts are of one set."""
    names = [row.get(SET_COLUMN) for row in metadata]
    return {
        name: torch.tensor([set_name == name for set_name in names]) for name in sorted({name for name in names if name})
    }


Prompts = PromptSet | str | Path | Iterable[Any]  # as given: a set, the name of one, or texts or dicts in memory


@dataclass(frozen=True)
class PromptMixture(PromptSet):
    """All prompts of several sets, one set after another."""

    names: tuple[str, ...] = ()
    parts: tuple[PromptSet, ...] = ()
    weights: tuple[float, ...] = ()

    def head(self, count: int | None) -> "PromptMixture":
        """The first `count` prompts of each set; all if None."""
        return join_sets(self.names, [part.head(count) for part in self.parts], self.weights)


def join_sets(names: Sequence[str], parts: Sequence[PromptSet], weights: Sequence[float]) -> PromptMixture:
    """Several prompt sets as one mixture."""
    prompts, metadata = [p for part in parts for p in part.prompts], [m for part in parts for m in part.metadata]
    notes = tuple(note for part in parts for note in part.notes)
    return PromptMixture(prompts, metadata, notes, names=tuple(names), parts=tuple(parts), weights=tuple(weights))


class MixedPromptSampler(PromptSampler):
    """Samples the prompts of training steps from several sets: each prompt's set is drawn by weight from (seed, step).

    Within a set, the prompts are those of a `PromptSampler`. Its arguments and methods are those of a `PromptSampler`.

    Raises:
        FlowGRPOError: on sampling more prompts at once than a set has.
    """

    def __init__(self, prompts: PromptMixture, seed: int) -> None:
        super().__init__(prompts, seed)
        self.names, self.parts, self.weights = prompts.names, prompts.parts, prompts.weights
        self.samplers = [PromptSampler(part, seed) for part in prompts.parts]
        self.starts = [0, *itertools.accumulate(len(part) for part in prompts.parts)]

    def sample(self, step: int, prompts: int, images: int) -> PromptBatch:
        """`prompts` different prompts with `images` images each."""
        for name, part in zip(self.names, self.parts, strict=True):
            if prompts > len(part):
                raise FlowGRPOError(
                    f"prompts_per_step={prompts}, but the prompt set {name} has {len(part)}, and all of a step may be drawn from it: "
                    "give it more prompts, or set a smaller prompts_per_step."
                )
        # 0: as in 0.4, so that its runs go on to the same prompts
        draws = torch.rand(prompts, generator=generator(self.seed, "prompt set", step, 0), dtype=torch.float64)
        bounds = torch.tensor(self.weights, dtype=torch.float64).cumsum(0)
        chosen = torch.bucketize(draws * bounds[-1], bounds, right=True).tolist()
        indices = {
            number: iter(self.samplers[number].sample_indices(chosen.count(number))) for number in sorted(set(chosen))
        }
        return self.prompts.take([self.starts[number] + next(indices[number]) for number in chosen], images)

    def state_dict(self) -> dict:
        return {name: sampler.state_dict() for name, sampler in zip(self.names, self.samplers, strict=True)}

    def load_state_dict(self, state: dict) -> None:
        for name, sampler in zip(self.names, self.samplers, strict=True):
            sampler.load_state_dict(state[name])


def sampler_of(prompts: PromptSet, seed: int) -> PromptSampler:
    """A sampler of the prompts of training steps, or of several sets of them."""
    if isinstance(prompts, PromptMixture):
        return MixedPromptSampler(prompts, seed)
    return PromptSampler(prompts, seed)
