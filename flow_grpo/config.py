"""The run config: one typed tree, read from one YAML file and `key.sub=value` pairs, with every cross-field check.

Each field's documentation stands below it.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flow_grpo import checks

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
STAGED = (
    "steps",
    "objective",
    "sampling",
    "optimizer",
    "prompts_per_step",
    "images_per_prompt",
    "microbatch",
    "updates",
    "epochs",
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class LoraConfig(Section):
    rank: PositiveInt = 32
    """Rank of the low-rank matrices."""
    alpha: float = 64
    """Their product is scaled by alpha / rank."""
    targets: list[str] = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    """Modules of the transformer that get one, by the end of their name: the attention projections."""
    start: str | None = None
    """A saved LoRA to go on from: a folder, a .safetensors file or a hub id."""


class WindowConfig(Section):
    kind: Literal["all", "fixed", "random", "sliding", "auto"] = "all"
    """Which steps are stochastic and trained: all of first..last, a fixed run, one drawn at random, one that slides, or, `auto`,
    the run of steps whose noise moves the reward most, measured before the first training step."""
    size: PositiveInt = 3
    """Steps in the window; `all` ignores it."""
    first: Annotated[int, Field(ge=0)] = 0
    """The first step that may be trained."""
    last: int | None = None
    """The last step that may be trained; by default the last but one, since the step to sigma 0 carries no picture."""
    every: PositiveInt = 25
    """A sliding window moves on by one every so many training steps."""


class SamplingConfig(Section):
    steps: Annotated[int, Field(ge=2)] = 10
    """Sampling steps in training."""
    transition: Literal["ode", "flow_sde", "dance_sde", "cps", "exact_sde"] = "flow_sde"
    """The transition of the trained steps, see flow_grpo/sde.py; forward-process objectives need `ode`."""
    noise_level: Annotated[float, Field(ge=0)] = 0.7
    """How much noise a trained step adds."""
    window: WindowConfig = WindowConfig()
    log_prob: Literal["gaussian", "unnormalized"] = "gaussian"
    """The log-probability of a step; `unnormalized` is what Flow-CPS published."""
    shared_start: bool = False
    """Whether the images of a group start from one noise; the steps before the window are then computed once per group. With
    a window of one step, that step alone makes the difference and owns its advantage (TempFlow, arXiv 2508.04324)."""
    solver: Literal["euler", "heun"] = "euler"
    """Forward-process objectives: how the ODE is solved in rollouts; `heun` is of order 2, with two velocities a step."""


class CriticConfig(Section):
    lr: PositiveFloat = 1e-3
    """Learning rate of the critic's AdamW."""
    width: PositiveInt = 128
    """Channels of the critic."""
    gae_lambda: Share = 0.95
    """Generalised advantage estimation: 1 trusts the reward alone, 0 the critic's next value alone."""


class ObjectiveConfig(Section):
    name: str = "grpo"
    """On per-step log-probabilities: grpo, reinforce, grpo_guard, dppo, ppo. On final latents noised afresh: awm, nft, sft, dpo.
    Or one's own function as my_module:my_fn or file.py:my_fn, on steps if the transition is stochastic, else on final latents."""
    options: dict[str, Any] = {}
    """Keyword arguments of one's own function."""
    advantage: str = "grpo"
    """How rewards become advantages, see flow_grpo/advantages.py: grpo, batch_std, dr_grpo, rloo, reinforce_pp, gdpo, rank, or
    one's own function (reward (B,), group (B,)) -> (B,) as my_module:my_fn or file.py:my_fn."""
    clip_low: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 - clip_low; log-probabilities are means, so the range is small. `auto` takes it from the ratios
    seen at each step."""
    clip_high: PositiveFloat | Literal["auto"] = 1e-4
    """The ratio is clipped at 1 + clip_high; above clip_low it is DAPO's clip-higher."""
    clip_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """auto: the share of ratios that the clip range leaves alone."""
    threshold: Annotated[float, Field(ge=0)] = 1e-4
    """dppo: the divergence of new and old step from which on an update may not push further."""
    step_weight: Literal["uniform", "std"] = "uniform"
    """Objectives on steps: weight of a step's loss; `std` weighs by the transition's std (TempFlow, arXiv 2508.04324), which makes
    up for the 1 / std in the gradient of a log-probability."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model."""
    kl: Literal["gaussian", "k3", "flow_grpo", "velocity"] | None = None
    """Which KL: of the transitions (`gaussian`, the default on steps), DeepSeekMath's estimator from log-probabilities (`k3`), the
    published code's, without the step's length (`flow_grpo`), or the distance of the velocities (`velocity`, on final latents)."""
    data: str | None = None
    """sft, dpo: images to train on in place of rollouts, see flow_grpo/pairs.py."""
    draws: PositiveInt = 1
    """On final latents: noise levels drawn for each image and update."""
    sigma_range: tuple[Share, Share] = (0.0, 1.0)
    """On final latents: the range those noise levels are drawn from, before the schedule's shift."""
    weight: Literal["uniform", "ghuber"] = "uniform"
    """awm: weight of the matching loss."""
    beta: PositiveFloat = 1.0
    """nft: how far the implicit policies lie from the old one."""
    advantage_max: PositiveFloat = 5.0
    """nft: the advantage that counts as surely good."""
    old_decay: Share = 0.5
    """nft: how slowly the old policy follows the trained one."""
    dpo_beta: PositiveFloat = 500.0
    """dpo: how sharply the difference of two matching errors decides."""
    critic: CriticConfig = CriticConfig()
    """ppo: its critic."""

    @property
    def on_steps(self) -> bool | None:
        """Whether it takes trained steps, or final latents; None for one's own function, which takes what there is."""
        return None if ":" in self.name else self.name in checks.ON_STEPS


