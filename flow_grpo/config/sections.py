"""The sections of a run config, `objective` excepted. Each field's documentation is below it."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from flow_grpo.errors import FlowGRPOError
from flow_grpo.text import has_password, suggest

PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Pixels = Annotated[int, Field(gt=0, le=2**14)]


def path_text(text: str) -> str:
    """A path or another name of something, with the home folder in place of ~.

    FlowGRPOError if it is empty, or has a ${VARIABLE} or the password of an address.
    """
    if not text.strip():
        raise PydanticCustomError("path", "it should be a path or a name")
    if "${" in text:
        raise PydanticCustomError(
            "path", "variables are not replaced here: write the path itself, or let the shell replace it"
        )
    if has_password(text):
        raise PydanticCustomError(
            "path", "it is an address with a user or password, which would be shared with the run: give a file"
        )
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError as error:
        raise PydanticCustomError("path", "there is no home folder for ~: set HOME, or give the whole path") from error


PathText = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, PurePath) else value, json_schema_input_type=str),
    AfterValidator(path_text),
]


class ConfigSection(BaseModel):
    """A part of the config. Unknown settings are refused, and so are numbers that are not finite, also in fields of any type."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _finite(cls, values: Any) -> Any:
        for path, value in leaves(values):
            if isinstance(value, float) and not math.isfinite(value):
                raise FlowGRPOError(f"{'.'.join(path)} is {value}, but it should be a finite number.")
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and _kinds(field.annotation) <= {int, float, NoneType}:  # which pydantic takes as 0 or 1
            raise PydanticCustomError("number", "it should be a number")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a setting, checked as if the config was read with it. FlowGRPOError, and nothing is set, if it does not fit."""
        fields = type(self).model_fields
        if name not in fields:
            raise FlowGRPOError(f"there is no setting {name}.{suggest(name, list(fields))}")
        # without what follows from other settings, as `steps` from `stages` and `prompts` from `model`
        kept = {key: one for key, one in self if key in self.model_fields_set or isinstance(one, BaseModel | dict | list)}
        try:
            checked = type(self).model_validate({**kept, name: value})
        except ValidationError as error:
            first = error.errors()[0]
            own = first["ctx"]["error"] if first["type"] == "value_error" else None
            should = first["msg"].replace("Input should", "it should")
            raise FlowGRPOError(str(own or f"{name} is {value!r}, but {should}.")) from None
        self.__dict__.update(checked.__dict__)
        self.model_fields_set.add(name)

    def changed(self) -> list[str]:
        """The fields with another value than their default."""
        fields = type(self).model_fields.items()
        default = {name: one.get_default(call_default_factory=True, validated_data=dict(self)) for name, one in fields}
        return [name for name, value in self if value != default[name]]

    def given(self) -> dict[str, Any]:
        """The settings that were given or have another value than their default, as plain values."""
        plain, names = self.model_dump(), {*self.model_fields_set, *self.changed()}
        return {key: one.given() if isinstance(one, ConfigSection) else plain[key] for key, one in self if key in names}


def _kinds(annotation: Any) -> set[Any]:
    """The types of a field: those of a union, without what else its annotation says."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation}


def leaves(values: Any) -> Iterator[tuple[list[str], Any]]:
    """The single values in plain ones, however deep, each with the keys that lead to it."""
    stack: list[tuple[list[str], Any]] = [([], values)]
    visited: set[int] = set()  # YAML's references may form a ring
    while stack:
        path, value = stack.pop()
        if not isinstance(value, dict | list | tuple):
            yield path, value
        elif id(value) not in visited:
            visited.add(id(value))
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [([*path, str(key)], part) for key, part in inner]


class SamplingConfig(ConfigSection):
    steps: Annotated[int, Field(ge=2, le=10_000)] = 10
    """Sampling steps in training."""
    solver: Literal["euler", "dpm_2m"] = "euler"
    """How rollouts solve the ODE, all of their steps or those outside the window (MixGRPO-Flash, arXiv 2507.21802). `dpm_2m`
    (DPM-Solver++ 2M, arXiv 2211.01095) has order 2 with one velocity a step."""
    guidance: float | None = None
    """Guidance scale of rollouts, and of evaluation unless it has its own; by default that of the trained velocity, `guidance`."""


