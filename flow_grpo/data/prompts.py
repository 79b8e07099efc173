"""Prompt sets, and the sampling of P prompts x G images for each training step."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.config.bundled import bundled_file
from flow_grpo.data.prompt_files import COLUMNS, SUFFIXES, Table, read_table
from flow_grpo.data.prompt_images import COLUMN as IMAGE
from flow_grpo.data.prompt_images import DERIVED, read_images
from flow_grpo.data.prompt_sets import names_of_sets, source_of
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import write_atomic
from flow_grpo.image_prompt import SourceImage, prompt_key, with_images
from flow_grpo.rewards.downloads import HubUnreachable, downloads
from flow_grpo.sampling import generator
from flow_grpo.text import visible
from flow_grpo.types import PromptBatch

HTTPS = "https://"
DATA_SET = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")  # a hub id of a data set
MAX_BYTES = 256 << 20  # of a downloaded file
SET = "prompt_set"  # metadata of each prompt of several sets: the name of its set
FOLDER_FILES, FILE_NAME = ("metadata.jsonl", "metadata.csv"), "file_name"  # of a folder of images, as `datasets` has them
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in its default repr
RESERVED_COLUMNS = ("images", "prompts")  # arguments of rewards that are not metadata


@dataclass(frozen=True)
class PromptSet:
    """Prompts, each with a dict of metadata that rewards receive as keyword arguments.

    Attributes:
        prompts: N texts, or `ImagePrompt`s with images.
        metadata: N dicts with names of columns as keys.
    """

    prompts: list[str]
    metadata: list[dict]

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
        return PromptSet(self.prompts[:count], self.metadata[:count])

    def repeat(self, images: int) -> PromptBatch:
        """All prompts with `images` images each."""
        return self.take(range(len(self)), images)

    def take(self, chosen: Sequence[int], images: int, first_group: int = 0) -> PromptBatch:
        """The prompts at these indices with `images` images each; their groups are numbered from `first_group`."""
        rows = [i for i in chosen for _ in range(images)]
        return PromptBatch(
            [self.prompts[i] for i in rows],
            [self.metadata[i] for i in rows],
            torch.arange(len(rows)) // images + first_group,
            torch.arange(len(rows)) % images,
        )


def _as_text(value: object) -> str:
    """A text for a value that JSON can't hold, the same in every process: without the address of an object."""
    content = hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else ADDRESS.sub("", repr(value))
    return f"{type(value).__name__} {content}"


class PromptSampler:
    """Samples the prompts of training steps: shuffled epochs, without prompts that are skipped for having no signal.

    Every epoch is a permutation drawn from (seed, epoch); prompts that don't fill a last step are left out of it. A prompt whose
    group had no signal `patience` times in a row is skipped for `skip_steps` steps; patience 0 skips none.
    """

    def __init__(self, prompts: PromptSet, seed: int, patience: int = 0, skip_steps: int = 0) -> None:
        self.prompts, self.seed, self.patience, self.skip_steps = prompts, seed, patience, skip_steps
        self.epoch, self.position = 0, 0  # the position of the next prompt in the epoch's order
        self.zero_std_streak: dict[str, int] = {}  # by the prompt's key: how many times in a row its group had no signal
        self.skipped_until: dict[str, int] = {}  # by the prompt's key: the first step at which it may be sampled again

    def sample(self, step: int, prompts: int, images: int, first_group: int = 0) -> PromptBatch:
        """Sample `prompts` different prompts with `images` images each; the groups are numbered from `first_group`."""
        return self.prompts.take(self.sample_indices(step, prompts), images, first_group)

    def sample_indices(self, step: int, prompts: int) -> list[int]:
        """The indices of `prompts` different prompts."""
        if prompts > len(self.prompts):
            raise FlowGRPOError(f"prompts_per_step={prompts}, but there are only {len(self.prompts)} prompts.")
        left = self._available(step)
        if len(left) < prompts:
            self.epoch, self.position = self.epoch + 1, 0
            left = self._available(step)
        if len(left) < prompts:  # nearly all are skipped: use them all again
            self.skipped_until = {}
            left = self._available(step)
        positions = left[:prompts]
        order = self._order()
        self.position = positions[-1] + 1
        return [order[position] for position in positions]

    def observe_signal(self, step: int, batch: PromptBatch, signal: Tensor) -> None:
        """Record which rows (B,) of a batch belong to groups with signal."""
        if not self.patience:
            return
        for prompt, has_signal in dict(zip(map(prompt_key, batch.prompts), signal.tolist(), strict=True)).items():
            self.zero_std_streak[prompt] = 0 if has_signal else self.zero_std_streak.get(prompt, 0) + 1
            if self.zero_std_streak[prompt] >= self.patience:
                self.skipped_until[prompt] = step + 1 + self.skip_steps
                self.zero_std_streak[prompt] = self.patience - 1  # without signal once more, it is skipped again

    def num_skipped(self, step: int) -> int:
        """The number of prompts that are skipped at that step."""
        return sum(first_step > step for first_step in self.skipped_until.values())

    def state_dict(self) -> dict:
        """What the sampler has observed, for a checkpoint."""
        zero_std_streak, skipped_until = dict(self.zero_std_streak), dict(self.skipped_until)
        # keys as in checkpoints of flow-grpo 0.3
        return {"epoch": self.epoch, "place": self.position, "silent": zero_std_streak, "until": skipped_until}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.epoch, self.position = state["epoch"], state["place"]
        self.zero_std_streak, self.skipped_until = dict(state["silent"]), dict(state["until"])

    def _order(self) -> list[int]:
        return torch.randperm(len(self.prompts), generator=generator(self.seed, "prompts", self.epoch)).tolist()

    def _available(self, step: int) -> list[int]:
        """The positions of this epoch that are still to come and whose prompts are not skipped."""
        order, texts = self._order(), self.prompts.prompts
        return [
            p for p in range(self.position, len(order)) if self.skipped_until.get(prompt_key(texts[order[p]]), 0) <= step
        ]


