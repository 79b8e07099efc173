"""Can a pipeline be trained? One check after another, on the model itself.

The tests run the same checks on every supported pipeline family; `flow-grpo doctor --model` runs them on a model of the user's.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.doctor.result import ERROR, OK, WARNING, CheckResult
from flow_grpo.image_prompt import with_images
from flow_grpo.policy.lora import TRAINED
from flow_grpo.policy.policy import Policy
from flow_grpo.types import Schedule, StochasticSteps

PROMPTS = ["a red cat", "a blue dog on a very long and winding road"]
NUM_STEPS = 3
PIXEL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # pixels in [0, 1], by the policy's dtype
# of an unfit pipeline
EXPECTED_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    AssertionError,
    KeyError,
)


def check_model(policy: Policy) -> Iterator[CheckResult]:
    """Check the model on images of the call's size. The policy must not have a LoRA; it gets one on the way."""
    checks = CompatibilityChecks(policy)
    for check in (
        checks.matches_pipeline,
        checks.lora_on_off,
        checks.gradients,
        checks.replay,
        checks.timesteps,
        checks.prompts,
        *([checks.images] if policy.takes_images else []),
        checks.lora_roundtrip,
    ):
        try:
            yield check()
        except EXPECTED_ERRORS as error:
            first = (str(error).splitlines() or [""])[0][:120]
            optional = check == checks.images and not policy.family.needs_image  # texts alone can still be trained on
            yield CheckResult(_title(check), type(error).__name__, WARNING if optional else ERROR, f"fails: {first}")


def _title(check: Callable) -> str:
    """The first line of its docstring."""
    return (check.__doc__ or "").rstrip(".")


def _result(check: Callable, value: str, passed: bool, otherwise: str) -> CheckResult:
    return CheckResult(_title(check), value, OK if passed else ERROR, "" if passed else otherwise)