class OptimizerConfig(Section):
    lr: PositiveFloat = 3e-4
    """Learning rate of AdamW."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises to lr."""
    final_lr: Share = 1.0
    """The learning rate falls linearly to this share of lr at the last step; 1 keeps it constant."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's first and second moment."""
    eps: Annotated[float, Field(ge=0)] = 1e-15
    """Added to the root of the second moment. Gradients of mean log-probabilities can be 5e-9, below the usual 1e-8."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""


class RewardConfig(Section):
    weight: float = 1.0
    """Weight in the sum; 0 only reports it."""
    options: dict[str, Any] = {}
    """Arguments of the reward's constructor."""
    on_error: Literal["stop", "drop"] = "stop"
    """What to do when it raises or returns no finite number: stop the run, or leave those groups out of the step."""


class RestingConfig(Section):
    after: Annotated[int, Field(ge=0)] = 0
    """A prompt rests once its group had no signal, all solved or all hopeless, so many times in a row; 0 lets none rest."""
    steps: PositiveInt = 25
    """Training steps for which it rests before it is asked again."""


class EvaluationConfig(Section):
    prompts: str | None = None
    """Held-out prompts: a file as in `prompts`, or none."""
    limit: PositiveInt | None = 256
    """At most so many of them, from the first on."""
    every: Annotated[int, Field(ge=0)] = 50
    """Training steps between evaluations; 0 evaluates only before and after."""
    steps: Annotated[int, Field(ge=1)] = 40
    """Sampling steps in evaluation, of the deterministic ODE."""
    seed: int = 1234
    """Each held-out prompt's picture starts from the noise of (this seed, its place in the file)."""
    rewards: dict[str, RewardConfig] = {}
    """Rewards that are measured but not trained on, beside the trained ones."""


