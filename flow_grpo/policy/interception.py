"""Replacements for a pipeline's scheduler and transformer, which end its call early."""

import copy
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from torch import Tensor

TABLE_SIZE = 4096  # of a shift: linear between them, sigma is off by less than 1e-5


class StopPipeline(Exception):
    """Leaves a pipeline's call with the transformer's output and the state."""

    def __init__(self, output: Any = None, sample: Tensor | None = None) -> None:
        self.output, self.sample = output, sample


class InterceptingScheduler(FlowMatchEulerDiscreteScheduler):
    """The Euler scheduler of a flow, with the timesteps that are requested and a `step` that ends the call."""

    requested_timesteps: Tensor | None = None
    _mu: float | None = None
    _given: tuple[np.ndarray, np.ndarray | None] | None = (
        None  # sigmas before the shift, as the pipeline gave them, and its timesteps, where the scheduler takes them
    )

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> "InterceptingScheduler":
        """Make one with the config of a pipeline's scheduler, which may be a solver of higher order."""
        config = dict(scheduler.config)
        if "flow_shift" in config:
            config["shift"] = config["flow_shift"]
        return cls.from_config(config)

    def scale_model_input(self, sample, timestep=None):
        return sample

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        # pipelines look for these argument names
        if self.requested_timesteps is not None:
            self.timesteps = self.requested_timesteps
            return
        super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        own = timesteps is not None
        if sigmas is None:
            count = self.config.num_train_timesteps
            sigmas = (
                np.asarray(timesteps) / count if own else np.linspace(self.sigma_max, self.sigma_min, len(self.timesteps))
            )
        used = self.timesteps.double().cpu().numpy()
        kept = own and np.allclose(used, timesteps)  # diffusers 0.41 computes them from the shifted sigmas all the same
        self._mu, self._given = mu, (np.asarray(sigmas, dtype=float), used if kept else None)

    def shift_table(self) -> Float[Tensor, "M 3"]:
        """`Schedule.shift` of the last `set_timesteps`, by diffusers' own formulas; what a pipeline does to sigmas itself is left out.

        A schedule that is stretched to `shift_terminal`, or has Karras', exponential or beta sigmas, ends at its last step; from there
        sigma falls to 0 in proportion, as the last step of the sampler does.
        """
        assert self._given is not None
        given, timesteps = self._given
        config = self.config
        is_spaced = config.use_karras_sigmas or config.use_exponential_sigmas or config.use_beta_sigmas
        if config.shift_terminal or is_spaced:  # a grid with the schedule's own levels, on which these depend
            parts = max(1, TABLE_SIZE // max(1, len(given) - 1))
            levels = np.linspace(given[0], given[-1], (len(given) - 1) * parts + 1)
        else:
            levels = np.linspace(1, 0, TABLE_SIZE + 1)[:-1]
        dense = copy.copy(self)
        FlowMatchEulerDiscreteScheduler.set_timesteps(dense, sigmas=levels, mu=self._mu)
        sigmas = 1 - dense.sigmas if config.invert_sigmas else dense.sigmas
        levels = np.append(levels, 0.0)
        end = config.num_train_timesteps if config.invert_sigmas else 0.0
        times = torch.cat([dense.timesteps, dense.timesteps.new_tensor([end])])
        if timesteps is not None:
            times = torch.from_numpy(np.interp(levels, np.append(given, 0.0)[::-1], np.append(timesteps, 0.0)[::-1]))
        return torch.stack([torch.from_numpy(levels).float(), times.float(), sigmas.float()], 1)

    def step(self, model_output, timestep, sample, **kwargs):
        raise StopPipeline(output=model_output, sample=sample)


class StopAtTransformer:
    """Stands in for the transformer while prompts are encoded: a call of it ends the pipeline's."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self._transformer = transformer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StopPipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)


def with_execution_device(kind: type, device: torch.device) -> type:
    """A subclass of the pipeline that computes on that device, even if some of its parts are on another one."""
    device_property = property(lambda self: device)
    return type(kind.__name__, (kind,), {"_execution_device": device_property, "device": device_property})


def images_to_tensor(images: Any) -> Tensor:
    """(B, 3, H, W) of the images that a pipeline returns: a tensor, or PIL images from pipelines that return nothing else.

    Images with an alpha channel are shown on white. Videos (B, F, 3, H, W) stay as they are.
    """
    if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] == 4:
        return 1 - images[:, 3:].clamp(0, 1) * (1 - images[:, :3])
    if isinstance(images, Tensor):
        return images
    return torch.stack(
        [torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1) / 255 for image in images]
    )
