"""Encoded prompts: what a pipeline's encoders return is recorded for each prompt alone and collated for any batch.

A pipeline encodes prompts by methods such as `encode_prompt`. What each call of them returned for one prompt is an `EncoderOutputs`;
where its tensors have their batch axis is inferred by encoding one prompt and then two, so it need not be known of any family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.image_prompt import images_of

EncoderOutputs = list[tuple[str, Any]]  # (method, what it returned), in the order of the calls
SHARED, LIST, CUMULATIVE, ABSENT = "shared", "rows", "cumulative", "absent"  # in place of an axis, see `infer_batch_axes`


def infer_batch_axes(single: Any, double: Any) -> Any:
    """Infer the batch axes of a structure: `single` was returned for a prompt, `double` for that prompt twice.

    Returns the same structure with, for each tensor, its batch axis, SHARED, or CUMULATIVE (lengths summed up, from 0 on); for a
    list with an item per prompt, LIST; for None, ABSENT; for anything else, SHARED.
    """
    if single is None:
        return ABSENT
    if isinstance(single, Tensor) and isinstance(double, Tensor):
        grown = [axis for axis, (a, b) in enumerate(zip(single.shape, double.shape, strict=True)) if a != b]
        if not grown:
            return SHARED
        if single.ndim == 1 and len(single) == 2 and len(double) == 3 and single[0] == double[0] == 0:
            return CUMULATIVE
        if len(grown) == 1 and double.shape[grown[0]] == 2 * single.shape[grown[0]]:
            return grown[0]
        raise FlowGRPOError(
            f"prompts become tensors of shape {tuple(single.shape)} alone and {tuple(double.shape)} in pairs."
        )
    if isinstance(single, (list, tuple)) and isinstance(double, (list, tuple)):
        if len(single) != len(double):
            return LIST
        return [infer_batch_axes(a, b) for a, b in zip(single, double, strict=True)]
    if isinstance(single, dict):
        raise FlowGRPOError(
            f"encoded prompts come as a {type(single).__name__}, of which only lists and tensors are understood."
        )
    return SHARED


def merge_axes(axes: Any, other_axes: Any) -> Any:
    """The axes of two prompts combined: a mask may be absent for one of them."""
    if axes == ABSENT:
        return other_axes
    if isinstance(axes, list) and isinstance(other_axes, list):
        return [merge_axes(a, b) for a, b in zip(axes, other_axes, strict=True)]
    return axes


def collate(parts: list, axes: Any) -> Any:
    """The structure of a batch, from the structures of its rows."""
    first = parts[0]
    if first is None or axes in (SHARED, ABSENT):
        return first
    if axes == LIST:
        return type(first)(item for part in parts for item in part)
    if axes == CUMULATIVE:
        steps = torch.cat([part.diff() for part in parts])
        return torch.cat([first[:1], steps.cumsum(0).to(first.dtype)])
    if isinstance(axes, int):
        return torch.cat(parts, axes)
    columns = zip(*parts, strict=True)
    return type(first)(collate(list(column), axis) for column, axis in zip(columns, axes, strict=True))


def select_row(structure: Any, axes: Any, row: int, count: int) -> Any:
    """One row of a structure of `count` rows: the inverse of `collate`."""
    if structure is None or axes in (SHARED, ABSENT):
        return structure
    if axes == LIST:
        size = len(structure) // count
        return structure[row * size : (row + 1) * size]
    if axes == CUMULATIVE:
        return structure[row : row + 2] - structure[row]
    if isinstance(axes, int):
        size = structure.shape[axes] // count
        return structure.narrow(axes, row * size, size)
    return type(structure)(select_row(part, axis, row, count) for part, axis in zip(structure, axes, strict=True))


def signature(structure: Any) -> Any:
    """The shapes of a structure's tensors. Structures with equal signatures can share a batch."""
    if isinstance(structure, Tensor):
        return tuple(structure.shape)
    if isinstance(structure, (list, tuple)):
        return tuple(signature(part) for part in structure)
    return None