class FlowGRPOConfig(Section):
    """A run. Build it from a YAML file with `FlowGRPOConfig.read(path, overrides)`."""

    model: str = "tiny"
    """A diffusers folder, a hub id, or the name of a shipped model."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the base weights and of autocast; `auto` is bf16 where the device computes in it, else fp32. LoRA: float32."""
    height: PositiveInt | None = None
    """Height of the pictures in pixels; the pipeline's own if not given."""
    width: PositiveInt | None = None
    """Width of the pictures in pixels."""
    guidance: float = 1.0
    """Guidance scale in rollout, training and evaluation; 1 is off."""
    pipeline: dict[str, Any] = {}
    """Further arguments of every pipeline call, such as max_sequence_length or negative_prompt."""
    prompts: str = "prompts/signs_train.txt"
    """Training prompts: .txt (one a line), .jsonl, .csv or .parquet (a column `prompt`, the others are metadata), or a hub data set."""
    rewards: dict[str, RewardConfig] = {"ocr": RewardConfig()}
    """Rewards by name or import path (`my_module:my_fn`, `path/file.py:fn`), each with a weight or with weight and options."""

    steps: PositiveInt = 100
    """Training steps: a rollout of prompts_per_step x images_per_prompt images, and its updates."""
    prompts_per_step: PositiveInt = 8
    """Prompts in a step."""
    images_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Images of a prompt: the group that an image's reward is compared with."""
    microbatch: PositiveInt = 64
    """Images per forward pass, in the rollout and in the update alike, so that the first update's ratio is exactly 1."""
    updates: PositiveInt = 1
    """Optimizer steps on a rollout; each takes an equal share of its prompts."""
    epochs: PositiveInt = 1
    """Times that a rollout is gone through."""
    resample: Annotated[int, Field(ge=0)] = 0
    """Further rounds of prompts drawn at most in a step until all its groups have signal (DAPO, arXiv 2503.14476); 0 is none."""
    resting: RestingConfig = RestingConfig()
    """Prompts that say nothing for the moment are left out for a while."""

    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the moving average of the adapter that is evaluated and saved; 0 is none."""
    evaluation: EvaluationConfig = EvaluationConfig()
    stages: list[dict[str, Any]] = []
    """Parts of the run, one after another, each a set of settings over the others with its own `steps`: supervised
    fine-tuning, then GRPO. A stage may set steps, objective, sampling, optimizer, and the sizes of a step."""

    seed: int = 0
    """Every random draw derives from (seed, step, prompt, image)."""
    output: str = "runs/run"
    """Run folder. Read from a file, it is runs/NAME with the config's file name; `{name}` stands for it in one's own."""
    save_every: PositiveInt = 25
    """Training steps between checkpoints."""
    keep: PositiveInt = 2
    """Checkpoints kept."""
    device: str | None = None
    """Torch device; the accelerator if there is one, else the CPU."""

    @model_validator(mode="before")
    @classmethod
    def _weights_alone(cls, values: Any) -> Any:
        """`ocr: 1.0` is short for `ocr: {weight: 1.0}`."""
        if isinstance(values, dict):
            for holder in (values, values.get("evaluation")):
                if not isinstance(holder, dict):
                    continue
                rewards = holder.get("rewards")
                if isinstance(rewards, list):
                    rewards = dict.fromkeys(rewards, 1.0)
                if isinstance(rewards, dict):
                    short = (int, float)
                    holder["rewards"] = {k: {"weight": v} if isinstance(v, short) else v or {} for k, v in rewards.items()}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "FlowGRPOConfig":
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one, for example `rewards: {ocr: 1.0}`.")
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError("every reward has weight 0, so there is nothing to train on: give one a weight.")
        if self.stages:
            self.steps = sum(stage.steps for _, stage in self.parts())  # each part is checked as it is built
        else:
            checks.check_sizes(self)
            checks.check_objective(self.objective, self.sampling)
            checks.check_window(self.objective, self.sampling)
        return self

    def parts(self) -> list[tuple[int, "FlowGRPOConfig"]]:
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
    def read(cls, path: str | Path | None = None, overrides: list[str] | None = None) -> "FlowGRPOConfig":
        """The config of a YAML file, or of a shipped one by name, with `key.sub=value` pairs over it.

        Raises:
            ValueError: one sentence on what is wrong, and where.
        """
        file = find(path or "tiny_ocr")
        try:
            values = yaml.safe_load(file.read_text()) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())}.") from error
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

    def call(self) -> dict[str, Any]:
        """The arguments of every pipeline call."""
        given = {"height": self.height, "width": self.width}
        return {"guidance_scale": self.guidance, **{k: v for k, v in given.items() if v is not None}, **self.pipeline}

    def dump(self) -> str:
        """As YAML, every field with its value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the settings of `over`, section by section."""
    both = dict(base)
    for key, value in over.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return both


def shipped(name: str) -> Path:
    """A file of `configs/`, which lies beside the package in a checkout and inside it in a wheel."""
    package = Path(__file__).parent
    inside, beside = package / "configs" / name, package.parent / "configs" / name
    return inside if inside.exists() else beside


def find(path: str | Path) -> Path:
    """A config file: a path, or the name of a shipped one."""
    for candidate in (Path(path), shipped(f"{path}.yaml"), shipped(str(path))):
        if candidate.is_file():
            return candidate
    names = sorted(p.stem for p in shipped("").glob("*.yaml"))
    raise ValueError(f"there is no config {path}.{checks.suggest(str(path), names)} Shipped ones: {', '.join(names)}.")


def _override(values: dict, pair: str) -> None:
    key, equals, text = pair.partition("=")
    if not equals or not key:
        raise ValueError(f"{pair!r} is not of the form key.sub=value, for example optimizer.lr=1e-4.")
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(f"{pair!r}: {parent} is a single value, it has no {last}.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{pair!r}: the value is not valid YAML.") from error
    values[last] = float(value) if isinstance(value, str) and _is_number(value) else value


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
        section: Any = FlowGRPOConfig
        for part in first["loc"][:-1]:
            field = getattr(section, "model_fields", {}).get(part)
            section = field.annotation if field else section
        known = list(getattr(section, "model_fields", {}))
        return f"there is no setting {where}.{checks.suggest(str(first['loc'][-1]), known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    message = first["msg"].replace("Input should", "it should")
    return f"{where} is {first['input']!r}, but {message}."
