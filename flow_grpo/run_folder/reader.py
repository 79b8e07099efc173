"""Reads a run folder: its config, metrics, evaluations and kept images. Needs no model library."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flow_grpo.config.loading import parse_yaml, read_text
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import inside
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.metrics_file import NO_GRADIENT, NO_SIGNAL, SHARE, bounded, logged_best_step, read_metrics

REWARD_MEAN = re.compile(r"rewards/(.+)/mean")  # the metric of a reward in training
SET_REWARD = "reward/"  # the reward of one prompt set: reward/SET, held out eval/reward/SET


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FlowGRPOError("it should be a number")
    return bounded(value)


Numbers = list[Annotated[float, BeforeValidator(_number)]]  # NaN and infinity included


class Content(BaseModel):
    """The content of a file. Keys that are not named here are left out, as what a later version may add."""

    model_config = ConfigDict(strict=True)


class EvaluationContent(Content):
    """evaluation.json: values by prompt. flow-grpo 0.4 wrote no `weights`."""

    high_frequency_power: Numbers
    diversity: Numbers = []
    seeds: list[int]
    trained: list[str]
    weights: dict[str, float] = {}
    prompts: Annotated[list[str], Field(min_length=1)]
    sources: list[str | None] = []
    values: dict[str, Numbers]
    extremes: list[int]

    @model_validator(mode="after")
    def _fits_the_prompts(self) -> "EvaluationContent":
        count = len(self.prompts)
        counts = {count, *map(len, self.values.values()), len(self.sources) or count}
        if len(counts) > 1 or any(not 0 <= index < count for index in self.extremes):
            raise FlowGRPOError("it should have a value for each prompt")
        if "reward" not in self.values:
            raise FlowGRPOError("it should have the reward")
        return self


class GroupContent(Content):
    """A group in groups.json."""

    prompt: str
    source: str | None = None
    images: Annotated[int, Field(ge=0)]
    reward: Numbers
    rewards: dict[str, Numbers]
    advantage: Numbers

    @model_validator(mode="after")
    def _equal_lengths(self) -> "GroupContent":
        if any(len(values) != len(self.reward) for values in (self.advantage, *self.rewards.values())):
            raise FlowGRPOError("it should have a value for each image")
        return self


class GroupsContent(Content):
    """groups.json."""

    groups: list[GroupContent]


class MachineContent(Content):
    """machine.json. The model card has the dtype in Python code."""

    device: str | None = None
    cores: int | None = None
    processes: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    python: str | None = None
    torch: str | None = None
    flow_grpo: str | None = None


class InputsContent(Content):
    """inputs.json; flow-grpo 0.4 wrote none."""

    digests: dict[str, str]


# metrics that are 1 in a step without signal: the warning that a run then gives, by the metric that has fallen, and what it means
NO_LEARNING = {
    "frac_reward_dropped": (None, "all images were left out, as a reward failed or gave no finite number"),
    "frac_reward_zero_std": (NO_SIGNAL, "all images of each prompt got the same reward"),
    "frac_gradient_zero": (NO_GRADIENT, "the gradient of the rewards was 0"),
}
KINDS: dict[str, type[Content]] = {layout.EVALUATION: EvaluationContent, layout.GROUPS: GroupsContent}


def checked(content: Any, kind: type[Content]) -> dict[str, Any]:
    """The named keys of a file's content; {} if it has another shape."""
    try:
        return kind.model_validate(content).model_dump(exclude_unset=True)
    except ValidationError:
        return {}


def check_links(folder: Path) -> None:
    """FlowGRPOError if a file of a run that a report or an export shows leads out of its folder by a link: the run may be a stranger's."""
    shown = (layout.CONFIG, layout.METRICS, layout.MACHINE, layout.PICTURES, layout.LORA, layout.BEST, layout.TRANSFORMER)
    paths = [path for name in shown for path in (folder / name, *(folder / name).rglob("*"))]
    for path in paths:
        if path.is_symlink():
            inside(folder, str(path.relative_to(folder)), f"the run {folder}")


