"""Models of the JSON files of a run folder. A reader ignores a file that does not match its model, damaged or edited."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flow_grpo.errors import FlowGRPOError
from flow_grpo.run_folder.metrics_file import bounded, metric_size


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FlowGRPOError("it should be a number")
    return bounded(value)


Numbers = list[Annotated[float, BeforeValidator(_number)]]  # NaN and infinity included


class Content(BaseModel):
    """The content of a file. Keys that are not named here are left out, as what a later version may add."""

    model_config = ConfigDict(strict=True)


class ImageMetrics(Content):
    """Measures of the held-out images of one size, by prompt."""

    # sharpness in 0.3
    high_frequency_power: Numbers = Field(validation_alias=AliasChoices("high_frequency_power", "sharpness"))
    diversity: Numbers = []


class EvaluationContent(ImageMetrics):
    """evaluation.json; flow-grpo 0.3 wrote no `seeds`, `sources` and `sizes`, 0.4 no `weights`."""

    seeds: list[int] = []
    trained: list[str]
    weights: dict[str, float] = {}
    prompts: Annotated[list[str], Field(min_length=1)]
    sources: list[str | None] = []
    values: dict[str, Numbers]
    sizes: dict[str, ImageMetrics] = {}
    extremes: list[int]

    @model_validator(mode="after")
    def _fits_the_prompts(self) -> "EvaluationContent":
        count = len(self.prompts)
        counts = {count, *map(len, self.values.values()), len(self.sources) or count}
        if len(counts) > 1 or any(not 0 <= index < count for index in self.extremes):
            raise FlowGRPOError("it should have a value for each prompt")
        wanted = {"": "reward", **{size: f"reward@{size}" for size in self.sizes}}
        if any(name not in self.values or metric_size(name) != size for size, name in wanted.items()):
            raise FlowGRPOError("it should have the reward of each size")
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


def checked(content: Any, kind: type[Content]) -> dict[str, Any]:
    """The named keys of a file's content; {} if it has another shape."""
    try:
        return kind.model_validate(content).model_dump(exclude_unset=True)
    except ValidationError:
        return {}
