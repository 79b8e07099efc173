"""Traces of models that several tests plan with: each is made once, as it takes seconds; and a model that takes fewer."""

import json
import shutil
from pathlib import Path
from typing import Any

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompt_mixture import load_run_prompts
from flow_grpo.plan.trace import ModelTrace
from flow_grpo.policy.hub import BUNDLED_MODELS

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