class RunReader:
    """The content of a run folder, finished or not. FlowGRPOError if the folder holds no run."""

    def __init__(self, folder: Path) -> None:
        if not layout.is_run(folder):
            raise FlowGRPOError(
                f"{folder} is not a run folder: it has no {layout.METRICS}. Give the folder that `flow-grpo train` wrote."
            )
        self.folder, self.name = folder, folder.resolve().name
        self.rows = read_metrics(folder)
        self.config_text = read_text(folder / layout.CONFIG) if (folder / layout.CONFIG).is_file() else ""
        self.config = _yaml(self.config_text)
        self.machine = machine_of(folder)
        self.evaluations = read_all(folder, layout.EVALUATION)
        self.groups = read_all(folder, layout.GROUPS)

    def up_to_step(self, step: int) -> "RunReader":
        """The run as it was after that step."""
        earlier = copy.copy(self)
        earlier.rows = [row for row in self.rows if row["step"] <= step]
        earlier.evaluations = [e for e in self.evaluations if e["step"] <= step]
        earlier.groups = [g for g in self.groups if g["step"] <= step]
        return earlier

    @property
    def step_rows(self) -> list[dict]:
        """The rows of training steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def evaluation_rows(self) -> list[dict]:
        """The rows of evaluations."""
        return [row for row in self.rows if "eval/reward" in row]

    @property
    def warnings(self) -> list[dict]:
        """The rows of warnings."""
        return [row for row in self.rows if "warning" in row]

    @property
    def nothing_learned(self) -> str | None:
        """Why no training step had signal, as a clause; None if one had.

        Equal sums of rewards are not enough: some advantages compare single rewards, or the whole batch, and a gradient compares none.
        So the run must have warned.
        """
        warned = {row.get("fallen") for row in self.warnings}
        causes = {metric: cause for metric, (warning, cause) in NO_LEARNING.items() if warning is None or warning in warned}
        found = [next((metric for metric in causes if row.get(metric) == 1), None) for row in self.step_rows]
        if not found or None in found:
            return None
        return f"in every step {' or '.join(causes[metric] for metric in dict.fromkeys(found) if metric)}"

    @property
    def without_effect(self) -> list[str]:
        """The rewards that gave all images of each prompt the same value in every training step, if another one did not."""
        shares = [{key: value for key, value in row.items() if key.startswith(SHARE)} for row in self.step_rows]
        names = dict.fromkeys(key for row in shares for key in row)
        constant = [name for name in names if not any(row.get(name) for row in shares)]
        return [name.removeprefix(SHARE) for name in constant] if len(constant) < len(names) else []

    @property
    def num_steps(self) -> int:
        """The number of training steps that its config asks for; 0 if that can't be read."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else 0

    @property
    def rewards(self) -> dict[str, Any]:
        """The rewards of its config by name, each a weight or a section; {} if they can't be read."""
        rewards = self.config.get("rewards")
        if isinstance(rewards, list):
            rewards = {name: 1.0 for name in rewards if isinstance(name, str)}
        return (
            {name: reward for name, reward in rewards.items() if isinstance(name, str)} if isinstance(rewards, dict) else {}
        )

    @property
    def trained(self) -> list[str]:
        """Names of the rewards that it was trained on."""
        if self.evaluations:
            return self.evaluations[-1]["trained"]
        # also of functions that no config names
        means = [REWARD_MEAN.fullmatch(key) for row in self.step_rows for key in row]
        return list(dict.fromkeys(match[1] for match in means if match)) or list(self.rewards)

    @property
    def score_names(self) -> list[str]:
        """Names of the held-out scores: the trained sum (`reward`), then each reward, those that were trained on first.

        Without the sum on each of several prompt sets.
        """
        names = list(dict.fromkeys(key[5:] for row in self.evaluation_rows for key in row if key.startswith("eval/")))
        alone = [name for name in names if name != "reward" and not name.startswith(SET_REWARD)]
        alone.sort(key=lambda name: name not in self.trained)
        weighed = [name for name in self.trained if name in alone]
        weights = [reward.get("weight", 1.0) if isinstance(reward, dict) else reward for reward in self.rewards.values()]
        by_itself = len(weighed) == 1 and [weight for weight in weights if weight] in ([1.0], [])
        return alone if by_itself else [*(name for name in names if name == "reward"), *alone]  # one is the sum

    @property
    def main_metric(self) -> str:
        """The first of `score_names`; the reward, where no evaluation has any."""
        return next(iter(self.score_names), "reward")

    @property
    def prompt_sets(self) -> list[str]:
        """The prompt sets whose reward was measured alone, in training or held out."""
        names = [key.removeprefix("eval/") for row in [*self.step_rows, *self.evaluation_rows] for key in row]
        sets = [name[len(SET_REWARD) :] for name in names if name.startswith(SET_REWARD)]
        return list(dict.fromkeys(sets))

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation, according to the last one."""
        return logged_best_step(self.evaluation_rows)

    def sum_of(self, key: str) -> float:
        """The sum of a metric over all rows."""
        return sum(row[key] for row in self.rows if math.isfinite(row.get(key, math.nan)))


def read_all(folder: Path, name: str) -> list[dict]:
    """The files of that name in all folders of RUN/pictures, in order of steps; `folder` is each one's folder.

    Files that do not match their model are ignored: the report of a run, and a resumed run, do not need them.
    """
    contents = []
    for step, step_folder in layout.step_folders(folder / layout.PICTURES):
        content = _read(step_folder / name, KINDS[name])
        if content:
            contents.append({**content, "step": step, "folder": step_folder})
    return contents


def machine_of(folder: Path) -> dict[str, Any]:
    """The content of a run folder's machine.json; {} if there is none."""
    return _read(folder / layout.MACHINE, MachineContent)


def inputs_of(folder: Path) -> dict[str, str]:
    """The digests in inputs.json of a run folder; {} if there is none."""
    return _read(folder / layout.INPUTS, InputsContent).get("digests", {})


def dtype_of(folder: Path) -> str | None:
    """The dtype in which a run began, such as bfloat16; None if inputs.json, or machine.json of flow-grpo 0.4, does not say it."""
    return inputs_of(folder).get("dtype", machine_of(folder).get("dtype"))


def compiled_of(folder: Path) -> bool | None:
    """Whether a run began with compiled blocks; None if its config.yaml does not say it."""
    file = folder / layout.CONFIG
    memory = _yaml(file.read_text(encoding="utf-8", errors="replace")).get("memory") if file.is_file() else None
    value = memory.get("compile") if isinstance(memory, dict) else None
    return value if isinstance(value, bool) else None


def value_of(evaluation: dict[str, Any], metric: str, index: int) -> float:
    """A metric of the held-out prompt with that index; NaN if that evaluation did not measure it."""
    values = evaluation["values"].get(metric, [])
    return values[index] if index < len(values) else math.nan


def _read(file: Path, kind: type[Content]) -> dict[str, Any]:
    """The content of a JSON file; {} if it is missing or does not match its model."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # ValueError: cut off, not UTF-8, or a number of thousands of digits
        return {}
    return checked(content, kind)


def _yaml(text: str) -> dict[str, Any]:
    try:
        content = parse_yaml(text, "")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
