"""Flow-GRPO (arXiv 2505.05470) in one file: the embedded model learns to spell, from pure functions alone.

Run this command from the root of the repository. It takes some minutes on two CPU cores and prints the mean reward of each step:

    python examples/minimal_grpo.py --steps 20

A training step:

1. Sample a group of images for each prompt. Inside a window of steps the sampler is stochastic: each such step is a Gaussian.
2. Score the images. An image's advantage is its reward relative to its group.
3. Repeat the stochastic steps with gradients. The ratio of the new to the old probability, times the advantage, is the objective.

The trainer does the same (tests/test_examples.py compares them to the last bit) and adds evaluation, checkpoints, resume, a report,
more objectives, several processes, and the checks that tell you what is wrong.
"""

import argparse

import torch
from torch import Tensor

from flow_grpo import load_policy, objectives, rewards, sampling
from flow_grpo.advantages import group_advantages
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.policy import Policy
from flow_grpo.types import PromptBatch, StochasticSteps, TrainedStep, Trajectory

SEED = 0
SAMPLING_STEPS, STOCHASTIC = 10, StochasticSteps([0, 1, 2, 3], transition="cps", noise_level=0.5)
CLIP_LOW = CLIP_HIGH = 1e-3  # log-probabilities are means over the latent dimensions, so ratios are close to 1


def sample(policy: Policy, batch: PromptBatch, step: int, microbatch: int) -> Trajectory:
    """Sample B images, each from noise of its own; record the steps in the window with their log-probabilities."""
    schedule, shape = policy.schedule(SAMPLING_STEPS)
    conditioning, start = policy.encode(batch.prompts), sampling.batch_noise(shape, batch, SEED, "start", step)
    noise = {i: sampling.batch_noise(shape, batch, SEED, "step", step, i) for i in STOCHASTIC.steps}

    def rollout(rows: Tensor) -> Trajectory:
        velocity = policy.velocity_fn(schedule, conditioning, rows)
        return sampling.rollout(velocity, schedule, start[rows], stochastic=STOCHASTIC, noise=lambda i: noise[i][rows])

    return Trajectory.join([rollout(rows) for rows in torch.arange(len(batch.prompts)).split(microbatch)])


def update(
    policy: Policy,
    batch: PromptBatch,
    trajectory: Trajectory,
    advantage: Tensor,
    optimizer: torch.optim.Optimizer,
    microbatch: int,
) -> None:
    """Move the LoRA by one AdamW step along the gradient of the GRPO objective, a micro-batch and a sampling step at a time."""
    conditioning = policy.encode(batch.prompts)
    for rows in torch.arange(len(advantage)).split(microbatch):
        velocity = policy.velocity_fn(trajectory.schedule, conditioning, rows)
        for k, i in enumerate(trajectory.steps):
            now = sampling.replay(velocity, trajectory, k, rows)
            trained_step = TrainedStep(
                log_prob=now.log_prob,
                old_log_prob=trajectory.log_prob[rows, k],
                mean=now.mean,
                old_mean=trajectory.mean[rows, k],
                std=now.std,
                delta=trajectory.schedule.sigmas[i + 1] - trajectory.schedule.sigmas[i],
            )
            loss = objectives.grpo(trained_step, advantage[rows], CLIP_LOW, CLIP_HIGH).value  # (rows,)
            # the gradient of a log-probability grows as 1 / std: late steps would dominate
            loss = loss * now.std.flatten(1)[:, 0]
            ((loss * (1 / len(advantage))).sum() / len(trajectory.steps)).backward()
    torch.nn.utils.clip_grad_norm_(policy.trainable_parameters().values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(steps: int, prompts_per_step: int, images_per_prompt: int, microbatch: int) -> Policy:
    """Train a LoRA on the embedded model and print the mean reward of each step."""
    policy = load_policy("tiny", dtype="fp32", height=32, width=80, max_sequence_length=14)
    policy.add_lora(rank=32, alpha=64, targets="all", seed=SEED)
    optimizer = torch.optim.AdamW(policy.trainable_parameters().values(), lr=5e-4, eps=1e-15, weight_decay=1e-4)
    prompts = load_prompts("prompts/signs_train.txt")
    order = torch.randperm(len(prompts), generator=sampling.generator(SEED, "prompts", 0)).tolist()
    reward = rewards.load("ocr")
    for step in range(steps):
        indices = order[step * prompts_per_step : (step + 1) * prompts_per_step]
        batch = prompts.take(indices, images_per_prompt)
        trajectory = sample(policy, batch, step, microbatch)
        images = policy.decode(trajectory.final, microbatch)
        scores = rewards.score("ocr", reward, images, batch.prompts)
        print(f"step {step + 1}: reward {scores.mean():.3f}", flush=True)
        update(policy, batch, trajectory, group_advantages(scores, batch.group), optimizer, microbatch)
    return policy


if __name__ == "__main__":
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--images-per-prompt", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=64, help="images per forward pass")
    train(**vars(parser.parse_args()))
