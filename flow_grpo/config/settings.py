"""The settings of a run, each with its default and documentation."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, field_validator

from flow_grpo.config.loading import TRAINING_PROMPTS
from flow_grpo.config.objective import Objective
from flow_grpo.config.objective_by_name import read_objective
from flow_grpo.config.sections import (
    ConfigSection,
    EvaluationConfig,
    LoraConfig,
    MemoryConfig,
    OptimizerConfig,
    PathText,
    Pixels,
    PositiveInt,
    Prompts,
    PromptSetConfig,
    RewardConfig,
    SamplingConfig,
    Seed,
)
from flow_grpo.errors import FlowGRPOError


def _bundled_prompts(values: dict[str, Any]) -> str | None:
    return TRAINING_PROMPTS.get(values.get("model", ""))


class RunSettings(ConfigSection):
    """The fields of `FlowGRPOConfig`, and what follows from them alone."""

    model: PathText = "tiny"
    """A diffusers folder, a hub id, or the name of a shipped model."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the base weights and of autocast; `auto` is bf16 where the device is faster in it, else fp32. A LoRA is always float32."""
    height: Pixels | None = None
    """Height of the images in pixels; the pipeline's own if not given."""
    width: Pixels | None = None
    """Width of the images in pixels."""
    guidance: float = 1.0
    """Guidance scale of the trained velocity, and of rollouts and evaluation unless sampling.guidance or evaluation.guidance is given; 1 or
    less is off."""
    pipeline_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of every pipeline call, such as max_sequence_length or negative_prompt."""
    prompts: Prompts = Field(default_factory=_bundled_prompts)
    """Training prompts: .txt (one a line), .json, .jsonl, .csv, .tsv or .parquet (a column `prompt`, the others are metadata), also by
    https; a hub data set; or a known prompt set by name. The names are in flow_grpo/data/prompt_sources.py. Required, except for the
    embedded model, which has its own. A list of sets `{file: ..., weight: ..., rewards: ...}` mixes them by weight; advantages are
    normalised within a set."""
    rewards: dict[str, RewardConfig] = Field(default_factory=lambda: {"ocr": RewardConfig()})
    """Rewards by name or import path (`my_module:my_fn`, `path/file.py:fn`), each with a weight or with weight and options."""

    steps: Annotated[int, Field(gt=0, le=10**7)] = 100
    """Training steps: a rollout of prompts_per_step x images_per_prompt images, and its updates."""
    prompts_per_step: Annotated[int, Field(gt=0, le=100_000)] = 8
    """Prompts in a step."""
    images_per_prompt: Annotated[int, Field(ge=2, le=10_000)] = 16
    """Images of a prompt: the group that an image's reward is compared with."""
    microbatch: PositiveInt = 64
    """Images per forward pass, in the rollout and in the update alike, so that the first update's ratio is exactly 1; with
    several processes, of each. A run on one process goes on with half of it when memory runs out; `auto` begins with the largest even
    size up to 64 that divides a step."""
    updates: PositiveInt = 1
    """Optimizer steps on a rollout; each takes an equal share of its prompts."""
    epochs: Annotated[int, Field(gt=0, le=1000)] = 1
    """Passes over each rollout."""

    sampling: SamplingConfig = SamplingConfig()
    objective: SerializeAsAny[Objective] = Field(default_factory=lambda: read_objective({}))
    lora: LoraConfig | None = LoraConfig()
    """The adapter that is trained; null trains all weights of the transformer, in float32, and keeps a copy of the base model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the moving average of the adapter that is evaluated and saved; 0 turns it off. At step s it is at most (1 + s) / (10 + s),
    so that a short run's average follows: 0.9 is reached at step 80."""
    ema_every: PositiveInt = 1
    """Optimizer steps between two updates of that moving average."""
    evaluation: EvaluationConfig = EvaluationConfig()
    stages: list[dict[str, Any]] = Field(default_factory=list)
    """Parts of the run, one after another, each a set of settings over the others with its own `steps`: supervised
    fine-tuning, then GRPO. A stage may set steps, objective, sampling, optimizer, and the sizes of a step."""

    seed: Seed = 0
    """Every random draw derives from (seed, step, prompt, image)."""
    output_dir: PathText = "runs/run"
    """Run folder. Default for a config file: runs/NAME, its file name. `{name}` in your own value is replaced by it."""
    save_every: PositiveInt = 25
    """Training steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept."""
    device: str | None = None
    """Torch device; the accelerator if there is one, else the CPU."""
    trackers: dict[str, dict[str, Any]] = Field(default={"tensorboard": {}})
    """Tracking services that receive the metrics, through accelerate: tensorboard (its files in RUN/tensorboard), wandb, mlflow, trackio,
    swanlab. A list of them, or each with arguments of its own, {wandb: {project: signs, entity: me}}; [] for none."""

    @field_validator("objective", mode="before")
    @classmethod
    def _of_its_type(cls, value: Any) -> Any:
        """The section of the objective that is named, with the settings of that objective alone."""
        return read_objective(value.given() if type(value) is Objective else value)

    @property
    def training_prompts(self) -> str | list[PromptSetConfig]:
        """`prompts`. FlowGRPOError if there are none."""
        if self.prompts is None:
            raise FlowGRPOError(
                f"there are no prompts to train {self.model} on: set prompts to a file of them or a hub data set; "
                "prompts/ocr_train.txt and prompts/geneval_train.jsonl are shipped."
            )
        return self.prompts

    @property
    def trains_on_zero_std_groups(self) -> bool:
        """Whether images of a group without signal have a loss: by an anchor, or since the objective is not 0 at advantage 0."""
        needs = self.objective.needs
        is_zero = needs.zero_at_zero_advantage or (needs.zero_at_ratio_1 and self.updates * self.epochs == 1)
        return needs.selection == "all" and bool(self.objective.is_anchored or not is_zero)

    @property
    def updated_images(self) -> int:
        """Images of a step that pass through an update: all, or the best one or two of each group."""
        needs = self.objective.needs
        selects = needs.selection != "all" and self.dataset is None
        return self.prompts_per_step * (needs.rows_per_pair if selects else self.images_per_prompt)

    @property
    def evaluated_steps(self) -> list[int]:
        """The steps after which a run with held-out prompts evaluates: 0, before training, every `every`, and the last one."""
        every = self.evaluation.every
        return sorted({0, self.steps, *(range(0, self.steps, every) if every else ())})

    @property
    def dataset(self) -> str | None:
        """Images to train on instead of rollouts, if the objective is given any."""
        return getattr(self.objective, "dataset", None)
