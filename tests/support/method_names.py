"""Names of `methods.py` by kind, so that a test of every method takes in a new one."""

from flow_grpo import methods

WITH_NOISE = [name for name, row in methods.TRANSITIONS.items() if row.stochastic]
# of these, the ones whose noise is independent of the other images and has all of the latent's dimensions
STOCHASTIC = [name for name in WITH_NOISE if not methods.TRANSITIONS[name].between_images]
ON_STEPS = [name for name, row in methods.OBJECTIVES.items() if row.stepwise]
