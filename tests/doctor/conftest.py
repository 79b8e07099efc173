"""A trainer of a short run with settings of its own, and images of signs."""

import pytest
from support.checks import HELD_OUT, TRAIN
from support.embedded import CALL, short_model, short_run

from dev.tiny import pretrain, world
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards.calls import RewardInputs
from flow_grpo.trainer import FlowGRPOTrainer


@pytest.fixture(scope="module")
def policy() -> Policy:
    """One for all tests of a file: each adds its updates, none needs a fresh one."""
    return load_policy(str(short_model()), "cpu", "fp32", **CALL)


@pytest.fixture
def trainer(policy, tmp_path):
    """Builds a short run by that policy."""

    def built(*overrides: str, train: list[str] | None = None, held_out: list[str] | None = None, **more) -> FlowGRPOTrainer:
        args = short_run(tmp_path / "run", "evaluation.max_prompts=8", *overrides)
        return FlowGRPOTrainer(policy, more.get("reward"), args, train or TRAIN, held_out or HELD_OUT)

    return built


@pytest.fixture(scope="module")
def signs() -> RewardInputs:
    """Two signs for each of four prompts: its own, and that of the prompt before."""
    colors = (("red", "blue"), ("white", "black"), ("blue", "white"), ("black", "red"))
    prompts = [f'{ink} text "CAT" on a {ground} background' for ink, ground in colors for _ in range(2)]
    images = pretrain.images_of([world.parse(prompt) for prompt in prompts]) / 2 + 0.5
    images[1::2] = images[::2].roll(1, 0)
    return RewardInputs(images, prompts, {})
