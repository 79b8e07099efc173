"""Train with a transition of your own: how a sampling step adds the noise that gives it a log-probability.

Run it from the root of the repository. It trains the embedded model, in some seconds on a CPU:

    python examples/own_transition.py

A config knows the transition once it is a row of the table, so a program that opens this run's config must add the row first.
"""

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer, sde


def sigma_sde(x, v, sigma, sigma_next, noise_level, sigma_max):
    """Euler-Maruyama of the SDE with g = noise_level * sigma, whose noise fades with the image's own.

    The drift in the direction of the predicted noise makes up for the added one, so for any g the marginals are those of the ODE
    (arXiv 2505.05470), up to the error of a step.

    Args:
        x, v: state and velocity, (B, ...).
        sigma, sigma_next: noise levels before and after the step, broadcastable to x.
        noise_level: objective.noise_level of the config.
        sigma_max: the schedule's second sigma, for a g that is infinite at sigma = 1.

    Returns:
        Mean of the next state, (B, ...), and std of its noise, broadcastable to it.
    """
    delta, g = sigma_next - sigma, noise_level * sigma
    predicted_noise = x + (1 - sigma) * v
    return x + delta * (v + g**2 / (2 * sigma) * predicted_noise), g * (-delta).sqrt()


# The last step, to sigma = 0, adds noise too; `has_g` allows objective.kl=flow_grpo, which divides by g.
sde.TRANSITIONS["sigma_sde"] = sde.Transition(sigma_sde, noise_at_end=True, has_g=True)


def trainer(*overrides):
    settings = [
        "objective.transition=sigma_sde",
        "objective.noise_level=1",
        "prompts_per_step=4",
        "evaluation.prompts=null",
        "steps=2",
    ]
    args = FlowGRPOConfig.from_yaml("tiny_grpo", [*settings, "output_dir=runs/own_transition", *overrides])
    return FlowGRPOTrainer(args=args)


if __name__ == "__main__":
    trainer().train()
