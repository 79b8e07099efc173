"""Which settings a run may change when it is resumed: one table, and what of two configs differs by it."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.config.sections import FROM_PYTHON

# The settings that a resumed run may change, each with all settings below it; * is any name. No other may change.
RESUMABLE = {
    "how long the run is": ("steps",),
    "what is written, and when": ("output_dir", "save_every", "keep_checkpoints", "trackers"),
    "what is measured besides the trained rewards, and when": (
        "evaluation.every",
        "evaluation.num_images",
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
        "memory.shard_within",
        "memory.compile",
        "memory.attention_backend",
        "memory.offload_trajectories",
        "memory.vae_slicing",
    ),
    "where a reward runs, and what is done when it fails": (
        "rewards.*.remote",
        "rewards.*.isolate",
        "rewards.*.python",
        "rewards.*.on_error",
        "rewards.*.options.attempts",
        "rewards.*.options.batch_size",
        "rewards.*.options.timeout",
        "rewards.*.options.token",
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
        inputs_now: the same of the present run.
    """
    former, present = dict(_flat(_plain(then))), dict(_flat(_plain(now)))
    inputs = {name: inputs_then[name] == digest for name, digest in inputs_now.items() if name in inputs_then}
    found = []
    for name in dict.fromkeys([*former, *present]):
        before, after = former.get(name, NOT_SET), present.get(name, NOT_SET)
        is_empty = {} in (before, after) and any(other.startswith(f"{name}.") for other in (*former, *present))
        if before == after or is_empty or not inputs.get(_input_of(name), True):
            continue
        # runs of 0.4 have no digest, and name the config's prompts where others were given from Python
        is_compared = _input_of(name) in inputs or after == FROM_PYTHON
        resumable = is_compared or _is_resumable(name, len(now.stages))
        found.append(Change(name, before, after, resumable))
    different = [name for name, is_same in inputs.items() if not is_same]
    return found + [Change(n, former.get(n, NOT_SET), present.get(n, NOT_SET), False) for n in different]


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
