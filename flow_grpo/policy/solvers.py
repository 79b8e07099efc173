"""ODE solvers of order 2 as `sampling.rollout` takes them. A file of its own, as sampling.py imports no diffusers."""

from collections.abc import Callable

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchHeunDiscreteScheduler
from torch import Tensor

from flow_grpo.sampling import Advance, Solver
from flow_grpo.types import Schedule


def heun(schedule: Schedule) -> Solver:
    """Heun's method by diffusers: two velocities a step, an Euler step at the end (arXiv 2206.00364)."""

    def doubled(values: Tensor) -> Tensor:
        return torch.cat([values[:1], values[1:].repeat_interleave(2)])

    def start(steps: range) -> tuple[list[int], Advance]:
        sigmas = _sigmas(schedule, steps)
        calls = [steps.start + (call + 1) // 2 for call in range(2 * len(steps) - 1)]
        return calls, _advance(FlowMatchHeunDiscreteScheduler(), steps, torch.cat([doubled(sigmas[:-1]), sigmas[-1:]]))

    return start


def dpm_2m(schedule: Schedule) -> Solver:
    """DPM-Solver++ (2M) by diffusers: one velocity a step, extrapolated from the step before (arXiv 2211.01095).

    It extrapolates the predicted image over log((1 - sigma) / sigma). Euler's are: its first step; its second from sigma 1, where that is
    infinite; and its last, whether that leads to sigma 0 or to a window.
    """

    def start(steps: range) -> tuple[list[int], Advance]:
        scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
        return list(steps), _advance(scheduler, steps, _sigmas(schedule, steps))

    return start


def ab2(schedule: Schedule) -> Solver:
    """The Adams-Bashforth method of order 2 with variable steps: one velocity a step, extrapolated over sigma from the step before.

    `x += h ((1 + r / 2) v - r / 2 v_before)` with r the length of this step over that of the step before. The first step is Euler's.
    """
    lengths = schedule.sigmas.diff()

    def start(steps: range) -> tuple[list[int], Advance]:
        step, v_before = steps.start, None

        def advance(x: Tensor, v: Tensor) -> Tensor:
            nonlocal step, v_before
            slope = v if v_before is None else v + lengths[step] / lengths[step - 1] / 2 * (v - v_before)
            x, v_before, step = x + lengths[step] * slope, v, step + 1
            return x

        return list(steps), advance

    return start


SOLVERS: dict[str, Callable[[Schedule], Solver]] = {"heun": heun, "dpm_2m": dpm_2m, "ab2": ab2}


def ode_solver(name: str, schedule: Schedule) -> Solver | None:
    """The solver of that name on a schedule; None for Euler, which `sampling.rollout` is without one."""
    return None if name == "euler" else SOLVERS[name](schedule)


def _sigmas(schedule: Schedule, steps: range) -> Tensor:
    """The sigmas before, between and after adjacent steps."""
    return schedule.sigmas[steps.start : steps.stop + 1]


def _advance(
    scheduler: DPMSolverMultistepScheduler | FlowMatchHeunDiscreteScheduler, steps: range, sigmas: Tensor
) -> Advance:
    """A diffusers scheduler at the start of these sigmas, in place of its own."""
    scheduler.set_timesteps(len(steps))
    scheduler.sigmas = sigmas
    scheduler.set_begin_index(0)
    timestep = 0.0  # not read: the scheduler counts its steps
    return lambda x, v: scheduler.step(v, timestep, x).prev_sample
