"""Whether a pipeline keeps the conventions that let it be trained: looked at on the model itself, check by check.

The tests ask the same of every family they know; `flow-grpo doctor --model` asks it of a model of one's own.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo import sampling, sde
from flow_grpo.policy.policy import Policy
from flow_grpo.types import Schedule

PROMPTS = ["a red cat", "a blue dog on a very long and winding road"]
STEPS = 3
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of a pixel in [0, 1], by what is computed in


@dataclass(frozen=True)
class Check:
    name: str
    number: str
    verdict: str
    fine: bool


def examine(policy: Policy) -> Iterator[Check]:
    """One check after another, on pictures of the call's size. The policy must not have a LoRA; it gets one on the way."""
    look = _Look(policy)
    for check in (look.own_call, look.lora, look.gradients, look.replay, look.timesteps, look.prompts, look.saved):
        try:
            yield check()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError, KeyError) as error:
            first = (str(error).splitlines() or [""])[0][:120]
            yield Check(_title(check), type(error).__name__, f"fails: {first}", False)


def _title(check: Callable) -> str:
    return (check.__doc__ or "").rstrip(".")


class _Look:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.close = CLOSE[policy.dtype]

    def _start(self, prompts: list[str]) -> Tensor:
        return torch.cat([self.policy.initial_latents([prompt], seed) for seed, prompt in enumerate(prompts)])

    def _velocity(self, steps: int = STEPS) -> tuple[Schedule, Callable[[Tensor, int, Tensor], Tensor]]:
        schedule, _ = self.policy.schedule(steps)
        return schedule, self.policy.velocity_fn(schedule, self.policy.encode(PROMPTS))

    def _pictures(self, start: Tensor) -> Tensor:
        schedule, velocity = self._velocity()
        trajectory = sampling.rollout(velocity, schedule, start, microbatch=1)
        return self.policy.decode(trajectory.final, 1)

    def own_call(self) -> Check:
        """Without noise it draws the pipeline's own picture."""
        expected = self.policy.diffusers_image(PROMPTS[0], STEPS, seed=0)
        off = (self._pictures(self._start(PROMPTS))[:1] - expected).abs().max().item()
        return self._verdict(
            self.own_call, f"{off:.1e}", off < self.close, "the velocity is not the one that it samples with"
        )

    def lora(self) -> Check:
        """A LoRA finds its modules, and switched off it is the base model."""
        x, rows = self._start(PROMPTS), torch.arange(2)
        _, velocity = self._velocity()
        with torch.no_grad():
            base = velocity(x, 0, rows)
            self.policy.add_lora(4, 8, None, seed=0)
            generator = torch.Generator().manual_seed(0)
            for parameter in self.policy.trainable_parameters().values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
            moved = (velocity(x, 0, rows) - base).abs().max().item()
            with self.policy.reference():
                same = torch.equal(velocity(x, 0, rows), base)
        count = sum("lora_A" in name for name in self.policy.trainable_parameters())
        return self._verdict(
            self.lora, f"{count} modules", same and moved > 0, "switched off, it does not give the base model"
        )

    def gradients(self) -> Check:
        """Gradients reach the LoRA."""
        _, velocity = self._velocity()
        velocity(self._start(PROMPTS), 0, torch.arange(2)).square().mean().backward()
        found = [p.grad is not None and bool(p.grad.any()) for p in self.policy.trainable_parameters().values()]
        for parameter in self.policy.trainable_parameters().values():
            parameter.grad = None
        share = sum(found) / len(found)
        # a last block may throw away what it computes of the text
        return self._verdict(
            self.gradients, f"{share:.0%}", share > 0.8, "set lora.targets to modules that the velocity depends on"
        )

    def replay(self) -> Check:
        """A stored step, computed again, has a ratio of exactly 1."""
        schedule, velocity = self._velocity()
        start = self._start(PROMPTS)
        noise = sampling.noise(start.shape, 0, "doctor")
        trajectory = sampling.rollout(
            velocity,
            schedule,
            start,
            microbatch=2,
            trained=[0],
            transition="cps",
            noise_level=0.7,
            step_noise=lambda i: noise,
        )
        _, mean, std = sampling.replay(velocity, trajectory, 0, torch.arange(2), "cps", 0.7)
        ratio = (sde.log_prob(trajectory.x_next[:, 0], mean, std) - trajectory.log_prob_BK[:, 0]).exp()
        off = (ratio - 1).abs().max().item()
        return self._verdict(self.replay, f"{off:.1e}", off == 0, "look for dropout, or kernels that are not deterministic")

    def timesteps(self) -> Check:
        """Rows of a call can have timesteps of their own."""
        schedule, _ = self.policy.schedule(4)
        conditioning, rows = self.policy.encode(PROMPTS), torch.arange(2)
        x, timesteps = self._start(PROMPTS), schedule.timesteps[[0, 2]]
        with torch.no_grad():
            both = self.policy.velocity(x, timesteps, conditioning, rows)
            alone = [self.policy.velocity(x[i : i + 1], timesteps[i], conditioning, rows[i : i + 1]) for i in range(2)]
        off = ((both - torch.cat(alone)).abs().max() / both.abs().max()).item()
        how = "in one call" if self.policy.supports_per_sample_timesteps else "in calls of their own"
        return self._verdict(self.timesteps, how, off < self.close, "they change each other's velocity")

    def prompts(self) -> Check:
        """A prompt does not change what becomes of another."""
        _, velocity = self._velocity()
        x, same = self._start(PROMPTS), torch.zeros(2, dtype=torch.long)
        with torch.no_grad():
            both, alone = velocity(x, 0, torch.arange(2)), velocity(x[same], 0, same)
        off = ((both[0] - alone[0]).abs().max() / alone[0].abs().max()).item()
        kinds = len(self.policy.encode(PROMPTS).call_group.unique())
        how = "in one call" if kinds == 1 else "each length in calls of its own"
        return self._verdict(self.prompts, how, off < self.close, "rows of a call are mixed up")

    def saved(self) -> Check:
        """The saved LoRA gives the same picture in plain diffusers."""
        start = self._start(PROMPTS)
        expected = self._pictures(start)[:1]
        with tempfile.TemporaryDirectory() as folder:
            file = self.policy.lora.save(Path(folder))
            self.policy.lora.remove()
            self.policy.load_lora(folder)
        found = self.policy.diffusers_image(PROMPTS[0], STEPS, seed=0)
        off = (found - expected).abs().max().item()
        return self._verdict(self.saved, file.name, off < self.close, f"its picture is off by {off:.1e}")

    def _verdict(self, check: Callable, number: str, fine: bool, otherwise: str) -> Check:
        return Check(_title(check), number, "fine" if fine else otherwise, fine)
