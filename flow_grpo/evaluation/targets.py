"""Targets of `eval`, from the words on its command line: a run, a checkpoint, a LoRA, a model, or images on disk."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from flow_grpo import rewards
from flow_grpo.config.loading import SUFFIXES, bundled_file
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.data import image_sets
from flow_grpo.data.grid_layout import GridOptions
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded
from flow_grpo.policy import hub
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.training.setup import RESERVED_NAMES

TARGET_KINDS = "a run folder, a checkpoint, a LoRA, a model, a config, a grid image or a folder of images"


@dataclass(frozen=True)
class ModelTarget:
    """A model that generates images: a base model, or one with a LoRA or a checkpoint's weights.

    Attributes:
        config_file: the file of `args`, if it was found in the folder of the weights and not given by the user.
    """

    name: str
    description: str
    args: FlowGRPOConfig
    lora: str | None = None
    checkpoint: Path | None = None
    config_file: Path | None = None

    @property
    def is_base(self) -> bool:
        """Whether it has no trained weights."""
        return self.lora is None and self.checkpoint is None

    @property
    def pipeline(self) -> tuple:
        """Equal for targets with the same base model that is called with the same arguments."""
        args = self.args
        return args.model, args.device, args.dtype, repr(args.memory), repr(sorted(args.evaluation_call_kwargs().items()))


@dataclass(frozen=True)
class ImageTarget:
    """Images on disk."""

    name: str
    description: str
    image_set: image_sets.ImageSet


Target = ModelTarget | ImageTarget


@dataclass(frozen=True)
class TargetOptions:
    """Options of `eval` that decide what its words mean.

    Attributes:
        config: for all LoRAs and models, even if they have their own.
        overrides: `key.sub=value` settings that override every config.
        prompts: for images that don't contain their prompts, or metadata for those that do; a text is the prompt of all images.
        grid: how to cut grid images that `sample` did not write.
        limit: maximum number of prompts of images on disk.
        fallback_config: a config that is a target too, for LoRAs and models that have no config of their own.
    """

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    prompts: PromptSet | str | None = None
    grid: GridOptions | None = None
    limit: int | None = None
    fallback_config: str | None = None


def resolve_targets(words: list[str], options: TargetOptions, loras: list[str] | None = None) -> list[Target]:
    """The targets that the words name, each with its own name. Base models come first; that of a LoRA is added if it is not given.

    An added base model has the settings of its first LoRA.

    Args:
        loras: further words; a hub id among them is a LoRA, not a model.

    Raises:
        FlowGRPOError: a word names no target, or a target is incomplete.
    """
    options = replace(options, fallback_config=next((word for word in words if _is_config(word)), None))
    everything = [*words, *(loras or [])]
    if len(set(everything)) < len(everything):
        raise FlowGRPOError(
            f"{next(w for w in everything if everything.count(w) > 1)} is given twice: give each target once."
        )
    resolved = [_resolve(word, options) for word in words]
    resolved += [_folder(Path(word), options) if Path(word).is_dir() else _lora(Path(word), options) for word in loras or []]
    targets = _with_bases(resolved)
    return [replace(t, name=name) for t, name in zip(targets, _unique_names([t.name for t in targets]), strict=True)]


def reference(target: Target, targets: list[Target]) -> Target:
    """The target that another is compared with: its base model, else the first target."""
    if isinstance(target, ImageTarget) or target.is_base:
        return targets[0]
    own = (t for t in targets if isinstance(t, ModelTarget) and t.is_base and t.pipeline == target.pipeline)
    return next(own, targets[0])


def unnamed_rewards(run: RunReader, args: FlowGRPOConfig) -> list[str]:
    """The rewards that a run was trained on and that its config `args` has no name for by which they could be loaded, as in the metrics.

    They were given to the trainer as functions that can't be imported.
    """
    names = rewards.metric_names(args.rewards, RESERVED_NAMES)
    loadable = {text for pair in names.items() if pair[0] in rewards.REGISTRY or ":" in pair[0] for text in pair}
    return [name for name in run.trained if name not in loadable]


def check_rewards_are_named(target: ModelTarget) -> None:
    """Check that the config of a run's weights names what they were trained on, and files that are here. FlowGRPOError if not."""
    if target.config_file is None or not layout.is_run(target.config_file.parent):
        return
    recorded = FlowGRPOConfig.from_yaml(target.config_file)
    unnamed = unnamed_rewards(RunReader(target.config_file.parent), recorded)
    if unnamed and target.args.rewards == recorded.rewards:
        raise FlowGRPOError(
            f"{target.config_file} has no name to load {', '.join(unnamed)} by, on which the run was trained from Python: say what "
            "to measure by --reward, such as --reward my_reward.py:my_fn."
        )
    for name, setting in target.args.rewards.items():
        file = name.rpartition(":")[0]
        if name in recorded.rewards and file.endswith(".py") and setting.remote is None and not expanded(file).is_file():
            raise FlowGRPOError(
                f"{target.config_file} names the reward {name}, and there is no file {file} in {Path.cwd()}: start the command in the "
                "folder that has it, or say what to measure by --reward."
            )