class CompatibilityChecks:
    """Checks that run in this order: the second one adds a LoRA, and the last one removes it and loads it again."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tolerance = PIXEL_TOLERANCE[policy.dtype]
        self.probe_images = policy.probe_images(2) if policy.takes_images else []
        needs = policy.family.needs_image
        self.pair = [with_images(text, [self.probe_images[i]] if needs else []) for i, text in enumerate(PROMPTS)]

    def _initial_latents(self, prompts: list[str]) -> Tensor:
        return torch.cat([self.policy.initial_latents([prompt], seed) for seed, prompt in enumerate(prompts)])

    def _velocity(self, rows: Sequence[int] = (0, 1)) -> tuple[Schedule, sampling.Velocity]:
        """The schedule, and the velocity of these prompts of the pair."""
        schedule, _ = self.policy.schedule(NUM_STEPS)
        return schedule, self.policy.velocity_fn(schedule, self.policy.encode(self.pair), torch.tensor(rows))

    def _image(self, start: Tensor) -> Tensor:
        """The image of the first prompt from its initial latents."""
        schedule, velocity = self._velocity([0])
        return self.policy.decode(sampling.rollout(velocity, schedule, start[:1]).final, 1)

    def matches_pipeline(self) -> CheckResult:
        """ODE sampling gives the image of the pipeline's own call."""
        expected = self.policy.diffusers_image(self.pair[0], NUM_STEPS, seed=0)
        difference = (self._image(self._initial_latents(self.pair)) - expected).abs().max().item()
        return _result(
            self.matches_pipeline,
            f"{difference:.1e}",
            difference < self.tolerance,
            "the velocity differs from the one that the pipeline samples with",
        )

    def lora_on_off(self) -> CheckResult:
        """A LoRA finds its modules, and without it the model is the base model."""
        x = self._initial_latents(self.pair)
        _, velocity = self._velocity()
        with torch.no_grad():
            base = velocity(x, 0)
            self.policy.add_lora(4, 8, None, seed=0)
            generator = torch.Generator().manual_seed(0)
            for parameter in self.policy.trainable_parameters().values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
            moved = (velocity(x, 0) - base).abs().max().item()
            with self.policy.base_model():
                same = torch.equal(velocity(x, 0), base)
        count = sum("lora_A" in name for name in self.policy.trainable_parameters())
        return _result(
            self.lora_on_off, f"{count} modules", same and moved > 0, "without the LoRA, the model is not the base model"
        )

    def gradients(self) -> CheckResult:
        """Gradients reach the LoRA."""
        schedule, velocity = self._velocity()
        for step in (0, len(schedule) - 1) if self.policy.lora.experts else (0,):  # each expert has a part of the schedule
            velocity(self._initial_latents(self.pair), step).square().mean().backward()
        received = [p.grad is not None and bool(p.grad.any()) for p in self.policy.trainable_parameters().values()]
        for parameter in self.policy.trainable_parameters().values():
            parameter.grad = None
        share = sum(received) / len(received)
        # the last block may discard its text features
        return _result(
            self.gradients, f"{share:.0%}", share > 0.8, "set lora.targets to modules that the velocity depends on"
        )

    def replay(self) -> CheckResult:
        """A sampled step, computed again, has a ratio of exactly 1."""
        schedule, velocity = self._velocity()
        start = self._initial_latents(self.pair)
        noise = sampling.noise(start.shape, 0, "doctor")
        stochastic = StochasticSteps([0], "cps", noise_level=0.7)
        trajectory = sampling.rollout(velocity, schedule, start, stochastic=stochastic, noise=lambda i: noise)
        log_prob = sampling.replay(velocity, trajectory, k=0, rows=torch.arange(2)).log_prob
        ratio = (log_prob - trajectory.log_prob[:, 0]).exp()
        difference = (ratio - 1).abs().max().item()
        return _result(
            self.replay, f"{difference:.1e}", difference == 0, "look for dropout, or kernels that are not deterministic"
        )

    def timesteps(self) -> CheckResult:
        """Rows of a batch can have different timesteps."""
        schedule, _ = self.policy.schedule(4)
        conditioning, rows = self.policy.encode(self.pair), torch.arange(2)
        x, timesteps = self._initial_latents(self.pair), schedule.timesteps[[0, 2]]
        with torch.no_grad():
            both = self.policy.velocity(x, timesteps, conditioning, rows)
            alone = [self.policy.velocity(x[i : i + 1], timesteps[i], conditioning, rows[i : i + 1]) for i in range(2)]
        difference = ((both - torch.cat(alone)).abs().max() / both.abs().max()).item()
        value = "in one call" if self.policy.supports_per_sample_timesteps else "in one call per timestep"
        return _result(self.timesteps, value, difference < self.tolerance, "they change each other's velocity")

    def prompts(self) -> CheckResult:
        """A prompt does not change the result for another one."""
        x, same = self._initial_latents(self.pair), [0, 0]
        with torch.no_grad():
            both, alone = self._velocity()[1](x, 0), self._velocity(same)[1](x[same], 0)
        difference = ((both[0] - alone[0]).abs().max() / alone[0].abs().max()).item()
        kinds = len(self.policy.encode(self.pair).call_group.unique())
        value = "in one call" if kinds == 1 else "in one call per prompt length"
        return _result(self.prompts, value, difference < self.tolerance, "rows of a batch change each other")

    def images(self) -> CheckResult:
        """Prompts of a batch get their own images, and images change the result."""
        first, second = (with_images(PROMPTS[0], [image]) for image in self.probe_images)
        schedule, _ = self.policy.schedule(NUM_STEPS)
        x = self._initial_latents([first]).expand(2, *self.policy.schedule(NUM_STEPS)[1])
        rows = torch.arange(2)
        with torch.no_grad():
            both = self.policy.velocity(x, schedule.timesteps[0], self.policy.encode([first, second]), rows)
            alone = [
                self.policy.velocity(x[:1], schedule.timesteps[0], self.policy.encode([prompt]), rows[:1])
                for prompt in (first, second)
            ]
        difference = ((both - torch.cat(alone)).abs().max() / both.abs().max()).item()
        value = "in one call" if self.policy.supports_images_per_row else "in one call per prompt"
        changes = bool((both[0] - both[1]).abs().max() > 0)
        otherwise = "rows of a batch change each other" if changes else "the image changes nothing: the pipeline ignores it"
        return _result(self.images, value, changes and difference < self.tolerance, otherwise)

    def lora_roundtrip(self) -> CheckResult:
        """The saved LoRA gives the same image in plain diffusers."""
        start = self._initial_latents(self.pair)
        expected = self._image(start)
        with tempfile.TemporaryDirectory() as folder:
            file = self.policy.lora.save(Path(folder))
            self.policy.lora.remove(TRAINED)
            self.policy.load_lora(folder)
        image = self.policy.diffusers_image(self.pair[0], NUM_STEPS, seed=0)
        difference = (image - expected).abs().max().item()
        return _result(self.lora_roundtrip, file.name, difference < self.tolerance, f"its image differs by {difference:.1e}")
