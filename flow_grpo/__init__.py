"""Flow-GRPO: fine-tune any diffusers text-to-image flow model with any reward, on a laptop or a cluster.

Importing this package loads nothing heavy; the names below load when they are first used.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.data.prompts import PromptSet
    from flow_grpo.image_prompt import ImagePrompt
    from flow_grpo.policy.loading import load_policy
    from flow_grpo.policy.policy import Policy
    from flow_grpo.trainer import FlowGRPOTrainer

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:  # GNU's OpenMP reads it once, when torch loads
    # Threads that wait spin 300,000 times by default, which makes steps 5 to 10 times as long on busy cores. Not to spin at all costs a
    # quarter on quiet ones.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
# onnxruntime, which pipelines of diffusers import too, writes a device id into the user's cache and sends events, unless this is set before
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.5.0"
__all__ = ["FlowGRPOConfig", "FlowGRPOTrainer", "ImagePrompt", "Policy", "PromptSet", "load_policy"]

_HOMES = {
    "FlowGRPOConfig": "flow_grpo.config",
    "FlowGRPOTrainer": "flow_grpo.trainer",
    "ImagePrompt": "flow_grpo.image_prompt",
    "Policy": "flow_grpo.policy.policy",
    "PromptSet": "flow_grpo.data.prompts",
    "load_policy": "flow_grpo.policy.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flow_grpo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