def rows_by_set(metadata: Sequence[dict]) -> dict[str, Tensor]:
    """The rows (B,) bool of each prompt set, in alphabetical order; empty if the prompts are of one set."""
    names = [row.get(SET) for row in metadata]
    return {
        name: torch.tensor([set_name == name for set_name in names]) for name in sorted({name for name in names if name})
    }


def is_prompt_file(name: str) -> bool:
    """Whether a name ends as those of prompt files do."""
    return Path(name).suffix.lower() in SUFFIXES


def load_prompts(source: PromptSet | str | Path | list[str], image_column: str = IMAGE) -> PromptSet:
    """Load prompts from a `PromptSet` (returned as it is), a list, a name of flow_grpo/data/prompt_sets.py, a .txt file (one prompt per
    line), a .json, .jsonl, .csv, .tsv or .parquet file, the https address of such a file, or a hub data set.

    Tables have a column `prompt`, Prompt or prompts; other columns become metadata. No row is skipped. The column `image` has the
    images of a prompt: a path or several, relative to the file. A folder with a metadata.jsonl or .csv is such a table, whose column
    file_name has the images.

    Args:
        image_column: the column of the prompts' images; `image` has another meaning in tables of given images.

    Raises:
        FlowGRPOError: there is no such file or data set, or it has no prompts, no column `prompt`, or a value that is no prompt or image.
    """
    if isinstance(source, PromptSet):
        return source
    if isinstance(source, list):
        return _prompt_set(source, [{} for _ in source], "the list")
    name = str(source)
    table = _table(name)
    column = next((column for wanted in COLUMNS for column in table.columns if column.lower() == wanted), None)
    if not table.columns or (column and not table.rows):
        raise FlowGRPOError(f"{name} holds no prompts.")
    if column is None:
        raise FlowGRPOError(f"{name} has no column `prompt`; it has {visible(', '.join(table.columns))[:200]}.")
    clash = next((reserved for reserved in RESERVED_COLUMNS if reserved in table.columns and reserved != column), None)
    if clash is not None:
        raise FlowGRPOError(
            f"{name} has a column `{clash}`, a name that is reserved in calls of rewards: give it another name."
        )
    images: list[tuple[SourceImage, ...]] = [()] * len(table.rows)
    if image_column in table.columns:
        clash = next((derived for derived in DERIVED if derived in table.columns and derived != image_column), None)
        if clash is not None:
            raise FlowGRPOError(
                f"{name} has images and a column `{clash}`, which rewards receive as those: give it another name."
            )
        folder = None if (file := _local(name)) is None else (file if file.is_dir() else file.parent)
        cells = [row[image_column] for row in table.rows]
        locations = [f"{name}, {location}" for location in table.locations]
        found = file is None or file.is_dir()  # and not named by the user
        images = read_images(cells, locations, folder, image_column, stay_inside=found)
    metadata = [{key: value for key, value in row.items() if key not in (column, image_column)} for row in table.rows]
    prompts = _prompt_set([row[column] for row in table.rows], metadata, name, table.locations)
    return PromptSet([with_images(text, sources) for text, sources in zip(prompts.prompts, images, strict=True)], metadata)


