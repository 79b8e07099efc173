"""Prompt sets, and how they are dealt: P prompts x G images a step, the same whatever happened before."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.config import shipped
from flow_grpo.prompt_sets import sentence, source_of
from flow_grpo.sampling import generator
from flow_grpo.types import PromptBatch
from rewards.downloads import HubUnreachable, downloads

COLUMNS = ("prompt", "prompts")  # what the prompts' column is called, in capitals or not
REMOTE = "https://"
TABS = {"sep": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False}  # as PartiPrompts' own file has it
FORMATS: dict[str, tuple[str, dict]] = {
    ".txt": ("text", {}),
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", TABS),
    ".parquet": ("parquet", {}),
}


@dataclass(frozen=True)
class PromptSet:
    """Prompts, each with a dict of metadata that rewards receive as keyword arguments."""

    prompts: list[str]
    metadata: list[dict]

    def __len__(self) -> int:
        return len(self.prompts)

    def head(self, count: int | None) -> "PromptSet":
        return PromptSet(self.prompts[:count], self.metadata[:count])

    def repeat(self, images: int) -> PromptBatch:
        """All prompts with so many images each."""
        return self.take(range(len(self)), images)

    def take(self, chosen: Sequence[int], images: int, first_group: int = 0) -> PromptBatch:
        """The prompts at these places with so many images each, their groups counted from `first_group`."""
        rows = [i for i in chosen for _ in range(images)]
        return PromptBatch(
            [self.prompts[i] for i in rows],
            [self.metadata[i] for i in rows],
            torch.arange(len(rows)) // images + first_group,
            torch.arange(len(rows)) % images,
        )


class Dealer:
    """Deals the prompts of training steps: shuffled epochs, and a rest for prompts that say nothing for the moment.

    Every epoch is a permutation drawn from (seed, epoch); what does not fill a last step is left out of it. A prompt whose
    group had no signal `rest_after` times in a row is not dealt for `rest_for` steps; 0 lets none rest.
    """

    def __init__(self, prompts: PromptSet, seed: int, rest_after: int = 0, rest_for: int = 0) -> None:
        self.prompts, self.seed, self.rest_after, self.rest_for = prompts, seed, rest_after, rest_for
        self.epoch, self.place = 0, 0
        self.silent: dict[str, int] = {}  # how many times in a row a prompt's group had no signal
        self.until: dict[str, int] = {}  # the step at which a resting prompt is asked again

    def deal(self, step: int, prompts: int, images: int, first_group: int = 0) -> PromptBatch:
        """`prompts` different prompts with `images` images each; the groups are numbered from `first_group`."""
        if prompts > len(self.prompts):
            raise ValueError(f"prompts_per_step={prompts}, but there are only {len(self.prompts)} prompts.")
        left = self._awake(step)
        if len(left) < prompts:
            self.epoch, self.place = self.epoch + 1, 0
            left = self._awake(step)
        if len(left) < prompts:  # nearly all rest: ask them all again
            self.until = {}
            left = self._awake(step)
        places = left[:prompts]
        order = self._order()
        self.place = places[-1] + 1
        return self.prompts.take([order[place] for place in places], images, first_group)

    def heard(self, step: int, batch: PromptBatch, signal: Tensor) -> None:
        """Takes in which rows (B,) of a batch belong to groups with signal."""
        if not self.rest_after:
            return
        for prompt, spoke in dict(zip(batch.prompts, signal.tolist(), strict=True)).items():
            self.silent[prompt] = 0 if spoke else self.silent.get(prompt, 0) + 1
            if self.silent[prompt] >= self.rest_after:
                self.until[prompt] = step + 1 + self.rest_for
                self.silent[prompt] = self.rest_after - 1  # one more silence after the rest, and it rests again

    def resting(self, step: int) -> int:
        return sum(until > step for until in self.until.values())

    def state(self) -> dict:
        return {"epoch": self.epoch, "place": self.place, "silent": dict(self.silent), "until": dict(self.until)}

    def load(self, state: dict) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.silent, self.until = dict(state["silent"]), dict(state["until"])

    def _order(self) -> list[int]:
        return torch.randperm(len(self.prompts), generator=generator(self.seed, "prompts", self.epoch)).tolist()

    def _awake(self, step: int) -> list[int]:
        """The places of this epoch that are still to come and whose prompts don't rest."""
        order, texts = self._order(), self.prompts.prompts
        return [p for p in range(self.place, len(order)) if self.until.get(texts[order[p]], 0) <= step]


def load_prompts(source: PromptSet | str | Path | list[str]) -> PromptSet:
    """A prompt set: one as it is, a list, a name of flow_grpo/prompt_sets.py, a .txt file (one a line), a .jsonl, .csv, .tsv or
    .parquet file, the https address of one, or a hub data set.

    Tables have a column `prompt`, or Prompt or prompts; the others become metadata.

    Raises:
        ValueError: no such file or data set, no prompts in it, or no column `prompt`.
    """
    if isinstance(source, PromptSet):
        return source
    if isinstance(source, list):
        return _checked(source, [{} for _ in source], "the list")
    place = str(source) if Path(source).is_file() else source_of(str(source))
    file = next((f for f in (Path(place), shipped(place)) if f.is_file()), None)
    if file is None and Path(place).suffix and not place.startswith(REMOTE):
        raise ValueError(f"there is no prompt file {source}.")
    if file is not None and file.suffix == ".txt":
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return _checked(lines, [{} for _ in lines], str(source))
    rows = _read_table(place, file)
    if not rows:
        raise ValueError(f"{source} holds no prompts.")
    columns = ("text",) if place.endswith(".txt") else COLUMNS  # that of lines
    column = next((name for wanted in columns for name in rows[0] if name.lower() == wanted), None)
    if column is None:
        raise ValueError(f"{source} has no column `prompt`; it has {', '.join(rows[0])}.")
    return _checked([row.pop(column) for row in rows], rows, str(source))


def _read_table(place: str, file: Path | None) -> list[dict]:
    import datasets

    datasets.disable_progress_bars()
    address = place if file is None else str(file)
    try:
        if file is None and not place.startswith(REMOTE):
            with downloads(place):
                return datasets.load_dataset(place, split="train").to_list()
        if Path(address).suffix not in FORMATS:
            raise ValueError(f"{place} is none of .txt, .jsonl, .csv, .tsv or .parquet.")
        builder, options = FORMATS[Path(address).suffix]
        return datasets.load_dataset(builder, data_files=address, split="train", **options).to_list()
    except HubUnreachable as error:
        raise HubUnreachable(
            f"the prompts {error} Give a local file of them; the sets known by name are {sentence()}."
        ) from error
    except ValueError:
        raise
    except Exception as error:
        known = "" if file else f". Without a network give a local file of them; the sets known by name are {sentence()}."
        raise ValueError(f"the prompts {place} could not be read: {str(error).splitlines()[0]}{known}") from error


def _checked(prompts: list, metadata: list[dict], source: str) -> PromptSet:
    if not prompts:
        raise ValueError(f"{source} holds no prompts.")
    wrong = next((p for p in prompts if not isinstance(p, str) or not p.strip()), None)
    if wrong is not None or None in prompts:
        raise ValueError(f"{source}: {wrong!r} is not a prompt; every prompt must be a text.")
    return PromptSet(list(prompts), metadata)
