"""Several prompt sets, mixed by weight, each with rewards of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flow_grpo.config.sections import PromptSetConfig
from flow_grpo.data.prompts import SET, PromptSampler, PromptSet, load_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.sampling import generator
from flow_grpo.types import PromptBatch

REWARDS = "rewards"  # metadata of each prompt: the weights of its set's rewards by name


@dataclass(frozen=True)
class PromptMixture(PromptSet):
    """All prompts of several sets, one set after another."""

    names: tuple[str, ...] = ()
    parts: tuple[PromptSet, ...] = ()
    weights: tuple[float, ...] = ()

    def head(self, count: int | None) -> "PromptMixture":
        """The first `count` prompts of each set; all if None."""
        return join_sets(self.names, [part.head(count) for part in self.parts], self.weights)


def load_run_prompts(source: Any) -> PromptSet:
    """Load prompts as `load_prompts` does, or the mixture of a list of `PromptSetConfig`.

    Raises:
        FlowGRPOError: as `load_prompts`, or the prompts have a column `prompt_set` or `rewards`.
    """
    if isinstance(source, PromptMixture):
        return source
    if not (isinstance(source, list) and source and all(isinstance(entry, PromptSetConfig) for entry in source)):
        return _without_reserved(load_prompts(source), "the PromptSet" if isinstance(source, PromptSet) else str(source))
    labels, weights = [config.label for config in source], [config.weight for config in source]
    return join_sets(labels, [_load_set(config) for config in source], weights)


def join_sets(names: Sequence[str], parts: Sequence[PromptSet], weights: Sequence[float]) -> PromptMixture:
    """Several prompt sets as one mixture."""
    prompts, metadata = [p for part in parts for p in part.prompts], [m for part in parts for m in part.metadata]
    notes = tuple(note for part in parts for note in part.notes)
    return PromptMixture(prompts, metadata, notes, names=tuple(names), parts=tuple(parts), weights=tuple(weights))


def _load_set(config: PromptSetConfig) -> PromptSet:
    """The prompts of a set, each with the set's name and rewards."""
    loaded = _without_reserved(load_prompts(config.file), config.file)
    rewards = dict.fromkeys(config.rewards) if isinstance(config.rewards, list) else config.rewards
    metadata = [{**row, SET: config.label, REWARDS: rewards} for row in loaded.metadata]
    return PromptSet(loaded.prompts, metadata, loaded.notes)


def _without_reserved(loaded: PromptSet, name: str) -> PromptSet:
    """The prompts themselves. FlowGRPOError if they have a column that only a list of sets may give them."""
    if any(SET in row for row in loaded.metadata):
        raise FlowGRPOError(f"{name} has a column `{SET}`, which is the name of a prompt's set: give it another name.")
    if any(REWARDS in row for row in loaded.metadata):  # by which 0.4 chose the rewards of each prompt
        raise FlowGRPOError(
            f"{name} has a column `{REWARDS}`, by which prompts no longer choose their rewards: give prompts with other rewards as a set, "
            "prompts=[{file: FILE, rewards: [NAME]}], or give the column another name."
        )
    return loaded


class MixedPromptSampler(PromptSampler):
    """Samples the prompts of training steps from several sets: each prompt's set is drawn by weight from (seed, step).

    Within a set, the prompts are those of a `PromptSampler`. Its arguments and methods are those of a `PromptSampler`.

    Raises:
        FlowGRPOError: on sampling more prompts at once than a set has.
    """

    def __init__(self, prompts: PromptMixture, seed: int) -> None:
        super().__init__(prompts, seed)
        self.names, self.parts, self.weights = prompts.names, prompts.parts, prompts.weights
        self.samplers = [PromptSampler(part, seed) for part in prompts.parts]
        self.starts = [0, *accumulate(len(part) for part in prompts.parts)]

    def sample(self, step: int, prompts: int, images: int) -> PromptBatch:
        """`prompts` different prompts with `images` images each."""
        for name, part in zip(self.names, self.parts, strict=True):
            if prompts > len(part):
                raise FlowGRPOError(
                    f"prompts_per_step={prompts}, but the prompt set {name} has {len(part)}, and all of a step may be drawn from it: "
                    "give it more prompts, or set a smaller prompts_per_step."
                )
        # 0: as in 0.4, so that its runs go on to the same prompts
        draws = torch.rand(prompts, generator=generator(self.seed, "prompt set", step, 0), dtype=torch.float64)
        bounds = torch.tensor(self.weights, dtype=torch.float64).cumsum(0)
        chosen = torch.bucketize(draws * bounds[-1], bounds, right=True).tolist()
        indices = {
            number: iter(self.samplers[number].sample_indices(chosen.count(number))) for number in sorted(set(chosen))
        }
        return self.prompts.take([self.starts[number] + next(indices[number]) for number in chosen], images)

    def state_dict(self) -> dict:
        return {name: sampler.state_dict() for name, sampler in zip(self.names, self.samplers, strict=True)}

    def load_state_dict(self, state: dict) -> None:
        for name, sampler in zip(self.names, self.samplers, strict=True):
            sampler.load_state_dict(state[name])


def sampler_of(prompts: PromptSet, seed: int) -> PromptSampler:
    """A sampler of the prompts of training steps, or of several sets of them."""
    if isinstance(prompts, PromptMixture):
        return MixedPromptSampler(prompts, seed)
    return PromptSampler(prompts, seed)
