"""What `eval` measures, by the word that a user gives for it: a run, a checkpoint, a LoRA, a model, or pictures that are there."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from flow_grpo import checkpoint, gallery, hub
from flow_grpo.config import FlowGRPOConfig, shipped
from flow_grpo.prompts import PromptSet

RUN = "config.yaml"  # what a run's folder holds
WHAT = "a run folder, a checkpoint, a LoRA, a model, a config, a sheet or a folder of pictures"


@dataclass(frozen=True)
class Model:
    """A model that draws: a base model, or one with a LoRA or a checkpoint's adapter on it."""

    name: str
    what: str
    args: FlowGRPOConfig
    lora: str | None = None
    checkpoint: Path | None = None

    @property
    def is_base(self) -> bool:
        return self.lora is None and self.checkpoint is None

    @property
    def pipeline(self) -> tuple:
        """What tells its base model, and how that is called, from another."""
        args = self.args
        return args.model, args.device, args.dtype, repr(args.memory), repr(args.call())


@dataclass(frozen=True)
class Pictures:
    """Pictures that are there."""

    name: str
    what: str
    gallery: gallery.Gallery


Target = Model | Pictures


@dataclass(frozen=True)
class Reading:
    """How words are read.

    Attributes:
        config: of LoRAs and models, which have none of their own, unless a LoRA lies in its run's folder.
        overrides: `key.sub=value` over every config.
        prompts: of pictures that don't carry them, or metadata for those that do.
        sheet: how sheets that don't say it are cut.
    """

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    prompts: PromptSet | None = None
    sheet: gallery.Sheet | None = None


def find(words: list[str], how: Reading, loras: list[str] | None = None) -> list[Target]:
    """What the words stand for. The base model of every LoRA comes first, given or not; names differ.

    Args:
        loras: further words, which are not models where they are hub ids.

    Raises:
        ValueError: a word that stands for nothing, or what it lacks.
    """
    if how.config is None:
        how = replace(how, config=next((word for word in words if _is_config(word)), None))
    everything = [*words, *(loras or [])]
    if len(set(everything)) < len(everything):
        raise ValueError(f"{next(w for w in everything if everything.count(w) > 1)} is given twice: give each target once.")
    found = [_one(word, how) for word in words]
    found += [_folder(Path(word), how) if Path(word).is_dir() else _lora(Path(word), how) for word in loras or []]
    short = [target.name for target in found]
    named = [replace(t, name=word) if short.count(t.name) > 1 else t for t, word in zip(found, everything, strict=True)]
    return _with_bases(named)


def reference(target: Target, targets: list[Target]) -> Target:
    """What a target is compared with: its own base model, else the first target."""
    if isinstance(target, Model):
        own = (t for t in targets if isinstance(t, Model) and t.is_base and t.pipeline == target.pipeline)
        return next(own, targets[0]) if not target.is_base else targets[0]
    return targets[0]


def _with_bases(targets: list[Target]) -> list[Target]:
    models = [t for t in targets if isinstance(t, Model)]
    bases = {model.pipeline: model for model in models if model.is_base}
    for model in models:  # those of LoRAs whose base was not asked for
        what = f"base model {model.args.model}"
        bases.setdefault(model.pipeline, Model(model.args.model, what, model.args))
    if len(bases) == 1:
        bases = {pipeline: replace(model, name="base") for pipeline, model in bases.items()}
    elif len({model.name for model in bases.values()}) < len(bases):
        bases = {key: replace(m, name=f"{m.name} ({n})") for n, (key, m) in enumerate(bases.items(), 1)}
    if all(model.is_base for model in models):  # nothing was added: they stay where they are
        return [bases[t.pipeline] if isinstance(t, Model) else t for t in targets]
    return [*bases.values(), *(t for t in targets if not (isinstance(t, Model) and t.is_base))]


def _one(word: str, how: Reading) -> Target:
    path = Path(word)
    if _is_config(word):
        args = FlowGRPOConfig.read(word, how.overrides)
        return Model(args.model, f"base model {args.model}", args)
    if gallery.is_picture(path):
        return _pictures(path, how)
    if path.is_dir():
        return _folder(path, how)
    if path.suffix == ".safetensors" and path.is_file():
        return _lora(path, how)
    if not path.exists() and (word in hub.SHIPPED or hub.may_be_hub_id(word)):
        return _model(word, how)
    there = f"{word} is not" if path.exists() else f"there is no {word}: give"
    raise ValueError(f"{there} {WHAT}.")


def _folder(path: Path, how: Reading) -> Target:
    if (path / checkpoint.STATE).is_file():
        return _checkpoint(path, how)
    if (path / "model_index.json").is_file():
        return _model(str(path), how)
    if any(path.glob("*.safetensors")):
        return _lora(path, how)
    if (path / RUN).is_file():
        return _run(path, how)
    files = [file for file in path.iterdir() if gallery.is_picture(file) or file.name in gallery.MANIFESTS]
    if not files:
        raise ValueError(f"{path} is not {WHAT}.")
    return _pictures(path, how)


def _run(path: Path, how: Reading) -> Model:
    args = FlowGRPOConfig.read(path / RUN, how.overrides)
    what, folder = ("transformer", path / "transformer") if args.lora is None else ("LoRA", path / "lora")
    if not folder.is_dir():
        raise ValueError(f"the run {path} has no {what} yet: give one of its checkpoints, in {path / 'checkpoints'}.")
    return Model(path.resolve().name, f"{what} {folder}", args, str(folder))


def _checkpoint(path: Path, how: Reading) -> Model:
    run = path.resolve().parent.parent
    if not (run / RUN).is_file():
        raise ValueError(f"the checkpoint {path} does not lie in its run's folder, whose {RUN} says what it is of.")
    name = f"{run.name}/{path.resolve().name}"
    return Model(name, f"checkpoint {path}", FlowGRPOConfig.read(run / RUN, how.overrides), checkpoint=path)


def _lora(path: Path, how: Reading) -> Model:
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    own = next((str(file) for file in (folder / RUN, folder.parent / RUN) if file.is_file()), None)
    config = how.config or own
    if config is None:
        raise ValueError(f"the LoRA {path} does not say which model it is for: give a config of that model by --config.")
    return Model("/".join(path.parts[-2:]), f"LoRA {path}", FlowGRPOConfig.read(config, how.overrides), str(path))


def _model(name: str, how: Reading) -> Model:
    if how.config is None:
        args = FlowGRPOConfig.of(name, how.overrides)
    else:
        args = FlowGRPOConfig.read(how.config, [*how.overrides, f"model={name}"])
    return Model(name, f"base model {name}", args)


def _pictures(path: Path, how: Reading) -> Pictures:
    return Pictures("/".join(path.parts[-2:]), f"pictures of {path}", gallery.read(path, how.prompts, how.sheet))


def _is_config(word: str) -> bool:
    path = Path(word)
    return not path.is_dir() and (path.suffix in (".yaml", ".yml") or shipped(f"{word}.yaml").is_file())
