"""Create a run folder, or check that it can be resumed: what a resumed run may change is one table, `RESUMABLE`.

One process at a time trains in a run folder; reading needs no lock.

The lock is the system's file lock (flock; msvcrt.locking on Windows), taken through filelock. It ends with its process, even after a
kill, and forked processes don't hold it. Tested on a local file system on Linux; not tested on Windows, macOS and network file
systems. An NFS server may keep the lock of a dead machine for a minute or two. Mounted with `local_lock`, NFS does not show the
lock to other machines. Some file systems have no locks at all.
"""

import errno
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from filelock import FileLock, Timeout

from flow_grpo import __version__
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import FROM_PYTHON
from flow_grpo.distributed.launchers import AUTO, restarts
from flow_grpo.errors import FlowGRPOError, RetryableError
from flow_grpo.files import MAX_JSON, WriteError, expanded, regular_bytes, remove, write_atomic, write_errors
from flow_grpo.policy.devices import device_name
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.run_folder.layout import LOCK, OWNER  # two files, as a locked one can't be read everywhere
from flow_grpo.run_folder.metrics_file import has_metrics, logged_best_step, read_metrics, rewind
from flow_grpo.run_folder.reader import dtype_of, inputs_of
from flow_grpo.run_folder.samples import delete_images_after

WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
OF_A_POLICY = ("height", "width", "guidance")  # flow-grpo 0.4 did not write down those of a policy that was given


