r"""Train with a reward of your own: a function that returns one number for each image, higher is better.

Run these commands from the root of the repository. The first trains the embedded model, in some seconds on a CPU:

    flow-grpo train tiny_ocr 'rewards={examples/custom_reward.py:redness: 1}' steps=2 prompts_per_step=4 \
        evaluation.max_prompts=4 evaluation.every=2 output_dir=runs/redness

For a real model, replace `tiny_ocr` with another config and leave out the settings after the reward, which make the run short. Measure the
reward before a long run:

    flow-grpo rewards test examples/custom_reward.py:redness --images runs/redness/after.png
"""


def redness(images, prompts, **metadata):
    """images: float32 RGB (B, 3, H, W) in [0, 1]. prompts: B strings. metadata: the other columns of the prompt file."""
    red, green, blue = images.unbind(1)
    return (red - (green + blue) / 2).mean((1, 2))
