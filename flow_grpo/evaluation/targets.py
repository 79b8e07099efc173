"""What `eval` measures, by the word that a user gives for it: a run, a checkpoint, a LoRA, a model, or pictures that are there."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

from flow_grpo.config.bundled import bundled_file
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.data import image_sets as gallery
from flow_grpo.data.grid_options import GridOptions
from flow_grpo.data.prompts import PromptSet
from flow_grpo.policy import hub
from flow_grpo.run_folder import layout

WHAT = "a run folder, a checkpoint, a LoRA, a model, a config, a sheet or a folder of pictures"


@dataclass(frozen=True)
class Model:
    """A model that draws: a base model, or one with a LoRA or a checkpoint's adapter on it.

    Attributes:
        found: the file of `args`, if it lay beside the weights and was not named by the user.
    """

    name: str
    what: str
    args: FlowGRPOConfig
    lora: str | None = None
    checkpoint: Path | None = None
    found: Path | None = None

    @property
    def is_base(self) -> bool:
        return self.lora is None and self.checkpoint is None

    @property
    def pipeline(self) -> tuple:
        """What tells its base model, and how that is called, from another."""
        args = self.args
        return args.model, args.device, args.dtype, repr(args.memory), repr(sorted(args.pipeline_call_kwargs().items()))


@dataclass(frozen=True)
class Pictures:
    """Pictures that are there."""

    name: str
    what: str
    gallery: gallery.ImageSet


Target = Model | Pictures


@dataclass(frozen=True)
class Reading:
    """How words are read.

    Attributes:
        config: of all LoRAs and models, whatever lies beside them.
        overrides: `key.sub=value` over every config.
        prompts: of pictures that don't carry them, or metadata for those that do; a text is the prompt of all.
        sheet: how sheets that don't say it are cut.
        limit: of pictures at most those of so many prompts.
        beside: a config that is a target too, for LoRAs and models that have none of their own.
    """

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    prompts: PromptSet | str | None = None
    sheet: GridOptions | None = None
    limit: int | None = None
    beside: str | None = None


def find(words: list[str], how: Reading, loras: list[str] | None = None) -> list[Target]:
    """What the words stand for. The base model of every LoRA comes first, given or not, with the settings of the first of them.

    Names differ.

    Args:
        loras: further words, which are not models where they are hub ids.

    Raises:
        ValueError: a word that stands for nothing, or what it lacks.
    """
    how = replace(how, beside=next((word for word in words if _is_config(word)), None))
    everything = [*words, *(loras or [])]
    if len(set(everything)) < len(everything):
        raise ValueError(f"{next(w for w in everything if everything.count(w) > 1)} is given twice: give each target once.")
    found = [_one(word, how) for word in words]
    found += [_folder(Path(word), how) if Path(word).is_dir() else _lora(Path(word), how) for word in loras or []]
    _refuse_twins(found, everything)
    short = [target.name for target in found]
    named = [replace(t, name=word) if short.count(t.name) > 1 else t for t, word in zip(found, everything, strict=True)]
    whole = _with_bases(named)
    return [replace(t, name=name) for t, name in zip(whole, _distinct([t.name for t in whole]), strict=True)]


def reference(target: Target, targets: list[Target]) -> Target:
    """What a target is compared with: its own base model, else the first target."""
    if isinstance(target, Model):
        own = (t for t in targets if isinstance(t, Model) and t.is_base and t.pipeline == target.pipeline)
        return next(own, targets[0]) if not target.is_base else targets[0]
    return targets[0]


def _refuse_twins(targets: list[Target], words: list[str]) -> None:
    first: dict[tuple, str] = {}
    for target, word in zip(targets, words, strict=True):
        if isinstance(target, Model) and target.is_base and first.setdefault(target.pipeline, word) != word:
            raise ValueError(f"{first[target.pipeline]} and {word} are one base model, called in one way: give one of them.")


def _distinct(names: list[str]) -> list[str]:
    """The names, with a number from the second on where several are one."""
    found: list[str] = []
    for name in names:
        numbered = itertools.chain([name], (f"{name} ({n})" for n in itertools.count(2)))
        found.append(next(candidate for candidate in numbered if candidate not in found))
    return found


def _with_bases(targets: list[Target]) -> list[Target]:
    models = [t for t in targets if isinstance(t, Model)]
    bases: dict[tuple, Model] = {}
    for model in models:  # in their order: the first one's settings hold, those of a LoRA whose base was not asked for too
        base = Model(model.args.model, f"base model {model.args.model}", model.args, found=model.found)
        bases.setdefault(model.pipeline, model if model.is_base else base)
    if len(bases) == 1:
        bases = {pipeline: replace(model, name="base") for pipeline, model in bases.items()}
    if all(model.is_base for model in models):  # nothing was added: they stay where they are
        return [bases[t.pipeline] if isinstance(t, Model) else t for t in targets]
    return [*bases.values(), *(t for t in targets if not (isinstance(t, Model) and t.is_base))]


def _one(word: str, how: Reading) -> Target:
    path = Path(word)
    if _is_config(word):
        args = FlowGRPOConfig.from_yaml(word, how.overrides)
        return Model(args.model, f"base model {args.model}", args)
    if gallery.is_image_file(path):
        return _pictures(path, how)
    if path.is_dir():
        return _folder(path, how)
    if path.suffix == ".safetensors" and path.is_file():
        return _lora(path, how)
    if not path.exists() and (word in hub.BUNDLED_MODELS or hub.looks_like_hub_id(word)):
        return _model(word, how)
    there = f"{word} is not" if path.exists() else f"there is no {word}: give"
    raise ValueError(f"{there} {WHAT}.")


def _folder(path: Path, how: Reading) -> Target:
    if (path / layout.STATE).is_file():
        return _checkpoint(path, how)
    if (path / "model_index.json").is_file():
        return _model(str(path), how)
    if any(path.glob("*.safetensors")):
        return _lora(path, how)
    if (path / layout.CONFIG).is_file():
        return _run(path, how)
    files = [file for file in path.iterdir() if gallery.is_image_file(file) or file.name in gallery.MANIFESTS]
    if not files:
        raise ValueError(f"{path} is not {WHAT}.")
    return _pictures(path, how)


def _run(path: Path, how: Reading) -> Model:
    args = FlowGRPOConfig.from_yaml(path / layout.CONFIG, how.overrides)
    what, folder = ("transformer", path / layout.TRANSFORMER) if args.lora is None else ("LoRA", path / layout.LORA)
    if not folder.is_dir():
        raise ValueError(f"the run {path} has no {what} yet: give one of its checkpoints, in {path / layout.CHECKPOINTS}.")
    return Model(path.resolve().name, f"{what} {folder}", args, str(folder), found=path / layout.CONFIG)


def _checkpoint(path: Path, how: Reading) -> Model:
    place = path.resolve()
    run = place.parent.parent
    if not (run / layout.CONFIG).is_file():
        raise ValueError(
            f"the checkpoint {path} does not lie in its run's folder, whose {layout.CONFIG} says what it is of."
        )
    args = FlowGRPOConfig.from_yaml(run / layout.CONFIG, how.overrides)
    return Model(f"{run.name}/{place.name}", f"checkpoint {path}", args, checkpoint=place, found=run / layout.CONFIG)


def _lora(path: Path, how: Reading) -> Model:
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    places = (folder / layout.CONFIG, folder.parent / layout.CONFIG) if path.exists() else ()
    own = next((file for file in places if file.is_file()), None) if how.config is None else None
    config = how.config or own or how.beside
    if config is None:
        raise ValueError(f"the LoRA {path} does not say which model it is for: give a config of that model by --config.")
    args = FlowGRPOConfig.from_yaml(config, how.overrides)
    return Model("/".join(path.parts[-2:]), f"LoRA {path}", args, str(path), found=own)


def _model(name: str, how: Reading) -> Model:
    found = layout.config_near(name) if how.config is None else None
    config = how.config or found or how.beside
    own = [*how.overrides, f"model={name}"]
    args = FlowGRPOConfig.from_yaml(config, own) if config else FlowGRPOConfig.for_model(name, how.overrides)
    return Model(name, f"base model {name}", args, found=found)


def _pictures(path: Path, how: Reading) -> Pictures:
    shown = gallery.read(path, how.prompts, how.sheet).head(how.limit)
    return Pictures("/".join(path.parts[-2:]), f"pictures of {path}", shown)


def _is_config(word: str) -> bool:
    path = Path(word)
    return not path.is_dir() and (path.suffix in (".yaml", ".yml") or bundled_file(f"{word}.yaml").is_file())