class LoraConfig(ConfigSection):
    rank: Annotated[int, Field(gt=0, le=2**16)] = 32
    """Rank of the low-rank matrices."""
    alpha: PositiveFloat = 64
    """The product of the low-rank matrices is scaled by alpha / rank."""
    targets: list[str] | Literal["all"] | None = None
    """Modules of the transformer that get a LoRA, by the end of their name; by default the attention projections; `all` are all linear
    layers, which learn faster and take more memory."""
    init_from: PathText | None = None
    """A saved LoRA to continue training from: a folder, a .safetensors file or a hub id. It keeps its own rank, alpha and targets: those
    settings have no effect then."""


class OptimizerConfig(ConfigSection):
    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW, or the one of bitsandbytes that keeps its two moments in 8 bit, on a GPU."""
    lr: PositiveFloat = 3e-4
    """Learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises to lr."""
    final_lr_ratio: Share = 1.0
    """The learning rate falls linearly to this share of lr at the last step; 1 keeps it constant. Resuming with more `steps`
    stretches the decay."""
    eps: PositiveFloat = 1e-15
    """Added to the root of the second moment. Gradients of mean log-probabilities can be 5e-9, below the usual 1e-8."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""


SECRETS = {"token": "REWARD_TOKEN", "api_key": "OPENAI_API_KEY"}  # options of rewards, and where they are read from instead


class RewardConfig(ConfigSection):
    weight: float = 1.0
    """Weight in the sum; 0 only reports it."""
    options: dict[str, Any] = {}
    """Arguments of the reward's constructor."""
    frames: PositiveInt | Literal["first", "last", "all"] | None = None
    """The frames of a video that it sees: a number of evenly spaced ones, whose values are averaged, the first, the last, or all at once
    as (B, F, 3, H, W). Default: the reward's `frames` attribute, or 4."""
    on_error: Literal["stop", "drop"] = "stop"
    """The action when it raises or returns no finite number: stop the run, or leave those groups out of the step. If it
    runs out of memory, a single process first repeats the step with half the micro-batch, and the run stops if that is not enough."""
    remote: str | list[str] | None = None
    """Address of a server, or of several, on which `flow-grpo serve` runs this reward; options are then those of the client,
    rewards/serving/client.py. The servers' token comes from the environment variable REWARD_TOKEN."""
    isolate: bool | str = False
    """Whether it runs in a separate process, which may take an hour to load it and for each call; or the Python interpreter of another
    environment, with which that process runs. If it exits or crashes, the run stops with an error and a checkpoint."""

    @model_validator(mode="before")
    @classmethod
    def _with_interpreter(cls, values: Any) -> Any:
        """0.4 has `python`, an interpreter, beside `isolate: true`."""
        if not isinstance(values, dict) or "python" not in values:
            return values
        python, others = values["python"], {key: value for key, value in values.items() if key != "python"}
        if python is not None and not others.get("isolate"):
            raise FlowGRPOError(f"python={python} is for a reward in a process of its own: set isolate={python}.")
        return others if python is None else {**others, "isolate": python}

    @model_validator(mode="after")
    def _consistent(self) -> "RewardConfig":
        if self.remote is not None and self.isolate:
            raise FlowGRPOError("a reward is either remote or isolated here: set one of `remote` and `isolate`.")
        return self

    @model_validator(mode="after")
    def _without_secrets(self) -> "RewardConfig":
        """A config is written to the run folder, trackers and exports."""
        secret = next((option for option in SECRETS if isinstance(self.options.get(option), str)), None)
        if secret is not None:
            raise FlowGRPOError(
                f"a reward's options.{secret} would be written to config.yaml and shared with the run: leave it out, and set the "
                f"environment variable {SECRETS[secret]}, or for a reward of your own one that it reads."
            )
        if has_password(f"{self.remote} {self.options}"):
            raise FlowGRPOError(
                "the address of a reward has a user or password, which would be written to config.yaml and shared with the run: take it "
                "out, and set the environment variable REWARD_TOKEN, the bearer token of `flow-grpo serve`."
            )
        return self


class PromptSetConfig(ConfigSection):
    file: PathText
    """The prompts: a file, a hub data set or a name, as in `prompts`."""
    name: str | None = None
    """Its name in the metrics; by default the file's name without its ending."""
    weight: PositiveFloat = 1.0
    """How often training samples a prompt of this set, against the weights of the others."""
    rewards: dict[str, float | None] | list[str] | None = None
    """Which of the run's `rewards` score its images: their names, or a weight for each; by default all."""

    @property
    def label(self) -> str:
        """Its name in the metrics."""
        return self.name or PurePath(self.file).stem


