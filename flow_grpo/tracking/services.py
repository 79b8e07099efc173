"""A run as other programs show it: TensorBoard, wandb, mlflow, trackio and swanlab, through accelerate's trackers.

They get the numbers of metrics.jsonl by the same names, the warnings, and the small pictures of held-out prompts that the run keeps.
Nothing here draws a random number that a run depends on. A service is imported when a run asks for it, and by the first process alone.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import flatten
from flow_grpo.files import write_atomic
from flow_grpo.run_folder.layout import TRACKERS

PROJECT = "flow-grpo"
QUIET = {"WANDB_SILENT": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "GIT_PYTHON_REFRESH": "quiet"}


def check_installed(trackers: Iterable[str]) -> None:
    """ValueError if one of these services is not installed."""
    for name in trackers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            raise ValueError(
                f"trackers: {name} needs the package {name}, which is not installed: pip install {name}, or name others, such "
                "as trackers=[] for none."
            )


def open_services(
    folder: Path, args: FlowGRPOConfig, say: Callable[[str], None], step: int | None = None
) -> list["TrackingService"]:
    """Opens the trackers of a run's settings.

    Args:
        step: where the run goes on, in the services' same run where they can; None begins a new one.

    Raises:
        ValueError: a service of a new run does not start. A run that goes on does so without it, and `say` gets a warning.
    """
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    file, found = folder / TRACKERS, []
    known = _known(file) if step is not None else {}
    for name, options in args.trackers.items():
        identity = known.get(name)
        try:
            board = TrackingService(name, folder, dict(options), identity, step)
            if step is None:
                board.configure(args)
        except Exception as error:  # whatever the service raises
            reason = f"the tracker {name} could not be started: {_reason(error)}"
            if step is None:
                raise ValueError(f"{reason}. Mend that, or leave it out of `trackers`.") from error
            say(f"warning: {reason}; the run goes on without it.")
            continue
        found.append(board)
        known[name] = board.identity
    write_atomic(file, json.dumps(known))
    return found


def _known(file: Path) -> dict[str, str]:
    """By which names the services know the run; without them, or with half of them written, it is a new one to them."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


class TrackingService:
    """One service's view of the run. What it raises is the service's own.

    Attributes:
        identity: the name by which the service knows the run, to go on in it.
    """

    def __init__(self, name: str, folder: Path, options: dict[str, Any], identity: str | None, step: int | None) -> None:
        from accelerate import PartialState, tracking

        PartialState()  # which accelerate's trackers ask who they are
        given: dict[str, Any]
        project, run = options.pop("project", PROJECT), folder.resolve().name
        self.name, self.identity = name, identity or uuid.uuid4().hex[:8]
        self._warned: tuple[int, list[str]] = (-1, [])  # a step, and its warnings so far
        if name == "tensorboard":  # steps that the run does anew replace the former ones
            given = {"purge_step": 0 if step is None else step + 1, **options}
            self.tracker: Any = tracking.TensorBoardTracker(name, folder, **given)
        elif name == "mlflow":
            self.tracker = tracking.MLflowTracker(project, run_id=identity, **{"run_name": run, **options})
        elif name == "trackio":  # it knows a run by its name
            given = {"name": f"{run}-{self.identity}", "resume": "allow", **options}
            self.tracker = tracking.TrackioTracker(project, **given)
        else:
            kind, label = (
                (tracking.WandBTracker, "name") if name == "wandb" else (tracking.SwanLabTracker, "experiment_name")
            )
            self.tracker = kind(project, **{label: run, "id": self.identity, "resume": "allow", **options})
        with contextlib.redirect_stdout(io.StringIO()):
            self.tracker.start()
        if name == "mlflow":
            self.identity = self.tracker.tracker.info.run_id

    def configure(self, args: FlowGRPOConfig) -> None:
        """Shows the run's settings."""
        if self.name == "tensorboard":  # as text: accelerate's way would be a second run beside this one, named by the clock
            self.tracker.log({"config": "\n".join(f"    {line}" for line in args.to_yaml().splitlines())}, step=0)
            return
        plain = (bool, int, float, str)
        settings = flatten(args.model_dump(mode="json", exclude={"trackers"}))
        self.tracker.store_init_configuration({k: v if isinstance(v, plain) else str(v) for k, v in settings.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log({metric_name(name): value for name, value in metrics.items()}, step=step)

    def warn(self, step: int, message: str) -> None:
        """All warnings of a step are one text, since services keep only the last of several."""
        same, former = self._warned[0] == step, self._warned[1]
        self._warned = step, [*(former if same else []), message]
        text = "\n".join(self._warned[1])
        if self.name == "mlflow":
            self._service().log_text(text, f"warnings/step_{step:06d}.txt")
        else:
            self.tracker.log({"warning": self._service().Text(text) if self.name == "swanlab" else text}, step=step)

    def pictures(self, step: int, kept: list[tuple[str, Path]]) -> None:
        """The pictures of prompts, each with its prompt."""
        if not kept:
            return
        prompts, images = [prompt for prompt, _ in kept], [Image.open(file).convert("RGB") for _, file in kept]
        if self.name == "tensorboard":
            pixels = {f"pictures/{i}": np.asarray(image)[None] for i, image in enumerate(images)}
            self.tracker.log_images(pixels, step=step, dataformats="NHWC")
            self.tracker.log({f"prompts/{i}": prompt for i, prompt in enumerate(prompts)}, step=step)
        elif self.name == "mlflow":
            for i, image in enumerate(images):
                self._service().log_image(image, artifact_file=f"pictures/step_{step:06d}/{i:04d}.png")
            self._service().log_dict(dict(enumerate(prompts)), "pictures/prompts.json")
        else:
            captioned = [self._service().Image(i, caption=p) for i, p in zip(images, prompts, strict=True)]
            self.tracker.log({f"pictures/{i}": picture for i, picture in enumerate(captioned)}, step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.tracker.finish()

    def _service(self) -> Any:
        return importlib.import_module(self.name)


def metric_name(metric: str) -> str:
    """A metric's name as all services take it: ours, but without the colons, `..` and doubled slashes of a file's path."""
    return posixpath.normpath(re.sub(r"[^\w./ -]", "_", metric)).lstrip("./")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(" :.")
