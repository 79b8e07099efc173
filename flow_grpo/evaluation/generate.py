"""Images from prompts and seeds: what `sample` and every evaluation generate."""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.policy.policy import Policy
from flow_grpo.progress import phase
from flow_grpo.training.interrupt import interruptible


def image_seed(seed: int, place: int, number: int = 0) -> int:
    """The seed of an evaluation's image, by which `sample` draws it again.

    Args:
        seed: of the evaluation; two evaluations with different seeds share no noise.
        place: of the prompt in its file.
        number: of the image among those of its prompt.
    """
    return sampling.derived_seed(seed, "evaluation", place, number)


@torch.no_grad()
def generate_images(
    policy: Policy,
    prompts: list[str],
    seeds: list[int],
    steps: int,
    microbatch: int = 64,
    what: str = "drawing images",
    stopping: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Images (B, 3, H, W) in [0, 1] of B prompts by the ODE, each from the noise of its seed alone.

    Args:
        what: names the phase.
        stopping: `Interrupted` leaves it before a forward pass if it says so.
    """
    schedule, shape = policy.schedule(steps)
    with phase("encoding prompts"):
        conditioning = policy.encode(prompts)
    start = torch.stack([sampling.noise(shape, seed, "sample") for seed in seeds])
    velocity = interruptible(policy.velocity_fn(schedule, conditioning), stopping)

    with phase(what, total=len(prompts) * len(schedule)) as steps_done:

        def counted(x: Tensor, i: int, rows: Tensor) -> Tensor:
            steps_done.advance(len(rows))
            return velocity(x, i, rows)

        trajectory = sampling.rollout(counted, schedule, start, microbatch=microbatch)
        return policy.decode(trajectory.final, microbatch)
