"""Find a reward by name, import path or file, and build it with its options."""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flow_grpo import user_files
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded
from flow_grpo.rewards.calls import Reward, check_inputs
from flow_grpo.rewards.networks import with_index
from flow_grpo.rewards.scopes import Framed, Frames, check_sendable, signature, with_attributes_of
from flow_grpo.rewards.user_code import KNOWN, UserCodeError, guarded

REGISTRY = {
    "ocr": "flow_grpo.rewards.ocr:OCR",
    "ocr_exact": "flow_grpo.rewards.ocr:ExactOCR",
    "clip": "flow_grpo.rewards.clip:CLIP",
    "pickscore": "flow_grpo.rewards.pickscore:PickScore",
    "hpsv2": "flow_grpo.rewards.clip:HPSv2",
    "hpsv3": "flow_grpo.rewards.hpsv3:HPSv3",
    "imagereward": "flow_grpo.rewards.imagereward:ImageReward",
    "aesthetic": "flow_grpo.rewards.clip:Aesthetic",
    "preference_head": "flow_grpo.rewards.preference_head:PreferenceHead",
    "jpeg_size": "flow_grpo.rewards.pixels:jpeg_size",
    "fidelity": "flow_grpo.rewards.fidelity:Fidelity",
    "unchanged": "flow_grpo.rewards.fidelity:Unchanged",
    "least_distance": "flow_grpo.rewards.clip:LeastDistance",
    "sharpness": "flow_grpo.rewards.pixels:sharpness",
    "motion": "flow_grpo.rewards.pixels:motion",
    "color": "flow_grpo.rewards.pixels:Color",
    "shapes": "flow_grpo.rewards.shapes.rules:Shapes",
    "shapes_exact": "flow_grpo.rewards.shapes.rules:ExactShapes",
    "shapes_edit": "flow_grpo.rewards.shapes.rules:ShapesEdit",
    "geneval": "flow_grpo.rewards.geneval:GenEval",
    "geneval_exact": "flow_grpo.rewards.geneval:ExactGenEval",
    "human": "flow_grpo.rewards.human:Human",
    "judge": "flow_grpo.rewards.judge:Judge",
    "remote": "flow_grpo.rewards.serving.client:Remote",
}

_loaded: dict[str, bytes] = {}  # of each module of a user's file: the hash of its content


def load(
    name: str,
    *,
    remote: str | list[str] | None = None,
    isolate: bool | str = False,
    frames: Frames | None = None,
    **options: Any,
) -> Reward:
    """Load a reward by name, by import path (`my_module:my_fn`) or by file (`path/to/file.py:fn`).

    A class is built with the options; a function gets them as keyword arguments of every call.

    Args:
        remote: URL of a reward server, or several; the options are then those of the client, `rewards.serving.client.Remote`.
        isolate: run the reward in a subprocess, or in one with the Python interpreter of this path.
        frames: of a video, those that the reward sees, see `rewards.scopes`; by default its own attribute `frames`.

    Raises:
        FlowGRPOError: there is no such reward, it does not take these options, or the server or subprocess can't run it.
    """
    if remote is not None and isolate:
        raise FlowGRPOError(f"reward {name} is either remote or isolated: give one of `remote` and `isolate`.")
    if "python" in options:  # of 0.4
        raise FlowGRPOError(f"reward {name}: an interpreter is a value of isolate: give isolate={options['python']}.")
    if "device" in options:
        options["device"] = with_index(options["device"])
    if frames is not None and (isolate or remote is not None):
        check_sendable(name, frames)
    reward: Any
    if remote is not None:
        _check_client_options(name, options)
        client = {"urls": remote, "reward": name, **options}
        reward = _built(name, check_options("remote", **client), client)
    elif isolate:
        from flow_grpo.rewards.serving.subprocess import Isolated

        reward = Isolated(name, options, None if isolate is True else isolate)
    else:
        reward = _built(name, check_options(name, **options), options)
    return reward if frames is None else Framed(reward, frames)


def load_given(
    name: str,
    target: Any,
    *,
    remote: str | list[str] | None = None,
    isolate: bool | str = False,
    frames: Frames | None = None,
    **options: Any,
) -> Reward:
    """Load a reward that is given as a function, an object that can be called, or a class; else as `load`. `name` is for error messages."""
    if remote is not None or isolate:
        raise FlowGRPOError(
            f"reward {name} was given as an object, which no other process has: give its name, my_module:my_fn or file.py:fn, or leave "
            "remote and isolate out."
        )
    reward = _built(name, _checked(name, target, options), options)
    return reward if frames is None else Framed(reward, frames)


