"""What several tests measure of equal models, each once, as it takes seconds: traces and operations; and a model that takes fewer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.plan.trace import ModelTrace
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.step_meter import StepMeter

_known: dict[str, ModelTrace] = {}


def known_trace(args: FlowGRPOConfig, *more: Any, **given: Any) -> ModelTrace:
    """`ModelTrace` of these arguments, or an earlier one whose model runs the same way."""
    pads = args.model in BUNDLED_MODELS  # every prompt to one length
    prompt = None if pads else max(load_run_prompts(args.training_prompts).prompts, key=len)
    read = (
        args.model,
        args.pipeline_call_kwargs(),
        args.memory,
        args.lora,
        args.sampling,
        args.objective.needs.reward_gradient,
        prompt,
    )
    key = repr((read, more, given))
    if key not in _known:
        _known[key] = ModelTrace(args, *more, **given)
    return _known[key]


def two_blocks(folder: Path) -> Path:
    """Write the config files of the embedded model, with two of its six blocks and without weights."""
    shutil.copytree(BUNDLED_MODELS["tiny"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_layers": 2}))
    return folder


_counted: dict[str, tuple[int, int]] = {}
_count = StepMeter._measure


def known_operations(
    meter: StepMeter, transformer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """The operations that a step meter counts by a pass of its own, or those of an equal model called with the same shapes."""
    weights = [(name, p.shape, p.requires_grad) for name, p in transformer.named_parameters()]
    key = repr((type(transformer), transformer.config, weights, meter._key(transformer, args, kwargs)[1:]))
    if key not in _counted:
        _counted[key] = _count(meter, transformer, args, kwargs)
    return _counted[key]
