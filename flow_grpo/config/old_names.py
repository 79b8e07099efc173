"""Settings as version 0.3 wrote them, in the form of today."""

from typing import Any

from flow_grpo.config.merge import keep, reads

# No objective reads all three: only a config.yaml of 0.3 has them together, which wrote out the settings of all objectives.
WRITTEN_BY_03 = {"threshold", "beta", "dpo_beta"}


def modernize(values: dict[str, Any]) -> dict[str, Any]:
    """Settings of a config file, or those that 0.3 wrote into a run folder, as today's sections have them."""
    objective = values.get("objective")
    if isinstance(objective, dict) and objective.keys() >= WRITTEN_BY_03:
        values = keep(values, lambda section, key: reads(values, section, key))
    return values