def _check_client_options(name: str, options: dict[str, Any]) -> None:
    """Check that the options of a remote reward are those of the client. FlowGRPOError if not."""
    known = [key for key in signature(locate("reward", "remote", REGISTRY)).parameters if key not in ("urls", "reward")]
    own = {key: value for key, value in options.items() if key not in known}
    if own:
        given = ", ".join(f"{key}: {value}" for key, value in own.items())
        raise FlowGRPOError(
            f"reward {name} is remote, so that its own options are its server's, `flow-grpo serve '{name}={{{given}}}'`, and here are "
            f"those of the client: {', '.join(known)}."
        )


def _built(name: str, target: Callable[..., Any], options: dict[str, Any]) -> Reward:
    """A reward with its options, of its class or function. `name` is for error messages."""
    if not inspect.isclass(target):
        return _with_options(target, options)
    title = f"reward {name}"
    with guarded(title, lambda kind: f"{title} could not be built{'' if kind == KNOWN else f': {kind}'}"):
        return _callable(title, target(**options))


def _callable(title: str, reward: Any) -> Any:
    if not callable(reward):
        raise FlowGRPOError(f"{title} is not callable: it must be `reward(images, prompts, **metadata)`.")
    return reward


def reads_prompts(name: str, remote: str | list[str] | None = None, isolate: bool | str = False, **options: Any) -> bool:
    """Whether a reward, given the options of `load`, needs prompts; its attribute `reads_prompts = False` says that it does not.

    A remote reward is always given prompts, since only its server knows, and so is one of the user's in another environment, since it
    need not be importable here. FlowGRPOError as in `load`.
    """
    elsewhere = remote is not None or (isinstance(isolate, str) and name not in REGISTRY)
    return elsewhere or getattr(locate("reward", name, REGISTRY), "reads_prompts", True)


def check_options(name: str, **options: Any) -> Callable[..., Any]:
    """Check that a reward takes these options, without building it; returns its class or function. FlowGRPOError as in `load`."""
    return _checked(name, locate("reward", name, REGISTRY), options)


