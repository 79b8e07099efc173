"""Outside tracking services: TensorBoard, wandb, mlflow, trackio and swanlab, through accelerate's trackers.

They get the metrics of metrics.jsonl under the same names, the warnings, and the small images of held-out prompts that the run keeps.
Nothing here uses a random number on which a run depends. A service is imported only if the run names it, on the main process.
"""

import contextlib
import importlib
import io
import json
import os
import posixpath
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import flatten
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import MAX_JSON, regular_bytes, write_atomic
from flow_grpo.run_folder.layout import TRACKERS

PROJECT = "flow-grpo"
QUIET_ENVIRONMENT = {"WANDB_SILENT": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "GIT_PYTHON_REFRESH": "quiet"}


def open_services(
    folder: Path, args: FlowGRPOConfig, info: Callable[[str], None], step: int | None = None
) -> list["TrackingService"]:
    """Open the services that the config names.

    Args:
        info: shows a message.
        step: where the run continues, in the same run of each service if it can; None starts a new one.

    Raises:
        FlowGRPOError: a service of a new run does not start. A resumed run continues without it, and `info` gets a warning.
    """
    os.environ.update({key: value for key, value in QUIET_ENVIRONMENT.items() if key not in os.environ})
    file, opened = folder / TRACKERS, []
    run_ids = _read_run_ids(file) if step is not None else {}
    for name, options in args.trackers.items():
        try:
            service = TrackingService(name, folder, dict(options), run_ids.get(name), step)
            if step is None:
                service.log_config(args)
        except Exception as error:  # services raise errors of their own
            reason = f"the tracker {name} could not be started: {_reason(error)}"
            if step is None:
                raise FlowGRPOError(f"{reason}. Fix that, or leave it out of `trackers`.") from error
            info(f"warning: {reason}; the run goes on without it.")
            continue
        opened.append(service)
        run_ids[name] = service.run_id
    write_atomic(file, json.dumps(run_ids))
    return opened


def _read_run_ids(file: Path) -> dict[str, str]:
    """The run's id in each service; empty if the file is missing or damaged, which starts a new run there."""
    try:
        return dict(json.loads(regular_bytes(file, MAX_JSON)))
    except (OSError, ValueError, TypeError):
        return {}


class TrackingService:
    """One service's view of the run. It raises the service's own errors.

    Attributes:
        run_id: the run's id in the service, with which it is resumed.
    """

    def __init__(self, name: str, folder: Path, options: dict[str, Any], run_id: str | None, step: int | None) -> None:
        from accelerate import PartialState, tracking

        PartialState()  # accelerate's trackers read it
        arguments: dict[str, Any]
        project, run = options.pop("project", PROJECT), folder.resolve().name
        self.name, self.run_id = name, run_id or uuid.uuid4().hex[:8]
        self._warned: tuple[int, list[str]] = (-1, [])  # a step and its warnings so far
        if name == "tensorboard":  # steps that a resumed run repeats replace the former ones
            arguments = {"purge_step": 0 if step is None else step + 1, **options}
            self.tracker: Any = tracking.TensorBoardTracker(name, folder, **arguments)
        elif name == "mlflow":
            self.tracker = tracking.MLflowTracker(project, run_id=run_id, **{"run_name": run, **options})
        elif name == "trackio":  # it identifies a run by its name
            arguments = {"name": f"{run}-{self.run_id}", "resume": "allow", **options}
            self.tracker = tracking.TrackioTracker(project, **arguments)
        else:
            kind = tracking.WandBTracker if name == "wandb" else tracking.SwanLabTracker
            label = "name" if name == "wandb" else "experiment_name"
            self.tracker = kind(project, **{label: run, "id": self.run_id, "resume": "allow", **options})
        with contextlib.redirect_stdout(io.StringIO()):
            self.tracker.start()
        if name == "mlflow":
            self.run_id = self.tracker.tracker.info.run_id

    def log_config(self, args: FlowGRPOConfig) -> None:
        """Log the run's settings."""
        if self.name == "tensorboard":  # as text: accelerate would write a second run, named after the time
            self.tracker.log({"config": "\n".join(f"    {line}" for line in args.to_yaml().splitlines())}, step=0)
            return
        plain = (bool, int, float, str)
        settings = flatten(args.model_dump(mode="json", exclude={"trackers"}))
        self.tracker.store_init_configuration({k: v if isinstance(v, plain) else str(v) for k, v in settings.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self.tracker.log({metric_name(name): value for name, value in metrics.items()}, step=step)

    def warn(self, step: int, message: str) -> None:
        """Log a warning, as one text with the step's other warnings: services keep only the last text of a step."""
        same, previous = self._warned[0] == step, self._warned[1]
        self._warned = step, [*(previous if same else []), message]
        text = "\n".join(self._warned[1])
        if self.name == "mlflow":
            self._service().log_text(text, f"warnings/step_{step:06d}.txt")
        else:
            self.tracker.log({"warning": self._service().Text(text) if self.name == "swanlab" else text}, step=step)

    def log_images(self, step: int, files: list[tuple[str, Path]]) -> None:
        """Log images, each with its prompt."""
        if not files:
            return
        prompts, images = [prompt for prompt, _ in files], [Image.open(file).convert("RGB") for _, file in files]
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
            self.tracker.log({f"pictures/{i}": image for i, image in enumerate(captioned)}, step=step)

    def finish(self) -> None:
        """End the run in the service."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.tracker.finish()

    def _service(self) -> Any:
        return importlib.import_module(self.name)


def metric_name(metric: str) -> str:
    """A metric's name as all services accept it: without the colons, `..` and doubled slashes of a reward's path."""
    return posixpath.normpath(re.sub(r"[^\w./ -]", "_", metric)).lstrip("./")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(" :.")
