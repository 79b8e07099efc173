"""Prompt sets, mixtures of several, each with rewards of its own, and the sampling of P prompts x G images for each training step."""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_grpo.config.sections import PromptSetConfig
from flow_grpo.data.prompt_files import COLUMNS, DERIVED, IMAGE_COLUMN, Table, prompt_columns, read_images
from flow_grpo.data.prompt_sources import FILE_NAME, read_items, read_source
from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import SourceImage, prompt_key, with_images
from flow_grpo.rewards.scoring import REWARDS_COLUMN
from flow_grpo.sampling import generator
from flow_grpo.text import visible
from flow_grpo.types import PromptBatch

SET_COLUMN = "prompt_set"  # metadata of each prompt of several sets: the name of its set
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in its default repr
RESERVED_COLUMNS = ("images", "prompts")  # arguments of rewards that are not metadata


@dataclass(frozen=True)
class PromptSet:
    """Prompts, each with a dict of metadata that rewards receive as keyword arguments.

    Attributes:
        prompts: N texts, or `ImagePrompt`s with images.
        metadata: N dicts with names of columns as keys.
        notes: sentences for the user on how they were read.
    """

    prompts: list[str]
    metadata: list[dict]
    notes: tuple[str, ...] = field(default=(), compare=False)

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
            raise FlowGRPOError(f"prompts_per_step={prompts}, but there are only {len(self.prompts)} prompts.")
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


def load_prompts(source: Prompts, image_column: str = IMAGE_COLUMN) -> PromptSet:
    """Load prompts from a file, a folder, an address, a hub data set or a known name, or from texts or dicts in memory.

    A name is one of flow_grpo/data/prompt_sources.py, a .txt file (one prompt per line), a .json, .jsonl, .csv, .tsv or .parquet file, the
    https address of such a file, a folder, or a hub data set. Objects are a `PromptSet` (returned as it is), and a list, generator,
    `datasets.Dataset` or another iterable of texts, or of dicts by column.

    Tables have a column `prompt`, Prompt or prompts, or a single one of `prompt_files.OTHER_COLUMNS`; other columns become metadata. No
    row is skipped. The column `image` has the images of a prompt: a path or several, relative to the file. A folder has a
    metadata.jsonl or .csv, whose column file_name has the images, or .txt files with a prompt each. A text of another column than
    `prompt` describes its image: that is not an image to be edited, and is left out.

    Args:
        image_column: the column of the prompts' images; `image` has another meaning in tables of given images.

    Raises:
        FlowGRPOError: there is no such file or data set, or it has no prompts, no column for them, or a value that is no prompt or image.
    """
    if isinstance(source, PromptSet):
        return source
    if isinstance(source, str | Path):
        return _prompts_of(read_source(str(source)), str(source), image_column)
    return _prompts_of(read_items(source), "the given data set", image_column)


def _prompts_of(table: Table, name: str, image_column: str) -> PromptSet:
    """The prompts of a table, with their images and metadata."""
    column, image_column = _prompt_column(table, name), table.image_column or image_column
    is_caption = column.lower() not in COLUMNS  # of the image beside it
    has_images = image_column in table.columns and not is_caption
    reserved = {*RESERVED_COLUMNS, *(DERIVED if has_images else ())} - {column, image_column}
    _check_columns(table.columns, reserved, name)
    images: list[tuple[SourceImage, ...]] = [()] * len(table.rows)
    if has_images:
        images = read_images([row[image_column] for row in table.rows], table, name, image_column)
    texts = [row[column] for row in table.rows]
    invalid = next((i for i, text in enumerate(texts) if not _is_prompt(text)), None)
    if invalid is not None:
        raise FlowGRPOError(
            f"{name}, {table.locations[invalid]}: {repr(texts[invalid])[:80]} is not a prompt: every prompt must be a text that is not "
            "empty."
        )
    dropped = {column, image_column} - ({FILE_NAME} if is_caption else set())
    metadata = [{key: value for key, value in row.items() if key not in dropped} for row in table.rows]
    notes = []
    if is_caption:
        without = ", without the images that it describes" if image_column in table.columns else ""
        notes.append(f"{name}: the column `{visible(column)}` is taken as the prompt{without}.")
    prompts = [with_images(text, sources) for text, sources in zip(texts, images, strict=True)]
    return PromptSet(prompts, metadata, tuple(notes))


