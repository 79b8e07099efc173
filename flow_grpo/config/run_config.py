"""The run config: one typed tree, read from one YAML file and `key.sub=value` pairs, with every cross-field check.

Each field's documentation stands below it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from flow_grpo import methods
from flow_grpo.config import validation
from flow_grpo.config.loading import parse_yaml, read_yaml
from flow_grpo.config.sections import (
    ConfigSection,
    EvaluationConfig,
    LoraConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Pixels,
    PositiveInt,
    PromptSkippingConfig,
    RewardConfig,
    SamplingConfig,
)

STAGED = (
    "steps",
    "objective",
    "sampling",
    "optimizer",
    "prompts_per_step",
    "images_per_prompt",
    "resample",
    "microbatch",
    "updates",
    "epochs",
)

NAMED = [["rewards"], ["evaluation", "rewards"]]  # settings whose keys are names of rewards


EMBEDDED = {"tiny": "prompts/signs_train.txt"}  # the training prompts of models that draw nothing else


def _embedded_prompts(values: dict[str, Any]) -> str | None:
    return EMBEDDED.get(values.get("model", ""))


class FlowGRPOConfig(ConfigSection):
    """A run. Build it from a YAML file with `FlowGRPOConfig.from_yaml(path, overrides)`."""

    model: str = "tiny"
    """A diffusers folder, a hub id, or the name of a shipped model."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the base weights and of autocast; `auto` is bf16 where the device computes in it, else fp32. LoRA: float32."""
    height: Pixels | None = None
    """Height of the pictures in pixels; the pipeline's own if not given."""
    width: Pixels | None = None
    """Width of the pictures in pixels."""
    guidance: float = 1.0
    """Guidance scale in rollout, training and evaluation; 1 is off."""
    pipeline: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of every pipeline call, such as max_sequence_length or negative_prompt."""
    prompts: str | None = Field(default_factory=_embedded_prompts)
    """Training prompts: .txt (one a line), .json, .jsonl, .csv, .tsv or .parquet (a column `prompt`, the others are metadata), also by
    https; a hub data set; or a name of flow_grpo/data/prompt_sets.py. Required, except for the embedded model, which has its own."""
    rewards: dict[str, RewardConfig] = Field(default_factory=lambda: {"ocr": RewardConfig()})
    """Rewards by name or import path (`my_module:my_fn`, `path/file.py:fn`), each with a weight or with weight and options."""

    steps: PositiveInt = 100
    """Training steps: a rollout of prompts_per_step x images_per_prompt images, and its updates."""
    prompts_per_step: PositiveInt = 8
    """Prompts in a step."""
    images_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Images of a prompt: the group that an image's reward is compared with."""
    microbatch: PositiveInt = 64
    """Images per forward pass, in the rollout and in the update alike, so that the first update's ratio is exactly 1; with
    several processes, of each. A run on one process goes on with half of it when memory runs out; `auto` begins with the largest even
    size up to 64 that divides a step."""
    updates: PositiveInt = 1
    """Optimizer steps on a rollout; each takes an equal share of its prompts."""
    epochs: PositiveInt = 1
    """Times that a rollout is gone through."""
    resample: Annotated[int, Field(ge=0)] = 0
    """Further rounds of prompts drawn at most in a step until all its groups have signal (DAPO, arXiv 2503.14476); 0 is none."""
    resting: PromptSkippingConfig = PromptSkippingConfig()
    """Prompts that say nothing for the moment are left out for a while."""

    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    lora: LoraConfig | None = LoraConfig()
    """The adapter that is trained; null trains all weights of the transformer, in float32, and keeps the base model beside them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the moving average of the adapter that is evaluated and saved; 0 is none."""
    ema_every: PositiveInt = 1
    """Optimizer steps between two updates of that moving average."""
    evaluation: EvaluationConfig = EvaluationConfig()
    stages: list[dict[str, Any]] = Field(default_factory=list)
    """Parts of the run, one after another, each a set of settings over the others with its own `steps`: supervised
    fine-tuning, then GRPO. A stage may set steps, objective, sampling, optimizer, and the sizes of a step."""

    seed: int = 0
    """Every random draw derives from (seed, step, prompt, image)."""
    output: str = "runs/run"
    """Run folder. Read from a file, it is runs/NAME with the config's file name; `{name}` stands for it in one's own."""
    save_every: PositiveInt = 25
    """Training steps between checkpoints."""
    sample_every: Annotated[int, Field(ge=0)] = 0
    """Training steps between grids of images in RUN/samples, of the first held-out (or training) prompts with fixed seeds; they are not
    scored. 0 draws none."""
    keep: PositiveInt = 2
    """Checkpoints kept."""
    device: str | None = None
    """Torch device; the accelerator if there is one, else the CPU."""
    trackers: dict[str, dict[str, Any]] = Field(default={"tensorboard": {}})
    """Programs that show the run as well, through accelerate: tensorboard (its files in RUN/tensorboard), wandb, mlflow, trackio,
    swanlab. A list of them, or each with arguments of its own, {wandb: {project: signs, entity: me}}; [] is none."""

    def __init__(self, **settings: Any) -> None:
        """Takes the settings as keywords. ValueError: one sentence on what is wrong."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _weights_alone(cls, values: Any) -> Any:
        """`ocr: 1.0` is short for `ocr: {weight: 1.0}`."""
        if isinstance(values, dict):
            _spell_out_rewards(values)
        return values

    @model_validator(mode="before")
    @classmethod
    def _trackers_alone(cls, values: Any) -> Any:
        """`[wandb]` is short for `{wandb: {}}`."""
        given = values.get("trackers") if isinstance(values, dict) else None
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list | dict):
            full = {name: names[name] or {} for name in names} if isinstance(names, dict) else {str(n): {} for n in names}
            values = {**values, "trackers": full}
        return values

    @model_validator(mode="before")
    @classmethod
    def _auto_microbatch(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("microbatch") != "auto" or (size := _dividing(values)) is None:
            return values
        if isinstance(stages := values.get("stages"), list):
            values = {**values, "stages": [_with_own_microbatch(stage, values, size) for stage in stages]}
        return {**values, "microbatch": size}

    @model_validator(mode="after")
    def _consistent(self) -> "FlowGRPOConfig":
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one, for example `rewards: {ocr: 1.0}`.")
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError("every reward has weight 0, so there is nothing to train on: give one a weight.")
        validation.check_trackers(self.trackers)
        if self.stages:
            self.steps = sum(stage.steps for _, stage in self.resolved_stages())  # each part is checked as it is built
        else:
            validation.check_objective(self.objective, self.sampling)
            validation.check_sizes(self)
            validation.check_window(self.objective, self.sampling)
            validation.check_whole(self)
            validation.check_zero(self)
        return self

    def with_model(self, model: str) -> "FlowGRPOConfig":
        """The settings for another model. Prompts that nobody has set are those of the model."""
        own = {} if "prompts" in self.model_fields_set else {"prompts": EMBEDDED.get(model)}
        return self.model_copy(update={"model": model, **own})

    @property
    def training_prompts(self) -> str:
        """`prompts`. ValueError if there are none."""
        if self.prompts is None:
            raise ValueError(
                f"there are no prompts to train {self.model} on: set prompts to a file of them or a hub data set; "
                "prompts/ocr_train.txt and prompts/geneval_train.jsonl are shipped."
            )
        return self.prompts

    @property
    def method(self) -> methods.Objective:
        """What the objective needs of the run."""
        return methods.objective(self.objective.name, methods.TRANSITIONS[self.sampling.transition].stochastic)

    @property
    def trains_on_zero_std_groups(self) -> bool:
        """Whether images of a group without signal have a loss: by the KL, or since the objective is not 0 at advantage 0."""
        method = self.method
        return method.rows == "all" and bool(self.objective.kl_weight or not method.zero_at_zero_advantage)

    def resolved_stages(self) -> list[tuple[int, "FlowGRPOConfig"]]:
        """The run's parts: the training step at which each begins, and its settings. Without `stages`, the run itself."""
        if not self.stages:
            return [(0, self._fitted())]
        base, found, begin = self.model_dump(exclude={"stages"}), [], 0
        for number, stage in enumerate(self.stages):
            strange = next((key for key in stage if key not in STAGED), None)
            if strange is not None or "steps" not in stage:
                what = f"can't set {strange}" if strange else "has no steps"
                raise ValueError(f"stage {number + 1} {what}: give steps, and what may change, {', '.join(STAGED[1:])}.")
            try:
                part = FlowGRPOConfig.model_validate(_merged(base, stage))
            except ValidationError as error:
                raise ValueError(f"stage {number + 1}: {_sentence(error)}") from error
            found.append((begin, part._fitted()))
            begin += part.steps
        return found

    def _fitted(self) -> "FlowGRPOConfig":
        """With a micro-batch no larger than a step."""
        return self.model_copy(update={"microbatch": min(self.microbatch, self.prompts_per_step * self.images_per_prompt)})

    @classmethod
    def from_yaml(cls, path: str | Path | None = None, overrides: list[str] | None = None) -> "FlowGRPOConfig":
        """The config of a YAML file, or of a shipped one by name, with `key.sub=value` pairs over it.

        Raises:
            ValueError: one sentence on what is wrong, and where.
        """
        file = find(path or "tiny_ocr")
        values = read_yaml(file) or {}
        if not isinstance(values, dict):
            raise ValueError(f"{file} must hold `key: value` lines.")
        for pair in overrides or []:
            _override(values, pair)
        values.setdefault("output", "runs/{name}")
        values["output"] = str(values["output"]).replace("{name}", file.stem)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(f"{file.name}: {_sentence(error)}") from error

    @classmethod
    def for_model(cls, model: str, overrides: list[str] | None = None) -> "FlowGRPOConfig":
        """The defaults for a model, with `key.sub=value` pairs over them. ValueError as for `from_yaml`."""
        values: dict[str, Any] = {"model": model}
        for pair in overrides or []:
            _override(values, pair)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from error

    def with_launcher_settings(self) -> "FlowGRPOConfig":
        """With the shares that `accelerate launch --use_deepspeed` or `--use_fsdp` asked for, whose other settings are the config's.

        ValueError if the config asks for others, or does not go with them.
        """
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
            raise ValueError("DeepSpeed's config file is not read here: launch with --zero_stage, or set memory.shard.")
        told = {"ACCELERATE_USE_DEEPSPEED": f"zero{stage}", "ACCELERATE_USE_FSDP": "fsdp2"}
        asked = next((shares for name, shares in told.items() if os.environ.get(name) == "true"), "zero0")
        if asked in ("zero0", self.memory.shard):
            return self
        if self.memory.shard is not None:
            raise ValueError(
                f"memory.shard={self.memory.shard}, but accelerate was launched with {asked}: leave one of them out."
            )
        try:
            return FlowGRPOConfig.model_validate(_merged(self.model_dump(), {"memory": {"shard": asked}}))
        except ValidationError as error:
            raise ValueError(_sentence(error)) from error

    def pipeline_call_kwargs(self) -> dict[str, Any]:
        """The arguments of every pipeline call."""
        given = {"height": self.height, "width": self.width}
        return {"guidance": self.guidance, **{k: v for k, v in given.items() if v is not None}, **self.pipeline}

    def differences(self, now: "FlowGRPOConfig") -> dict[str, tuple[Any, Any]]:
        """The settings that change a run's numbers and differ, here and `now`: not its length, its places, or what only looks at it."""
        free: Any = dict.fromkeys(("steps", "output", "save_every", "sample_every", "keep", "device", "trackers"), True)
        free["evaluation"] = {"every", "pictures", "rewards"}  # the others make evaluations that can't be compared
        free["memory"] = {"shard"}  # whose processes' shares a checkpoint does not know
        free["rewards"] = {"__all__": {"remote", "isolate", "python", "timeout"}}  # where a reward runs is not what it says
        here, there = self.model_dump(exclude=free), now.model_dump(exclude=free)
        return {name: (here[name], there[name]) for name in there if there[name] != here[name]}

    def to_yaml(self) -> str:
        """As YAML, every field with its value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _dividing(values: dict[str, Any]) -> int | None:
    """The largest even micro-batch up to 64 that divides a step; None if the step's sizes are no numbers."""
    sizes = [
        values.get(name, FlowGRPOConfig.model_fields[name].default) for name in ("prompts_per_step", "images_per_prompt")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    rows = sizes[0] * sizes[1]
    even = [n for n in range(2, 65, 2) if rows % n == 0]
    return max(even or [n for n in range(1, 65) if rows % n == 0])


def _with_own_microbatch(stage: Any, values: dict[str, Any], size: int) -> Any:
    """A stage whose steps are of other sizes, with the micro-batch that divides them, unless it names one."""
    if not isinstance(stage, dict) or "microbatch" in stage or (own := _dividing({**values, **stage})) in (None, size):
        return stage
    return {**stage, "microbatch": own}


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the settings of `over`, section by section."""
    both = dict(base)
    for key, value in over.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return both


def shipped(name: str) -> Path:
    """A file of `configs/`, which lies beside the package in a checkout and inside it in a wheel."""
    package = Path(__file__).parent.parent
    inside, beside = package / "configs" / name, package.parent / "configs" / name
    return inside if inside.exists() else beside


def find(path: str | Path) -> Path:
    """A config file: a path, or the name of a shipped one."""
    for candidate in (Path(path), shipped(f"{path}.yaml"), shipped(str(path))):
        if candidate.is_file():
            return candidate
    names = sorted(p.stem for p in shipped("").glob("*.yaml"))
    raise ValueError(f"there is no config {path}.{validation.suggest(str(path), names)} Shipped ones: {', '.join(names)}.")


def _spell_out_rewards(values: dict) -> None:
    """Makes `{ocr: {weight: 1.0}}` of `[ocr]` and of `{ocr: 1.0}`."""
    for holder in (values, values.get("evaluation")):
        if not isinstance(holder, dict):
            continue
        rewards = holder.get("rewards")
        if isinstance(rewards, list) and all(isinstance(name, str) for name in rewards):
            rewards = dict.fromkeys(rewards, 1.0)
        if isinstance(rewards, dict):
            short = (int, float)
            holder["rewards"] = {k: {"weight": v} if isinstance(v, short) else v or {} for k, v in rewards.items()}


def _override(values: dict, pair: str) -> None:
    key, equals, text = _key_and_value(pair)
    if not equals or not key:
        raise ValueError(f"{pair!r} is not of the form key.sub=value, for example optimizer.lr=1e-4.")
    _spell_out_rewards(values)
    *parents, last = _steps(values, key)
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(f"{pair!r}: {parent} is a single value, it has no {last}.")
    value = parse_yaml(text, f"the value of {key}")
    value = float(value) if isinstance(value, str) and _is_number(value) else value
    if parents in NAMED and isinstance(value, int | float) and isinstance(values.get(last), dict):
        values, last = values[last], "weight"  # the reward's options stay
    values[last] = value


def _key_and_value(pair: str) -> tuple[str, str, str]:
    """Splits at the first equals sign that is outside of quotes."""
    found = re.match(r"""((?:"[^"]*"|'[^']*'|[^"'=])*)(=)(.*)""", pair, re.DOTALL)
    return (found[1], found[2], found[3]) if found else (pair, "", "")


def _steps(values: dict, key: str) -> list[str]:
    """The keys that `a.b.c` goes through.

    A reward's name may have dots: it is one of `values`, or quoted, or `path/my.py:function`.
    """
    holder = next((holder for holder in NAMED if key.startswith(f"{'.'.join(holder)}.")), None)
    if holder is None:
        return key.split(".")
    known: Any = values
    for step in holder:
        known = known.get(step) if isinstance(known, dict) else None
    names = [re.escape(name) for name in sorted(map(str, known), key=len, reverse=True)] if isinstance(known, dict) else []
    name = "|".join([*names, '"[^"]+"', "'[^']+'", r".+:\w+", "[^.]+"])
    found = re.fullmatch(rf"({name})(?:\.(.*))?", key.removeprefix(f"{'.'.join(holder)}."))
    if found is None:
        return key.split(".")
    return [*holder, found[1].strip("\"'"), *(found[2].split(".") if found[2] else [])]


def _is_number(text: str) -> bool:
    """YAML reads 1e-4, without a dot, as a string."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(
        str(part) for part in first["loc"] if str(part).isidentifier() or ":" in str(part)
    )  # not pydantic's own
    if first["type"] == "extra_forbidden":
        return f"there is no setting {where}.{_did_you_mean([str(part) for part in first['loc']])}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    message = first["msg"].replace("Input should", "it should")
    return f"{where} is {first['input']!r}, but {message}."


def _did_you_mean(place: list[str]) -> str:
    """What an unknown setting may have been meant to be: one of its very name elsewhere, else one like it, here or elsewhere."""
    *parents, word = place
    paths = sorted(_paths(FlowGRPOConfig), key=len, reverse=True)
    named = [".".join(path) for path in reversed(paths) if path[-1] == word]
    if named:
        return f" Did you mean {' or '.join(named)}?"
    section: type[ConfigSection] = FlowGRPOConfig
    for part in parents:
        section = next(iter(_sections(section.model_fields.get(part))), section)
    elsewhere = {path[-1]: ".".join(path) for path in paths}
    return validation.suggest(word, list(section.model_fields)) or validation.suggest(word, elsewhere)


def _paths(section: type[ConfigSection], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All settings as the keys that lead to them, those of a reward left out, which has a name of its own."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        for inner in _sections(field):
            if inner is not RewardConfig:
                yield from _paths(inner, (*above, name))


def _sections(field: FieldInfo | None) -> list[type[ConfigSection]]:
    """The section that a setting is, or holds: lora may be null too, and rewards have names."""
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ConfigSection)]