def _checked(name: str, target: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """A reward's class or function. FlowGRPOError if it can't be called, or does not take these options."""
    _callable(f"reward {name}", target)
    if inspect.isclass(target) and not any("__call__" in vars(kind) for kind in target.__mro__):
        raise FlowGRPOError(
            f"reward {name}: its objects can't be called: give the class a method `__call__(self, images, prompts, **metadata)`."
        )
    if unspaced := next((key for key in options if ":" in key), None):
        option, _, value = unspaced.partition(":")
        raise FlowGRPOError(f"reward {name}: write a space after the colon of an option: `{option}: {value}`.")
    if inspect.isfunction(target):
        check_inputs(name, target)
    takes = signature(target)
    if misplaced := next((key for key in ("scope", "opponents") if key in options and key not in takes.parameters), None):
        raise FlowGRPOError(
            f"reward {name}: {misplaced} is no option: set the attribute {misplaced} of its class or function."
        )
    try:
        if inspect.isclass(target):
            takes.bind(**options)
        else:
            takes.bind_partial(None, None, **options)
    except TypeError as error:
        known = f"; its options are {', '.join(takes.parameters) or 'none'}" if inspect.isclass(target) else ""
        raise FlowGRPOError(f"reward {name}: {error}{known}.") from error
    return target


def locate(kind: str, name: str, names: dict[str, str] | None = None) -> Callable[..., Any]:
    """Import the object that an import path (`my_module:my_fn`), a file (`path/to/file.py:fn`) or one of `names` refers to.

    Raises:
        FlowGRPOError: it does not exist or can't be imported. The message names `kind`, for example "reward".
    """
    names = names or {}
    if not isinstance(name, str):
        raise FlowGRPOError(f"the {kind} is of type {type(name).__name__}: give a name, my_module:my_fn or file.py:fn.")
    path, colon, attribute = names.get(name, name).rpartition(":")
    if not colon and name.endswith(".py"):
        raise FlowGRPOError(f"{kind} {name} names a file without a function: write {name}:FUNCTION.")
    if not colon:
        raise FlowGRPOError(
            f"there is no {kind} {name}.{_suggestion(name, names)} Give one of {', '.join(names)}, or your own as "
            "my_module:my_fn or file.py:fn."
        )
    if attribute.lstrip("-").replace(".", "", 1).isdigit():
        raise FlowGRPOError(f"{kind} {name}: a weight follows the colon and a space: write `{path}: {attribute}`.")
    module = _import_file(kind, path) if path.endswith(".py") else _import_module(kind, name, path)
    if not hasattr(module, attribute):
        raise FlowGRPOError(f"{kind} {name}: {path} has no {attribute}.{_suggestion(attribute, dir(module))}")
    return getattr(module, attribute)


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def import_path(reward: Any) -> str | None:
    """The name by which `load` finds a function again, in REGISTRY or `my_module:my_fn`; None if there is none, as for a lambda.

    A text is such a name already.
    """
    if isinstance(reward, str):
        return reward
    module, name = getattr(reward, "__module__", None) or "", getattr(reward, "__qualname__", "")
    if module in ("", "__main__") or getattr(sys.modules.get(module), name, None) is not reward:
        return None
    if module.startswith(user_files.__name__):
        return None
    path = f"{module}:{name}"
    return next((known for known, target in REGISTRY.items() if target == path), path)


def docstring(name: str) -> str:
    """The docstring of a reward in REGISTRY, read from its source file without importing it; "" for any other reward."""
    module, _, target = REGISTRY.get(name, "").partition(":")
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == target:
            return ast.get_docstring(node) or ""
    return ""


def _import_module(kind: str, name: str, path: str) -> Any:
    try:
        with guarded(f"{kind} {name}", lambda error: f"{kind} {name} could not be imported: {error}"):
            return importlib.import_module(path)
    except UserCodeError as error:
        file, missing = f"{path.replace('.', '/')}.py", getattr(error.__cause__, "name", None)
        why = {
            path.partition(".")[0]: "the working directory is not searched for modules",
            f"flow_grpo.{path}": "the package `rewards` of flow-grpo hides a folder of that name",
        }
        if missing not in why or not Path(file).is_file():
            raise
        as_file = f"{file}:{name.rpartition(':')[2]}"
        raise FlowGRPOError(f"{kind} {name} could not be imported, since {why[missing]}: write {as_file}.") from error


def _import_file(kind: str, path: str) -> Any:
    """The module of a file, loaded once for each content: a pool pickles functions only of the module that was loaded last."""
    file = expanded(path)
    if not file.is_file():
        raise FlowGRPOError(
            f"there is no {kind} file {path}."
            if file.is_absolute()
            else f"there is no {kind} file {path} in {Path.cwd()}: give its whole "
            "path, or start the command in the folder that the path is relative to."
        )
    source = file.read_bytes()
    name, content = user_files.module_name(file), hashlib.sha256(source).digest()
    if name in sys.modules and _loaded.get(name) == content:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look up the module of a class
    try:
        with guarded(f"the {kind} file {path}", lambda error: f"the {kind} file {path} could not be run: {error}"):
            # not by the loader, which runs what was compiled of a file of the same second and length
            exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    _loaded[name] = content
    return module


def _with_options(function: Callable[..., Any], options: dict[str, Any]) -> Reward:
    if not options:
        return function

    def reward(*inputs: Any, **metadata: Any) -> Any:
        return function(*inputs, **{**metadata, **options})

    parameters = [p for name, p in signature(function).parameters.items() if name not in options]
    reward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_attributes_of(function, reward)


def metric_names(names: Iterable[str], taken: Iterable[str] = ()) -> dict[str, str]:
    """The metric name of each reward: its name in REGISTRY, or the name of the user's function or class.

    A name that is used twice, is in `taken`, or is that of another reward in REGISTRY gets a number.
    """
    metrics: dict[str, str] = {}
    for name in dict.fromkeys(names):
        short_name = name.rpartition(":")[2] if name not in REGISTRY else name
        others = {*taken, *metrics.values(), *(REGISTRY if name not in REGISTRY else ())}
        numbered = itertools.chain([short_name], (f"{short_name}_{n}" for n in itertools.count(2)))
        metrics[name] = next(candidate for candidate in numbered if candidate not in others)
    return metrics
