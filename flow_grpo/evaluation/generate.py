"""Images from prompts and seeds: what `sample` and every evaluation generate."""

from collections.abc import Callable

import torch
from torch import Tensor

from flow_grpo import sampling
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.progress import phase
from flow_grpo.text import counted
from flow_grpo.training.interrupt import interruptible


def image_seed(seed: int, prompt_index: int, number: int = 0) -> int:
    """The seed of an evaluation's image, with which `sample` generates the same image.

    Args:
        seed: of the evaluation; evaluations with different seeds have different noise.
        prompt_index: of the prompt in its file.
        number: of the image among those of its prompt.
    """
    return sampling.derived_seed(seed, "evaluation", prompt_index, number)


@torch.no_grad()
def generate_images(
    model: FlowPipeline,
    prompts: list[str],
    seeds: list[int],
    steps: int,
    microbatch: int = 64,
    noun: str = "image",
    should_stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Generate images (B, 3, H, W) in [0, 1] of B prompts with the ODE sampler; the noise of each depends on its seed only.

    Args:
        noun: what is generated, for the progress line.
        should_stop: if it returns True, `Interrupted` is raised before the next forward pass.
    """
    schedule, shape = model.schedule(steps)
    with phase("encoding prompts"):
        conditioning = model.encode(prompts)
    start = torch.stack([sampling.noise(shape, seed, "sample") for seed in seeds]).to(model.device)
    name = f"generating {counted(len(prompts), noun)}"
    with phase(name, total=len(prompts) * len(schedule), unit="sampling steps") as steps_done:

        def latents(rows: Tensor) -> Tensor:
            velocity = interruptible(model.velocity_fn(schedule, conditioning, rows), should_stop)

            def counting(x: Tensor, i: int) -> Tensor:
                steps_done.advance(len(x))
                return velocity(x, i)

            return sampling.rollout(counting, schedule, start[rows]).final

        return model.decode(torch.cat([latents(rows) for rows in torch.arange(len(start)).split(microbatch)]), microbatch)
