"""The run config: YAML, overrides, stages, validation."""

from flow_grpo.config.run_config import FlowGRPOConfig

__all__ = ["FlowGRPOConfig"]