def _file_as_set(value: Any) -> Any:
    return {"file": value} if isinstance(value, str) else value


PromptSet = Annotated[PromptSetConfig, BeforeValidator(_file_as_set, json_schema_input_type=str | PromptSetConfig)]
FROM_PYTHON = "(given from Python)"  # in a run's config, instead of prompts that were given in memory
Prompts = (
    Annotated[
        Annotated[PathText, Tag("str")] | Annotated[list[PromptSet], Tag("list")],
        Discriminator(  # so that an error is about the type that is meant
            lambda value: "str" if isinstance(value, PurePath) else type(value).__name__,
            custom_error_type="prompts",
            custom_error_message="it should be a file or a list of prompt sets",
        ),
    ]
    | None
)


class EvaluationConfig(ConfigSection):
    prompts: Prompts = None
    """Held-out prompts: as in `prompts`, or none. Several sets have a mean reward each in the metrics, and no weights."""
    max_prompts: PositiveInt | None = 256
    """Maximum number of held-out prompts, from the first; of several sets, of each."""
    images_per_prompt: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Images of each held-out prompt; their rewards are averaged. A reward of scope group needs two or more."""
    every: Annotated[int, Field(ge=0)] = 50
    """Training steps between evaluations; 0 evaluates only before and after."""
    steps: Annotated[int, Field(ge=1, le=10_000)] = 40
    """Sampling steps in evaluation, of the deterministic ODE."""
    guidance: float | None = None
    """Guidance scale of the held-out images, and of `sample`; that of training if not given. 1 or less is off."""
    rewards: dict[str, RewardConfig] = {}
    """Rewards that are measured in addition to the trained ones, but not trained on."""

    @model_validator(mode="before")
    @classmethod
    def _without_num_images(cls, values: Any) -> Any:
        """0.4 has `num_images`, how many held-out images are kept; now 8 are."""
        return {k: v for k, v in values.items() if k != "num_images"} if isinstance(values, dict) else values

    @property
    def prompt_files(self) -> str | None:
        """The held-out prompts as a text."""
        return ", ".join(prompt_set.file for prompt_set in self.prompts) if isinstance(self.prompts, list) else self.prompts


class MemoryConfig(ConfigSection):
    embedding_cache_dir: PathText | None = None
    """Folder that keeps prompt embeddings for later runs, such as ~/.cache/flow-grpo: these load no text encoder."""
    offload_text_encoders: bool = False
    """Text encoders are on the CPU while no prompt is encoded."""
    quantize: Literal["nf4", "fp8_layerwise"] | None = None
    """Base weights in 4 or 8 bit, under the float32 LoRA: nf4 by bitsandbytes, fp8_layerwise by diffusers."""
    gradient_checkpointing: bool = False
    """Whether activations of a block are computed again in the backward pass (gradient checkpointing), for a third more time."""
    offload: Literal["groups"] | None = None
    """The blocks' base weights are in the CPU's memory and are copied to the GPU for each call. Set `gradient_checkpointing` too."""
    shard: Literal["fsdp2", "hsdp"] | None = None
    """Shards of the weights under a LoRA, or all weights in full fine-tuning: `fsdp2` or true, over all processes; `hsdp`, over those of
    each machine, which then has all weights, so that machines exchange gradients only (hybrid sharding)."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile of the transformer's repeated blocks: on a GPU minutes of the first step, and again for each size of a batch. `auto`:
    on CUDA, if the run is long enough to save that time, and without `quantize`, `offload` and `shard`."""
    offload_trajectories: bool = False
    """Whether the recorded states of trained steps wait for the update in the CPU's memory, in place of the GPU's."""
    vae_slicing: bool | Literal["tiles"] = False
    """Decodes one image at a time; `tiles`: large images in tiles too, whose seams can be visible."""

    @model_validator(mode="before")
    @classmethod
    def _with_tiles(cls, values: Any) -> Any:
        """0.4 has `vae_tiling` beside `vae_slicing`."""
        if not isinstance(values, dict) or "vae_tiling" not in values:
            return values
        others = {key: value for key, value in values.items() if key != "vae_tiling"}
        return {**others, "vae_slicing": "tiles"} if values["vae_tiling"] else others

    @field_validator("shard", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return "fsdp2" if value is True else None if value is False else value