def _table(name: str) -> Table:
    """The rows of a file, of the file at an address, of a folder of images, or of a hub data set."""
    file = _local(name)
    if file is not None and file.is_dir():
        manifest = next(file / candidate for candidate in FOLDER_FILES if (file / candidate).is_file())
        table = read_table(manifest, str(manifest), manifest.suffix.lower())
        if FILE_NAME not in table.columns:
            raise FlowGRPOError(f"{manifest} has no column `{FILE_NAME}` with the names of the images in its folder.")
        rows = [{IMAGE if key == FILE_NAME else key: value for key, value in row.items()} for row in table.rows]
        return Table([IMAGE if key == FILE_NAME else key for key in table.columns], rows, table.locations)
    if file is not None:
        return read_table(file, name, file.suffix.lower())
    source = source_of(name)
    if source.startswith(HTTPS):
        return read_table(_downloaded(source), name, Path(source).suffix.lower())
    return _data_set(source)


def _local(name: str) -> Path | None:
    """The local file of that name, or None for an address or a data set. FlowGRPOError if it can't be any of these."""
    source = source_of(name)
    try:
        file = next((f for f in (Path(name), Path(source), bundled_file(source)) if f.is_file()), None)
        is_folder = source == name != "" and Path(name).is_dir()
        if is_folder and any((Path(name) / candidate).is_file() for candidate in FOLDER_FILES):
            return Path(name)
    except (OSError, ValueError):  # longer than any file's name
        file, is_folder = None, False
    if file is not None or source.startswith(HTTPS):
        return file
    if is_folder:
        raise FlowGRPOError(f"{name} is a folder without a metadata.jsonl: give a prompt file in it.")
    if is_prompt_file(source):
        raise FlowGRPOError(f"there is no prompt file {name}.")
    if not DATA_SET.fullmatch(source):
        raise FlowGRPOError(
            f"{name[:200]!r} is not a prompt file, an address or a data set: write prompts into a file, one per line."
        )
    return None


def _downloaded(address: str) -> Path:
    """The file at an address: downloaded now or, without a network, the copy of the last download."""
    import httpx

    copy = Path("~/.cache/flow-grpo/prompts").expanduser() / hashlib.sha256(address.encode()).hexdigest()
    try:
        content = _content(address)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        if copy.is_file() and isinstance(error, httpx.TransportError):
            return copy
        kind = HubUnreachable if isinstance(error, httpx.TransportError) else ValueError
        raise kind(_unreachable(address, error)) from error
    write_atomic(copy, content)
    return copy


def _content(address: str) -> bytes:
    import httpx

    content = bytearray()
    with httpx.stream("GET", address, follow_redirects=True, timeout=30) as response:
        response.raise_for_status()
        for part in response.iter_bytes():
            content += part
            if len(content) > MAX_BYTES:
                raise FlowGRPOError(f"it has more than {MAX_BYTES >> 20} MB")
    return bytes(content)


def _data_set(source: str) -> Table:
    import datasets

    datasets.disable_progress_bars()
    try:
        with downloads(source):
            data_set = datasets.load_dataset(source, split="train")
        rows = data_set.to_list()
    except HubUnreachable as error:
        raise HubUnreachable(
            f"the prompts {error} Give a local file of them; the sets known by name are {names_of_sets()}."
        ) from error
    except Exception as error:
        raise FlowGRPOError(_unreachable(source, error)) from error
    return Table(data_set.column_names, rows, [f"row {n}" for n in range(1, len(rows) + 1)])


def _unreachable(source: str, error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return (
        f"the prompts {source} could not be read: {reason}. Without a network give a local file of them; the sets known by name "
        f"are {names_of_sets()}."
    )


def _prompt_set(prompts: list, metadata: list[dict], source: str, locations: list[str] | None = None) -> PromptSet:
    if not prompts:
        raise FlowGRPOError(f"{source} holds no prompts.")
    invalid = next((i for i, prompt in enumerate(prompts) if not _is_prompt(prompt)), None)
    if invalid is not None:
        where = f"{source}, {locations[invalid]}" if locations else source
        raise FlowGRPOError(
            f"{where}: {repr(prompts[invalid])[:80]} is not a prompt: every prompt must be a text that is not empty."
        )
    return PromptSet(list(prompts), metadata)


def _is_prompt(value: object) -> bool:
    """Whether it is a text that isn't blank and can be encoded: it has no half of a surrogate pair."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= letter <= "\udfff" for letter in value)