def to_device(structure: Any, device: torch.device) -> Any:
    """The same structure with its tensors on a device. A copy to a GPU is not waited for."""
    return _map_tensors(structure, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def copy_to_cpu(structure: Any) -> Any:
    """The same structure with copies of its tensors on the CPU. A GPU is waited for once, not for each tensor."""
    on_device: list[Tensor] = []
    _map_tensors(structure, lambda tensor: on_device.append(tensor) if tensor.device.type != "cpu" else None)
    copies: dict[int, Tensor] = {}
    if on_device:
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in on_device]
        parts = torch.cat(flat).cpu().split([len(part) for part in flat])
        copies = {id(tensor): part for tensor, part in zip(on_device, parts, strict=True)}

    def copy(tensor: Tensor) -> Tensor:  # with storage of its own: torch.save writes the whole storage of a view
        part = copies.get(id(tensor))
        return tensor.clone() if part is None else part.clone().view(tensor.dtype).view(tensor.shape)

    return _map_tensors(structure, copy)


def _map_tensors(structure: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)(_map_tensors(part, function) for part in structure)
    return structure


@dataclass(frozen=True)
class Conditioning:
    """Embeddings of B rows: the outputs of the distinct prompts, and which row has which.

    Rows can share a call of the pipeline if their `call_group` (B,) is the same: prompts of another length would be padded, which
    would change the last bits of the others, so they go into calls of their own, as do prompts with images of another size.
    """

    prompts: list[str]  # of the B rows
    encoder_outputs: list[EncoderOutputs]  # of the distinct prompts
    axes: list[list[Any]]  # of the distinct prompts: the axes of each recorded call
    prompt_index: Tensor  # (B,) which of the outputs a row has
    call_group: Tensor  # (B,)

    def prompts_of(self, rows: Tensor) -> list[str]:
        """The prompts of `rows` (n,)."""
        return [self.prompts[row] for row in rows.tolist()]

    def select(self, rows: Tensor) -> tuple[list[str], EncoderOutputs]:
        """The prompts and encoder outputs of `rows` (n,), as the pipeline would return them."""
        indices = self.prompt_index[rows].tolist()
        calls = zip(*(self.encoder_outputs[i] for i in indices), strict=True)
        axes = self.axes[indices[0]]  # rows that share a call have the same
        recorded = [
            (call[0][0], collate([output for _, output in call], axis)) for call, axis in zip(calls, axes, strict=True)
        ]
        return self.prompts_of(rows), recorded

    def pooled(self) -> Tensor:
        """(B, D) float32: each row's mean embedding."""
        means = [_pooled(outputs, axes) for outputs, axes in zip(self.encoder_outputs, self.axes, strict=True)]
        return torch.stack(means)[self.prompt_index]


def conditioning(
    prompts: list[str], outputs: dict[str, EncoderOutputs], axes: dict[int, list[Any]], encode_separately: bool
) -> Conditioning:
    """The conditioning of B prompts.

    Args:
        outputs: of (at least) the distinct prompts.
        axes: of each recorded call, by the number of a prompt's images.
        encode_separately: one prompt to a call.
    """
    unique_prompts = list(dict.fromkeys(prompts))
    call_groups: dict[Any, int] = {}
    keys = [prompt if encode_separately else _call_key(prompt, outputs[prompt]) for prompt in unique_prompts]
    group_of_prompt = torch.tensor([call_groups.setdefault(key, len(call_groups)) for key in keys])
    index_of = {prompt: i for i, prompt in enumerate(unique_prompts)}
    prompt_index = torch.tensor([index_of[prompt] for prompt in prompts])
    axes_of_prompt = [axes[len(images_of(prompt))] for prompt in unique_prompts]
    return Conditioning(
        prompts, [outputs[prompt] for prompt in unique_prompts], axes_of_prompt, prompt_index, group_of_prompt[prompt_index]
    )


def _call_key(prompt: str, outputs: EncoderOutputs) -> Any:
    """What prompts that share a call have in common. Pipelines read the sizes of images, also where the tensors' shapes are alike."""
    return signature([output for _, output in outputs]), tuple(image.size for image in images_of(prompt))


def _pooled(recorded: EncoderOutputs, axes: list[Any]) -> Tensor:
    for (_, output), axis in zip(recorded, axes, strict=True):
        parts = zip(output, axis, strict=True) if isinstance(axis, list) else [(output, axis)]
        for part, part_axis in parts:
            if part_axis == 0 and isinstance(part, Tensor) and part.ndim == 3:
                return part[0].float().mean(0).cpu()
    raise FlowGRPOError("objective ppo reads prompt embeddings (tokens, channels), which this pipeline does not have.")