def _unique_names(names: list[str]) -> list[str]:
    """The names, with a number added to duplicates."""
    unique: list[str] = []
    for name in names:
        number, numbered = 1, name
        while numbered in unique:
            number += 1
            numbered = f"{name} ({number})"
        unique.append(numbered)
    return unique


def _with_bases(targets: list[Target]) -> list[Target]:
    models = [t for t in targets if isinstance(t, ModelTarget)]
    bases: dict[tuple, ModelTarget] = {}
    for model in models:  # in order: the settings of the first one are used
        base = ModelTarget(model.args.model, f"base model {model.args.model}", model.args, config_file=model.config_file)
        bases.setdefault(model.pipeline, model if model.is_base else base)
    if len(bases) == 1:
        bases = {pipeline: replace(model, name="base") for pipeline, model in bases.items()}
    if all(model.is_base for model in models):  # none was added: keep the order
        return [bases[t.pipeline] if isinstance(t, ModelTarget) else t for t in targets]
    return [*bases.values(), *(t for t in targets if not (isinstance(t, ModelTarget) and t.is_base))]


def _resolve(word: str, options: TargetOptions) -> Target:
    path = Path(word)
    if _is_config(word):
        args = FlowGRPOConfig.from_yaml(word, options.overrides)
        return ModelTarget(args.model, f"base model {args.model}", args)
    if image_sets.is_image_file(path):
        return _images(path, options)
    if path.is_dir():
        return _folder(path, options)
    if path.suffix == ".safetensors" and path.is_file():
        return _lora(path, options)
    if not path.exists() and (word in hub.BUNDLED_MODELS or hub.looks_like_hub_id(word)):
        try:
            hub.resolve_model(word)
        except FlowGRPOError as error:
            raise type(error)(f"there is no folder {word}, and {error}") from error
        return _model(word, options)
    problem = f"{word} is not" if path.exists() else f"there is no {word}: give"
    raise FlowGRPOError(f"{problem} {TARGET_KINDS}.")


def _folder(path: Path, options: TargetOptions) -> Target:
    if (path / layout.STATE).is_file():
        return _checkpoint(path, options)
    if (path / "model_index.json").is_file():
        return _model(str(path), options)
    if any(path.glob("*.safetensors")):
        return _lora(path, options)
    if (path / layout.CONFIG).is_file():
        return _run(path, options)
    if not image_sets.has_images(path):
        raise FlowGRPOError(f"{path} is not {TARGET_KINDS}.")
    return _images(path, options)


def _run(path: Path, options: TargetOptions) -> ModelTarget:
    args = FlowGRPOConfig.from_yaml(path / layout.CONFIG, options.overrides)
    what, folder = ("transformer", path / layout.TRANSFORMER) if args.lora is None else ("LoRA", path / layout.LORA)
    if not folder.is_dir():
        raise FlowGRPOError(
            f"the run {path} has no {what} yet: give one of its checkpoints, in {path / layout.CHECKPOINTS}."
        )
    return ModelTarget(path.resolve().name, f"{what} {folder}", args, str(folder), config_file=path / layout.CONFIG)


def _checkpoint(path: Path, options: TargetOptions) -> ModelTarget:
    folder = path.resolve()
    run = folder.parent.parent
    if not (run / layout.CONFIG).is_file():
        raise FlowGRPOError(
            f"the checkpoint {path} is not in its run's folder, whose {layout.CONFIG} has its model and settings."
        )
    args = FlowGRPOConfig.from_yaml(run / layout.CONFIG, options.overrides)
    return ModelTarget(
        f"{run.name}/{folder.name}", f"checkpoint {path}", args, checkpoint=folder, config_file=run / layout.CONFIG
    )


def _lora(path: Path, options: TargetOptions) -> ModelTarget:
    hub.resolve_lora(path)  # raises if a path is mistyped; a hub id is looked up when it is loaded
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    candidates = (folder / layout.CONFIG, folder.parent / layout.CONFIG) if path.exists() else ()
    own = next((file for file in candidates if file.is_file()), None) if options.config is None else None
    config = options.config or own or options.fallback_config
    if config is None:
        raise FlowGRPOError(
            f"the LoRA {path} has no config.yaml that names its model: give a config of that model by --config."
        )
    args = FlowGRPOConfig.from_yaml(config, options.overrides)
    named = path.parent if path.name == hub.WEIGHTS else path  # all exports have that name
    return ModelTarget("/".join(named.parts[-2:]), f"LoRA {path}", args, str(path), config_file=own)


def _model(name: str, options: TargetOptions) -> ModelTarget:
    own_config = layout.config_near(name) if options.config is None else None
    config = options.config or own_config or options.fallback_config
    own = [*options.overrides, f"model={name}"]
    args = FlowGRPOConfig.from_yaml(config, own) if config else FlowGRPOConfig.for_model(name, options.overrides)
    return ModelTarget(name, f"base model {name}", args, config_file=own_config)


def _images(path: Path, options: TargetOptions) -> ImageTarget:
    image_set = image_sets.read(path, options.prompts, options.grid).head(options.limit)
    return ImageTarget("/".join(path.parts[-2:]), f"images of {path}", image_set)


def _is_config(word: str) -> bool:
    path = Path(word)
    return not path.is_dir() and (path.suffix in SUFFIXES or bundled_file(f"{word}.yaml").is_file())
