"""The size of a pipeline's images, which may differ from the size that it is called with."""

import torch

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.text import first_line


@torch.no_grad()
def check_size(model: FlowPipeline, setting: str, height: int | None, width: int | None) -> None:
    """Generate an image in one step without its noise being removed. FlowGRPOError if that fails or has another size.

    Args:
        setting: the name of the settings of the size, for the error.
        height, width: as the pipeline is called, None for its own size.
    """
    name, row = type(model.pipe).__name__, torch.zeros(1, dtype=torch.long)
    try:
        schedule, shape = model.schedule(2)
        x = torch.zeros(1, *shape)
        model.velocity(x, schedule.timesteps[0], model.encode(model.probe_prompts[:1]), row)
        size = model.decode(x).shape[-2:]
    except (torch.OutOfMemoryError, FlowGRPOError):  # the latter says what the pipeline can't be called with
        raise
    except Exception as error:  # each pipeline has its own
        raise FlowGRPOError(f"{setting}: {name} can't generate {height} x {width} pixels: {first_line(error)}") from error
    check_generated(name, setting, (height, width), size)


def check_generated(name: str, setting: str, asked: tuple[int | None, int | None], size: torch.Size) -> None:
    """FlowGRPOError if the images of the pipeline of that name have another size than asked, where a size is asked."""
    height, width = (side or own for side, own in zip(asked, size, strict=True))
    if tuple(size) != (height, width):
        raise FlowGRPOError(
            f"{setting}: {name} generates {size[0]} x {size[1]} pixels, not {height} x {width}: set that size."
        )
