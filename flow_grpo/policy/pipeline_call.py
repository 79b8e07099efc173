"""The call of a pipeline: with its own encode methods, or with what they returned once in their place."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from typing_extensions import Self

from flow_grpo.image_prompt import images_of
from flow_grpo.policy.conditioning import Conditioning
from flow_grpo.policy.encoding import without_state
from flow_grpo.policy.families import Family
from flow_grpo.policy.interception import InterceptingScheduler, StopPipeline


class PipelineCall:
    """Calls a pipeline, or a copy of it, with the arguments of this model.

    Args:
        pipe: the user's pipeline.
        intercepted: a copy of it with `scheduler` and without progress bar.
        parameters: of the pipeline's `__call__`.
        arguments: of every call.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        intercepted: Any,
        scheduler: InterceptingScheduler,
        *,
        family: Family,
        parameters: Any,
        arguments: dict[str, Any],
        autocast: Callable[[], torch.autocast],
    ) -> None:
        self.pipe, self.intercepted, self.scheduler = pipe, intercepted, scheduler
        self.family, self.parameters, self.arguments, self.autocast = family, parameters, arguments, autocast
        self.device: torch.device = pipe.transformer.device
        # what prepare_latents returns for that many rows without images, less the state
        self._prepared: dict[int, tuple] = {}

    def with_arguments(self, **more: Any) -> Self:
        """Return a copy with further arguments."""
        call = copy.copy(self)
        call.arguments, call._prepared = {**self.arguments, **more}, {}
        return call

    def __call__(self, pipe: Any, prompts: list[str], **kwargs: Any) -> Any:
        """Call a copy of the pipeline with the images of the first prompt; recordings give the other rows theirs.

        Returns what it stopped with, or the pipeline's own output if it ran to the end.
        """
        call = {"num_inference_steps": 1, "output_type": "latent", **self.prompt_arguments(prompts), **kwargs}
        if "generator" in self.parameters and "generator" not in call:
            # what it draws is not used, and the global random stream is left alone
            call["generator"] = torch.Generator(self.device).manual_seed(0)
        try:
            with self.autocast():
                undecorated = inspect.unwrap(type(pipe).__call__)  # not under no_grad: gradients flow
                return undecorated(pipe, **call)
        except StopPipeline as stop:
            return stop

    def prompt_arguments(self, prompts: list[str]) -> dict[str, Any]:
        """The arguments of a call with these prompts."""
        call, images = {**self.arguments, "prompt": [str(prompt) for prompt in prompts]}, images_of(prompts[0])
        if "max_area" in self.parameters and {"height", "width"} <= call.keys():
            # without it, the size would be changed to an area of the pipeline's own
            call.setdefault("max_area", call["height"] * call["width"])
        if images:
            opened = [image.open() for image in images]
            # some encode one prompt with images at a time
            call |= {"prompt": [str(prompts[0])], "num_images_per_prompt": len(prompts)}
            call[self.family.image] = opened[0] if len(opened) == 1 else opened
        if isinstance(call.get("negative_prompt"), str):
            call["negative_prompt"] = [call["negative_prompt"]] * len(call["prompt"])
        return call

    def call_with_recordings(
        self, conditioning: Conditioning, rows: Tensor, timesteps: Tensor | None, x: Tensor | None, **kwargs: Any
    ) -> Any:
        """Call the pipeline with recorded embeddings.

        Args:
            timesteps: what the scheduler requests; None for the pipeline's own schedule.
            x: states in place of the initial ones; None for the pipeline's own.
        """
        self.scheduler.requested_timesteps = None if timesteps is None else timesteps.to(self.device, non_blocking=True)
        prompts, outputs = conditioning.select(rows)
        pipe, recorded = copy.copy(self.intercepted), iter(outputs)

        def replayed(name: str) -> Callable:
            def call(*args: Any, **kwargs: Any) -> Any:
                method, output = next(recorded)
                assert method == name
                if name != "prepare_latents":
                    return output
                state, *rest = output if x is not None else (self._own_state(*args, **kwargs), *output[1:])
                return _with_state(state if x is None else x.to(state.device, state.dtype), rest)

            return call

        names = {name for name, _ in outputs}
        for name in names:
            object.__setattr__(pipe, name, replayed(name))
        if x is not None and "prepare_latents" not in names:
            if hasattr(self.pipe, "prepare_latents"):
                object.__setattr__(
                    pipe, "prepare_latents", self._fixed_prepare_latents(x, {} if images_of(prompts[0]) else self._prepared)
                )
            else:
                kwargs["latents"] = x.to(self.device, self.pipe.transformer.dtype)
        return self(pipe, prompts, **kwargs)

    def _own_state(self, *args: Any, **kwargs: Any) -> Tensor:
        latents = self.intercepted.prepare_latents(*args, **kwargs)
        return latents[0] if isinstance(latents, tuple) else latents

    def _fixed_prepare_latents(self, x: Tensor, prepared: dict[int, tuple]) -> Callable:
        """In place of `prepare_latents`: our state in the dtype of the pipeline's, with whatever else that returns.

        Args:
            prepared: what it returned before, less the state, by the number of rows.
        """

        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            if len(x) not in prepared:
                prepared[len(x)] = without_state(self.pipe.prepare_latents(*args, **kwargs))
            like, *rest = prepared[len(x)]
            return _with_state(x.to(like.device, like.dtype), rest)

        return prepare_latents


def _with_state(state: Tensor, rest: list[Any]) -> Any:
    """What `prepare_latents` returns."""
    return (state, *rest) if rest else state