@contextmanager
def locked(folder: Path, info: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder within the block. Creates the folder if it does not exist.

    Args:
        info: shows a message.

    Raises:
        RetryableError: another process holds the lock. The message names it.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise _in_use(folder) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
            raise
        info(f"warning: the file system of {folder} has no locks, so nothing keeps a second run from writing there.")
        yield
        return
    try:
        owner = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_atomic(folder / OWNER, json.dumps(owner))
        yield
    finally:
        lock.release()


def check_free(folder: Path) -> None:
    """RetryableError if another process holds the lock of a folder. Nothing is written there."""
    if (folder / LOCK).exists():
        try:
            with FileLock(folder / LOCK, timeout=0):
                pass
        except Timeout:
            raise _in_use(folder) from None
        except (OSError, NotImplementedError):  # there are no locks
            pass


def _in_use(folder: Path) -> RetryableError:
    return RetryableError(
        f"{folder} is in use by {_owner(folder)}: wait until that has ended, end it, or set another folder by output_dir=..."
    )


def _owner(folder: Path) -> str:
    """The process that holds the lock, as it has noted itself."""
    try:
        owner = json.loads(regular_bytes(folder / OWNER, MAX_JSON))
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just taken the lock
        return "another process"


def is_begun(folder: Path) -> bool:
    """Whether the folder holds a run: metrics, readable or not, or a checkpoint after the start."""
    return has_metrics(folder) or any(checkpoint.steps(folder / layout.CHECKPOINTS))


def check_begun(folder: Path, resume: bool) -> None:
    """Check that the folder holds a run exactly if one is to be resumed. FlowGRPOError if not."""
    begun = is_begun(folder)
    if not resume and begun:
        raise FlowGRPOError(
            f"{folder} already holds a run: go on with it by --resume, in Python train(resume=True), or set another folder by "
            "output_dir=..."
        )
    if resume and not checkpoint.steps(folder / layout.CHECKPOINTS):
        again = "set another folder by output_dir=..." if begun else "start the run without --resume"
        raise FlowGRPOError(f"{folder} has no checkpoint to resume from: {again}, or see whether output_dir=... is right.")


def open_run_folder(
    args: FlowGRPOConfig, inputs: dict[str, str], resume: bool, lock: ExitStack, info: Callable[[str], None]
) -> None:
    """Create the run folder, or check that it can be resumed, and hold its lock until `lock` closes.

    Args:
        inputs: digests of what the settings name.

    Raises:
        FlowGRPOError: the folder holds a run that is not to be resumed, holds none that could be, another process trains in it, or what
            may not change when a run is resumed has changed.
    """
    folder = Path(args.output_dir)
    if resume:  # before anything is created
        check_begun(folder, resume)
    lock.enter_context(locked(folder, info))
    if resume:
        check_unchanged(args, inputs, info)
        return
    check_begun(folder, resume)  # another process may have begun it a moment ago
    delete_images_after(folder, -1)  # of a run that was lost before its first checkpoint
    write_settings(args, inputs)


def write_settings(args: FlowGRPOConfig, inputs: dict[str, str]) -> None:
    """Write down the settings of a run, and the digests of what they name."""
    folder = Path(args.output_dir)
    write_atomic(folder / layout.CONFIG, args.to_yaml())
    write_atomic(folder / layout.INPUTS, json.dumps({"digests": inputs}))


def write_machine(folder: Path, device: torch.device, dtype: torch.dtype, processes: int) -> None:
    """Write down what a run begins on; `reader.machine_of` reads it.

    Args:
        processes: number of processes that share the run.
    """
    content = {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "processes": processes,
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flow_grpo": __version__,
    }
    write_atomic(folder / layout.MACHINE, json.dumps(content))


def how_to_resume(folder: Path, resume: bool | str | Path | None) -> tuple[bool, int | None]:
    """Whether to resume, and the step of the checkpoint to resume from; None for the newest.

    Args:
        resume: True, the run folder, the folder of one of its checkpoints, False, or `AUTO`: if there is a checkpoint. None is AUTO
            under a launcher that restarts the processes, else False.

    Raises:
        FlowGRPOError: it is the path of something else.
    """
    if resume is None:
        resume = AUTO if restarts() else False
    if resume == AUTO:
        resume = bool(checkpoint.steps(folder / layout.CHECKPOINTS))
    if isinstance(resume, bool):
        return resume, None
    path, checkpoints = expanded(resume).resolve(), folder.resolve() / layout.CHECKPOINTS
    if path in (checkpoints.parent, checkpoints):
        return True, None
    step = layout.step_of(path)
    if step is None or path != layout.step_folder(checkpoints, step) or step not in checkpoint.steps(checkpoints):
        raise FlowGRPOError(
            f"resume={resume} is neither the run folder {folder} nor one of its checkpoints: set output_dir to the run's folder, and "
            "resume=True for its newest checkpoint."
        )
    return True, step


def read_checkpoint(folder: Path, step: int | None, info: Callable[[str], None]) -> dict[str, Any]:
    """Read the checkpoint of a step of the run folder; the newest readable one if `step` is None.

    Raises:
        FlowGRPOError: it is damaged, or all are, or flow-grpo 0.2 wrote it.
    """
    checkpoints = folder / layout.CHECKPOINTS
    state, warnings = checkpoint.latest(checkpoints) if step is None else (checkpoint.read(checkpoints, step), [])
    for warning in warnings:
        info(f"warning: {warning}")
    if state is None:
        raise FlowGRPOError(f"all checkpoints of {folder} are damaged: start another run by output_dir=...")
    if "microbatch" not in state.get("memory", {}):
        raise FlowGRPOError(
            f"{folder} was written by flow-grpo 0.2 or before, which this version can't go on with: start a new run."
        )
    return state


def rewind_run(folder: Path, step: int) -> str | None:
    """Delete what a run has written after a step: checkpoints, the weights of a later best evaluation, images and rows of metrics.

    Returns a sentence on lines that are no rows of metrics, which are moved, and on steps without a row; None if there are none.
    """
    checkpoint.delete_after(folder / layout.CHECKPOINTS, step)
    if (logged_best_step(read_metrics(folder)) or 0) > step:  # before its row is deleted
        remove(folder / layout.BEST)
    delete_images_after(folder, step)
    sentences = [rewind(folder, step)]
    logged = {row["step"] for row in read_metrics(folder) if "loss" in row}
    if missing := step - len(logged):
        file = folder / layout.METRICS
        sentences.append(f"{file} has no row of {missing} of the {step} steps so far: curves and tables lack them.")
    return " ".join(sentence for sentence in sentences if sentence) or None


def check_unchanged(args: FlowGRPOConfig, inputs: dict[str, str], info: Callable[[str], None]) -> None:
    """Check that a run is resumed with its settings, and with the same content of what they name. Says which others have changed.

    Raises:
        FlowGRPOError: a setting has changed that is not in `RESUMABLE`, or a content.
    """
    folder = Path(args.output_dir)
    file, begun, dtype = folder / layout.CONFIG, inputs_of(folder), dtype_of(folder)
    if not begun:
        info(
            f"{folder} has no readable {layout.INPUTS}: changes of its prompts, weights and code since it was begun are not seen."
        )
    if not file.exists():
        info(f"warning: {folder} has no {layout.CONFIG}: changes of its settings since it was begun are not seen.")
    found = changes(
        FlowGRPOConfig.from_yaml(file) if file.exists() else args, args, begun | ({"dtype": dtype} if dtype else {}), inputs
    )
    unsure = () if begun else OF_A_POLICY
    for change in (change for change in found if not change.resumable and change.name not in unsure):
        if change.is_of_content:
            raise FlowGRPOError(
                f"the content of {change.name} has changed since {folder} was begun: bring the former one back, start another run by "
                f"output_dir=..., or delete {folder / layout.INPUTS} to go on with the current one."
            )
        raise FlowGRPOError(
            f"{folder} was begun with {change.name}={_short(change.then)}, not {_short(change.now)}: resume it with the same settings, or "
            "start another run by output_dir=..."
        )
    told = [f"{c.name}={_short(c.now)} (it was {_short(c.then)})" for c in found if c.name != "output_dir"]
    if told:
        info(f"resumed with other settings: {', '.join(told)}")


def _short(value: Any) -> str:
    return shorten(str(value), 80, placeholder="...")


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise FlowGRPOError that says what is left of the run when something could not be written."""
    try:
        yield
    except (WriteError, OSError) as error:
        what = str(error) if isinstance(error, WriteError) else f"the system refused to read or write: {error}."
        saved = checkpoint.steps(folder / layout.CHECKPOINTS)
        lost = f"What came after the checkpoint of step {saved[0]} is lost" if saved else "Nothing is saved yet"
        again = "go on with --resume" if saved else "start the run again"
        raise FlowGRPOError(f"{what} {lost}: when it can be written, {again}.") from error


# The settings that a resumed run may change, each with all settings below it; * is any name. No other may change.
RESUMABLE = {
    "how long the run is": ("steps",),
    "what is written, and when": ("output_dir", "save_every", "keep_checkpoints", "trackers"),
    "what is measured besides the trained rewards, and when": (
        "evaluation.every",
        "evaluation.rewards",
    ),
    "where it is computed, which changes numbers by rounding": (
        "device",
        "microbatch",
        "objective.keep_graphs",
        "memory.embedding_cache_dir",
        "memory.offload_text_encoders",
        "memory.gradient_checkpointing",
        "memory.offload",
        "memory.shard",
        "memory.compile",
        "memory.offload_trajectories",
        "memory.vae_slicing",
    ),
    "where a reward runs, and what is done when it fails": (
        "rewards.*.remote",
        "rewards.*.isolate",
        "rewards.*.on_error",
        "rewards.*.options.attempts",
        "rewards.*.options.batch_size",
        "rewards.*.options.timeout",
        "rewards.*.options.wait",
    ),
}
NOT_SET = "none"


@dataclass(frozen=True)
class Change:
    """A setting that is not what it was.

    Attributes:
        name: its dotted name; a reward of a file has the name of its function there.
        then: its value when the run began.
        now: its value now; the same if what it names has another content.
        resumable: whether the run can go on.
    """

    name: str
    then: Any
    now: Any
    resumable: bool

    @property
    def is_of_content(self) -> bool:
        """Whether the setting is the same, and the content of what it names is another one."""
        return self.then == self.now


def changes(
    then: FlowGRPOConfig, now: FlowGRPOConfig, inputs_then: dict[str, str], inputs_now: dict[str, str]
) -> list[Change]:
    """The settings of a run that have changed.

    Args:
        inputs_then: digests of what settings name, by the settings' names. Where both runs have one, it is compared in place of the
            name, so that a file may be elsewhere.
        inputs_now: the same of the current run.
    """
    previous, current = dict(_flat(_plain(then))), dict(_flat(_plain(now)))
    inputs = {name: inputs_then[name] == digest for name, digest in inputs_now.items() if name in inputs_then}
    found = []
    for name in dict.fromkeys([*previous, *current]):
        before, after = previous.get(name, NOT_SET), current.get(name, NOT_SET)
        is_empty = {} in (before, after) and any(other.startswith(f"{name}.") for other in (*previous, *current))
        if before == after or is_empty or not inputs.get(_input_of(name), True):
            continue
        # runs of 0.4 have no digest, and name the config's prompts where others were given from Python
        is_compared = _input_of(name) in inputs or after == FROM_PYTHON
        resumable = is_compared or _is_resumable(name, len(now.stages))
        found.append(Change(name, before, after, resumable))
    different = [name for name, is_same in inputs.items() if not is_same]
    return found + [Change(n, previous.get(n, NOT_SET), current.get(n, NOT_SET), False) for n in different]


def _is_resumable(name: str, stages: int) -> bool:
    if name.startswith("stages."):
        _, number, name = name.split(".", 2)
        if name == "steps" and int(number) < stages - 1:  # a later stage would begin elsewhere
            return False
    known = [pattern for patterns in RESUMABLE.values() for pattern in patterns]
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in known)


def _input_of(name: str) -> str:
    """The input that a setting names: that of `prompts.0.file` is `prompts`."""
    section, _, rest = name.partition("prompts.")
    return f"{section}prompts" if rest.endswith(".file") else name


def _plain(args: FlowGRPOConfig) -> dict[str, Any]:
    """The settings, with rewards of files under the names of their functions."""
    values = args.model_dump(mode="json")
    short_names = [name.rpartition(":")[2] for name in values["rewards"]]
    if len(set(short_names)) == len(short_names):
        values["rewards"] = dict(zip(short_names, values["rewards"].values(), strict=True))
    return values


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The single settings with their dotted names; of a list of sections too."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        value = {str(number): part for number, part in enumerate(value)}
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