def _check_columns(columns: Iterable[str], reserved: Collection[str], name: str) -> None:
    """FlowGRPOError if one of the columns has a reserved name."""
    clash = next((column for column in columns if column in reserved), None)
    if clash is not None:
        raise FlowGRPOError(
            f"{name} has a column `{clash}`, a name that is reserved in calls of rewards: give it another name."
        )


def _prompt_column(table: Table, name: str) -> str:
    """The column of the prompts. FlowGRPOError if there are no rows, or if there is no such column, or more than one."""
    columns = prompt_columns(table.columns)
    if not table.columns or (columns and not table.rows):
        raise FlowGRPOError(f"{name} holds no prompts.")
    if not columns:
        raise FlowGRPOError(f"{name} has no column `prompt`; it has {visible(', '.join(table.columns))[:200]}.")
    if len(columns) > 1:
        several = " and ".join(f"`{column}`" for column in columns[:4])
        raise FlowGRPOError(f"{name} has no column `prompt`, but {several}: rename the one with the prompts to `prompt`.")
    return columns[0]


def _is_prompt(value: object) -> bool:
    """Whether it is a text that isn't blank and can be encoded: it has no half of a surrogate pair."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= letter <= "\udfff" for letter in value)


@dataclass(frozen=True)
class PromptMixture(PromptSet):
    """All prompts of several sets, one set after another."""

    names: tuple[str, ...] = ()
    parts: tuple[PromptSet, ...] = ()
    weights: tuple[float, ...] = ()

    def head(self, count: int | None) -> "PromptMixture":
        """The first `count` prompts of each set; all if None."""
        return join_sets(self.names, [part.head(count) for part in self.parts], self.weights)


def load_run_prompts(source: Any) -> PromptSet:
    """Load prompts as `load_prompts` does, or the mixture of a list of `PromptSetConfig`.

    Raises:
        FlowGRPOError: as `load_prompts`, or the prompts have a column `prompt_set` or `rewards`.
    """
    if isinstance(source, PromptMixture):
        return source
    if not (isinstance(source, list) and source and all(isinstance(entry, PromptSetConfig) for entry in source)):
        return _without_reserved(load_prompts(source), "the PromptSet" if isinstance(source, PromptSet) else str(source))
    labels, weights = [config.label for config in source], [config.weight for config in source]
    return join_sets(labels, [_load_set(config) for config in source], weights)


def join_sets(names: Sequence[str], parts: Sequence[PromptSet], weights: Sequence[float]) -> PromptMixture:
    """Several prompt sets as one mixture."""
    prompts, metadata = [p for part in parts for p in part.prompts], [m for part in parts for m in part.metadata]
    notes = tuple(note for part in parts for note in part.notes)
    return PromptMixture(prompts, metadata, notes, names=tuple(names), parts=tuple(parts), weights=tuple(weights))


def _load_set(config: PromptSetConfig) -> PromptSet:
    """The prompts of a set, each with the set's name and rewards."""
    loaded = _without_reserved(load_prompts(config.file), config.file)
    rewards = dict.fromkeys(config.rewards) if isinstance(config.rewards, list) else config.rewards
    metadata = [{**row, SET_COLUMN: config.label, REWARDS_COLUMN: rewards} for row in loaded.metadata]
    return PromptSet(loaded.prompts, metadata, loaded.notes)


def _without_reserved(loaded: PromptSet, name: str) -> PromptSet:
    """The prompts themselves. FlowGRPOError if they have a column that only a list of sets may give them."""
    _check_columns(itertools.chain.from_iterable(loaded.metadata), {SET_COLUMN}, name)
    if any(REWARDS_COLUMN in row for row in loaded.metadata):  # by which 0.4 chose the rewards of each prompt
        raise FlowGRPOError(
            f"{name} has a column `{REWARDS_COLUMN}`, by which prompts no longer choose their rewards: give prompts with other "
            "rewards as a set, prompts=[{file: FILE, rewards: [NAME]}], or give the column another name."
        )
    return loaded


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
