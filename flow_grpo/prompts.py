"""Prompt sets, and how they are dealt: P prompts x G images a step, the same whatever happened before."""

from dataclasses import dataclass
from pathlib import Path

import torch

from flow_grpo.config import shipped
from flow_grpo.sampling import generator
from flow_grpo.types import PromptBatch


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
        return self._take(range(len(self)), images)

    def deal(self, step: int, prompts: int, images: int, seed: int) -> PromptBatch:
        """The batch of a training step: `prompts` different prompts, `images` of each.

        Every epoch is a permutation drawn from (seed, epoch); what does not fill a last step is left out of it.
        """
        per_epoch = len(self) // prompts
        if not per_epoch:
            raise ValueError(f"prompts_per_step={prompts}, but there are only {len(self)} prompts.")
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(self), generator=generator(seed, "prompts", epoch)).tolist()
        return self._take(order[place * prompts : (place + 1) * prompts], images)

    def _take(self, chosen, images: int) -> PromptBatch:
        rows = [i for i in chosen for _ in range(images)]
        return PromptBatch(
            [self.prompts[i] for i in rows],
            [self.metadata[i] for i in rows],
            torch.arange(len(rows)) // images,
            torch.arange(len(rows)) % images,
        )


def load_prompts(source: str | Path | list[str]) -> PromptSet:
    """A prompt set from a list, a .txt file (one a line), a .jsonl, .csv or .parquet file, or a hub data set.

    Tables have a column `prompt`; the others become metadata.

    Raises:
        ValueError: no such file or data set, no prompts in it, or no column `prompt`.
    """
    if isinstance(source, list):
        return _checked(source, [{} for _ in source], "the list")
    file = next((f for f in (Path(source), shipped(str(source))) if f.is_file()), None)
    if file is None and Path(str(source)).suffix:
        raise ValueError(f"there is no prompt file {source}.")
    if file is not None and file.suffix == ".txt":
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return _checked(lines, [{} for _ in lines], str(source))
    rows = _read_table(str(source), file)
    if rows and "prompt" not in rows[0]:
        raise ValueError(f"{source} has no column `prompt`; it has {', '.join(rows[0])}.")
    return _checked([row.pop("prompt") for row in rows], rows, str(source))


def _read_table(source: str, file: Path | None) -> list[dict]:
    import datasets

    datasets.disable_progress_bars()
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    try:
        if file is None:
            return datasets.load_dataset(source, split="train").to_list()
        if file.suffix not in formats:
            raise ValueError(f"{source} is none of .txt, .jsonl, .csv or .parquet.")
        return datasets.load_dataset(formats[file.suffix], data_files=str(file), split="train").to_list()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the prompts {source} could not be read: {str(error).splitlines()[0]}") from error


def _checked(prompts: list, metadata: list[dict], source: str) -> PromptSet:
    if not prompts:
        raise ValueError(f"{source} holds no prompts.")
    wrong = next((p for p in prompts if not isinstance(p, str) or not p.strip()), None)
    if wrong is not None or None in prompts:
        raise ValueError(f"{source}: {wrong!r} is not a prompt; every prompt must be a text.")
    return PromptSet(list(prompts), metadata)
