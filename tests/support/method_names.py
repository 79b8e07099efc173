"""Names of transitions and objectives by kind, so that a test of every one takes in a new one."""

from flow_grpo.config.forward_process_objectives import ForwardProcess
from flow_grpo.config.objective_by_name import OBJECTIVES
from flow_grpo.sde import TRANSITIONS

STOCHASTIC = [name for name, row in TRANSITIONS.items() if row.stochastic]
ON_STEPS = [name for name, kind in OBJECTIVES.items() if kind.stepwise]
ON_FINAL_LATENTS = [name for name, kind in OBJECTIVES.items() if issubclass(kind, ForwardProcess)]
