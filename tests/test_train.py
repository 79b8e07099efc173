"""The loop on the embedded model: determinism, resume, signals, what goes wrong."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from support import small_policy as small
from support.cli_process import begin
from support.embedded import short_run, stir, tiny_policy
from support.paths import SAMPLE_OBJECTIVES, SAMPLE_REWARDS
from support.run_contents import numbers, same, weights

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer

REWARDS = SAMPLE_REWARDS


def files(folder: Path) -> dict[str, bytes]:
    contents = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert contents
    return contents


def test_a_run_leaves_all_its_files_and_a_ratio_of_exactly_1(tmp_path):
    FlowGRPOTrainer(args=short_run(tmp_path / "run")).train()
    folder = tmp_path / "run"
    for name in ("config.yaml", "metrics.jsonl", "before.png", "after.png", "before_after.png", "reward.png"):
        assert (folder / name).stat().st_size > 0, name
    assert FlowGRPOConfig.from_yaml(folder / "config.yaml").output_dir == str(folder)
    steps = [row for row in numbers(folder) if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["ratio/first_update_max_deviation"] == 0
        assert row["grad_rms"] > 0
        assert row["frac_reward_zero_std"] == 0
    assert any(value.abs().max() > 0 for name, value in weights(folder).items() if "lora_B" in name)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("objective", ["grpo", "awm", "nft"])
def test_the_same_config_gives_the_same_numbers_and_the_micro_batch_changes_none(tmp_path, objective):
    clip = ", clip_low: 1, clip_high: 1" if objective == "awm" else ""
    extra = [] if objective == "grpo" else [f"objective={{name: {objective}{clip}}}", "sampling={steps: 4}"]
    for name, more in {"a": [], "b": [], "c": ["microbatch=2"]}.items():
        args = short_run(tmp_path / name, *extra, *more)
        small.trainer(args).train()
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    for name in ("lora", "best", "checkpoints"):
        assert files(tmp_path / "a" / name) == files(tmp_path / "b" / name), "to the last byte"
    for one, other in zip(numbers(tmp_path / "a"), numbers(tmp_path / "c"), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)  # the loss of grpo is a sum of advantages, that is 0
        if "grad_norm" in one:
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


def test_the_images_of_a_step_do_not_depend_on_the_micro_batch(tmp_path):
    finals = []
    for microbatch in (8, 1):
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / str(microbatch), f"microbatch={microbatch}"))
        finals.append(small.collect(trainer, 0).trajectory.final)
    torch.testing.assert_close(finals[0], finals[1], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("no_report")
def test_a_killed_run_resumes_to_the_same_numbers(tmp_path):
    common = ["steps=4", "save_every=1", "evaluation.every=2"]
    FlowGRPOTrainer(args=short_run(tmp_path / "whole", *common)).train()
    config = tmp_path / "run.yaml"
    args = short_run(tmp_path / "killed", *common)
    config.write_text(args.to_yaml())
    command = begin("train", str(config), cwd=tmp_path)
    command.wait_for((tmp_path / "killed" / "checkpoints" / "step_000002").exists)
    command.process.kill()
    command.process.join()
    FlowGRPOTrainer(args=args).train(resume=True)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    config = tmp_path / "run.yaml"
    config.write_text(short_run(tmp_path / "run", "steps=200", "save_every=200").to_yaml())
    command = begin("train", str(config), cwd=tmp_path)
    command.wait_for(lambda: len(read_metrics(tmp_path / "run")) >= 3)
    os.kill(command.process.pid, number)
    assert "--resume" in command.finish(130)
    logged = [row["step"] for row in read_metrics(tmp_path / "run") if "reward" in row]
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1].name
    assert saved == f"step_{logged[-1]:06d}"


@pytest.mark.usefixtures("no_report")
def test_nft_resumes_with_its_old_policy(tmp_path):
    common = ["objective={name: nft}", "sampling={steps: 4}", "save_every=1"]
    small.trainer(short_run(tmp_path / "whole", "steps=3", *common)).train()
    args = short_run(tmp_path / "parts", "steps=3", *common)
    small.trainer(args.model_copy(update={"steps": 2})).train()
    small.trainer(args).train(resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.usefixtures("no_report")
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, capsys):
    args = short_run(tmp_path / "run", "save_every=1")
    small.trainer(args).train()
    before = numbers(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step_000002" / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 255
    state.write_bytes(content)
    small.trainer(args).train(resume=True)
    output = " ".join(capsys.readouterr().out.split())
    assert "step_000002 is damaged" in output
    assert "resumed at step 1 of 2" in output
    assert numbers(tmp_path / "run") == before


@pytest.mark.usefixtures("no_report")
def test_a_ratio_that_is_not_a_number_stops_the_run(tmp_path, monkeypatch):
    from flow_grpo import sde

    trainer = small.trainer(short_run(tmp_path / "run"))
    before = trainer.policy.adapter_state()
    monkeypatch.setattr(sde, "log_prob", lambda x, mean, std: mean.flatten(1).mean(1) * torch.nan)
    with pytest.raises(ValueError, match="ratio of new to old probability is nan"):
        trainer.train()
    assert same(before, trainer.policy.adapter_state())


@pytest.mark.usefixtures("no_report")
def test_a_run_lost_in_its_first_step_can_be_resumed(tmp_path, monkeypatch):
    args = short_run(tmp_path / "run")
    small.trainer(args.model_copy(update={"output_dir": str(tmp_path / "whole")})).train()
    trainer = small.trainer(args)
    monkeypatch.setattr(trainer.rewards, "rewards", {"mine": lambda images, prompts: [float("nan")] * len(prompts)})
    monkeypatch.setattr(trainer.rewards, "weights", {"mine": 1.0})
    with pytest.raises(ValueError, match="reward mine"):
        trainer.train()
    small.trainer(args).train(resume=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


@pytest.mark.usefixtures("no_report")
@pytest.mark.usefixtures("no_report")
def test_training_raises_the_reward(tmp_path):
    """Of two short runs that differ in the sign of the reward, the one that is paid for brightness ends brighter."""
    ends = []
    for weight in (1, -1):
        reward = f"{REWARDS}:brightness"
        run = short_run(
            tmp_path / str(weight),
            f"rewards={{'{reward}': {weight}}}",
            "steps=3",
            "optimizer.lr=1.6e-2",
        )
        FlowGRPOTrainer(args=run).train()
        ends.append(numbers(tmp_path / str(weight))[-1]["eval/brightness"])
    assert ends[0] - ends[1] > 0.005


def test_groups_without_signal_are_skipped_and_counted(tmp_path):
    trainer = small.trainer(short_run(tmp_path / "run", f"rewards={{'{REWARDS}:flat': 1}}"))
    start = trainer.policy.adapter_state()
    calls = []
    velocity = trainer.policy.velocity
    trainer.policy.velocity = lambda *a: calls.append(torch.is_grad_enabled()) or velocity(*a)
    metrics = trainer.training_step()
    assert metrics["frac_reward_zero_std"] == 1
    assert not any(calls), "no forward pass with gradients"
    assert all(torch.equal(value, start[name]) for name, value in trainer.policy.adapter_state().items())


OBJECTIVES = {  # what a row without advantage adds to the gradient: nothing, its KL, or its own loss
    "grpo": ["objective.kl_weight=0"],
    "grpo with a KL": ["objective.kl_weight=0.3"],
    "awm with a KL": ["sampling={steps: 3}", "objective={name: awm, kl_weight: 0.3}"],
    "nft": ["sampling={steps: 3}", "objective={name: nft}"],
    "a function of one's own": [f"objective={{name: '{SAMPLE_OBJECTIVES}:towards_the_sample'}}"],
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_skipping_leaves_the_gradient_as_it_is_without_skipping(tmp_path, monkeypatch, objective):
    """Three of four groups have no signal: the adapter moves as if all rows had been computed, those with advantage 0."""
    from flow_grpo.training import group_advantages

    moved, norms = {}, {}
    for name in ("skipping", "not"):
        reward = f"{REWARDS}:brightness"
        common = ("prompts_per_step=4", "microbatch=4", "optimizer.max_grad_norm=1e9", f"rewards={{'{reward}': 1}}")
        trainer = small.trainer(short_run(tmp_path / name, *common, *OBJECTIVES[objective]))
        stir(trainer.policy)  # away from the base model, and from nft's old policy
        mine = trainer.rewards.rewards["brightness"]
        trainer.rewards.rewards["brightness"] = lambda x, p, mine=mine: mine(x, p) * (torch.arange(16) < 4)
        if name == "not":
            monkeypatch.setattr(group_advantages.advantages, "has_signal", lambda reward, *_: torch.ones(len(reward)) > 0)
        norms[name] = trainer.training_step()["grad_norm"]  # AdamW's first step would hide a factor
        moved[name] = trainer.policy.adapter_state()
    assert norms["skipping"] == pytest.approx(norms["not"], rel=1e-3)
    for key, value in moved["skipping"].items():
        torch.testing.assert_close(value, moved["not"][key], rtol=1e-4, atol=1e-6)


def _half_silent(trainer):
    """Every other group has rewards that are alike; returns the sizes of the update's forward passes."""
    mine, velocity, sizes = trainer.rewards.rewards["brightness"], trainer.policy.velocity, []
    trainer.rewards.rewards["brightness"] = lambda x, p: mine(x, p) * (torch.arange(len(p)) // 4 % 2)

    def counted(x, *rest):
        if torch.is_grad_enabled():
            sizes.append(len(x))
        return velocity(x, *rest)

    trainer.policy.velocity = counted
    return sizes


def test_rows_keep_their_place_where_the_kernel_depends_on_it(tmp_path):
    trainer = FlowGRPOTrainer(args=short_run(tmp_path / "run", "prompts_per_step=4"))
    sizes, velocity = _half_silent(trainer), trainer.policy.velocity
    trainer.policy.velocity = lambda x, *rest: velocity(x, *rest) + 1e-4 * torch.arange(len(x)).view(-1, 1, 1, 1)
    metrics = trainer.training_step()
    assert sizes == [8] * 6, "16 rows of which 8 speak, 3 trained steps"
    assert metrics["ratio/first_update_max_deviation"] == 0


def test_a_ratio_that_is_not_1_stops_the_run(tmp_path):
    """Dropout makes the update's forward pass another one than the rollout's, from the second step on."""
    trainer = FlowGRPOTrainer(args=short_run(tmp_path / "run"))
    trainer.training_step()
    for module in trainer.policy.pipe.transformer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
            module.train()
    with pytest.raises(ValueError, match="ratio of new to old probability deviates from 1"):
        trainer.train()


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "raised RuntimeError.*the camera is off"),
        ("nan", "returned nan for the prompt"),
        ("wrong_shape", r"returned shape \(8, 3\)"),
    ],
)
def test_a_reward_that_fails_stops_the_run_by_name_and_saves(tmp_path, function, words):
    args = short_run(tmp_path / "run", f"rewards={{'{REWARDS}:{function}': 1}}", "evaluation.prompts=null")
    with pytest.raises(ValueError, match=f"{function} {words}"):
        small.trainer(args).train()
    assert (tmp_path / "run" / "checkpoints" / "step_000000").exists()


def test_rewards_by_path_are_called_by_their_functions_and_one_that_ranks_a_group_is_reported_to_mean_nothing_held_out(
    tmp_path, capsys
):
    """In the metrics, the monitor's pictures and what is trained on; the config keeps the names as they were written."""
    (tmp_path / "mine.py").write_text("def brightness(images, prompts):\n    return 2 * images.mean((1, 2, 3))\n")
    names = {f"{REWARDS}:brightness": 1.0, f"{REWARDS}:rank": 0.5, f"{tmp_path / 'mine.py'}:brightness": 0.25}
    args = short_run(tmp_path / "run", f"rewards={json.dumps(names)}", "evaluation.rewards=[jpeg_size]", "trackers=[]")
    last = small.trainer(args).train()
    assert set(last) == {"reward", "brightness", "brightness_2", "rank", "jpeg_size"}
    rows = numbers(tmp_path / "run")
    evaluations = [row for row in rows if "eval/reward" in row]
    for row in evaluations:
        assert row["eval/brightness_2"] == pytest.approx(2 * row["eval/brightness"])
        assert row["eval/rank"] == 0, "no image has another one of its prompt"
        assert row["eval/reward"] == pytest.approx(1.5 * row["eval/brightness"])
    step = next(row for row in rows if "loss" in row)
    assert {f"rewards/{name}/mean" for name in ("brightness", "brightness_2", "rank")} <= step.keys()
    story = RunReader(tmp_path / "run")
    assert story.trained == ["brightness", "rank", "brightness_2"]
    assert story.score_names[0] == "reward"
    assert {name: one["weight"] for name, one in story.config["rewards"].items()} == names
    first, second = [row["warning"] for row in rows if "warning" in row]
    assert first.startswith("reward rank: an image's value depends on the other images of its prompt")
    assert "has almost no effect" in second, "the brightness of images of one prompt differs little, and their rank much"
    assert first in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weight", "advantage", "warns"), [(1e-6, "grpo", True), (1e-6, "gdpo", True), (1.0, "gdpo", False)]
)
def test_a_reward_with_almost_no_share_of_the_advantage_warns_once(tmp_path, weight, advantage, warns):
    """In the first step, also if it is small by its weight alone."""
    rewards = f"rewards={{'{REWARDS}:brightness': 1, sharpness: {weight}}}"
    args = short_run(tmp_path / "run", rewards, f"objective.advantage={advantage}", "evaluation.prompts=null", "trackers=[]")
    small.trainer(args).train()
    told = [(row["step"], row["warning"]) for row in numbers(tmp_path / "run") if "warning" in row]
    assert [step for step, _ in told] == [1] * warns
    for _, warning in told:
        assert "the reward sharpness has almost no effect, 0.0% of the advantage: raise its weight" in warning
        assert ("gdpo" in warning) == (advantage != "gdpo")


def test_a_reward_without_any_share_of_the_advantage_is_named_at_the_end(tmp_path, capsys):
    """Not after a step: a penalty may meet what it is for later."""
    rewards = f"rewards={{'{REWARDS}:flat': 1, sharpness: 1}}"
    small.trainer(short_run(tmp_path / "run", rewards, "evaluation.prompts=null", "trackers=[]")).train()
    assert not [row for row in numbers(tmp_path / "run") if "warning" in row]
    sentence = "warning: flat gave all images of each prompt the same value in every step, and had no effect."
    assert sentence in " ".join(capsys.readouterr().out.split())
    rewards = f"rewards={{'{REWARDS}:brightness': 1, sharpness: 1}}"
    small.trainer(short_run(tmp_path / "other", rewards, "evaluation.prompts=null", "trackers=[]")).train()
    assert "had no effect" not in capsys.readouterr().out


def test_several_updates_share_the_prompts_of_a_rollout(tmp_path):
    trainer = small.trainer(short_run(tmp_path / "run", "updates=2"))
    moves = []
    step = trainer.stage.update.optimizer.step
    trainer.stage.update.optimizer.step = lambda *a, **k: moves.append(1) or step(*a, **k)
    metrics = trainer.training_step()
    assert len(moves) == 2
    assert metrics["ratio/first_update_max_deviation"] == 0
    assert metrics["ratio/max_deviation"] > 0, "the second update sees a policy that has moved"


@pytest.mark.usefixtures("no_report")
def test_a_step_that_runs_out_of_memory_is_done_again_in_smaller_pieces(tmp_path, capsys):
    plain = small.trainer(short_run(tmp_path / "plain", "microbatch=4"))
    plain.train()
    trainer = small.trainer(short_run(tmp_path / "full", "microbatch=auto"))
    assert trainer.stage.microbatch == 8
    velocity, largest = trainer.policy.velocity, []

    def limited(x, *rest):
        if len(x) > 4 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        largest.append(len(x))
        return velocity(x, *rest)

    trainer.policy.velocity = limited
    trainer.train()
    assert trainer.stage.microbatch == 4
    assert "memory ran out with microbatch=8; the run goes on with 4" in capsys.readouterr().out
    told = [row for row in numbers(tmp_path / "full") if "warning" not in row]
    for one, other in zip(numbers(tmp_path / "plain"), told, strict=True):
        for name in ("loss", "reward", "grad_norm"):
            assert one.get(name) == other.get(name)
    assert max(largest) == 8, "the rollout before it"
    again = small.trainer(short_run(tmp_path / "full", "microbatch=auto"))
    again.train(resume=True)
    assert again.stage.microbatch == 4, "a resumed run does not run out again"


def test_memory_that_does_not_suffice_for_one_image_is_reported(tmp_path):
    trainer = small.trainer(short_run(tmp_path, "evaluation.prompts=null"))

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer.policy.velocity = full
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.stage.microbatch == 1


def test_guidance_is_part_of_the_policy_that_is_trained(tmp_path):
    metrics = FlowGRPOTrainer(args=short_run(tmp_path / "run", "guidance=3")).training_step()
    assert metrics["ratio/first_update_max_deviation"] == 0


def test_fp16_autocast_scales_its_gradients(tmp_path):
    metrics = small.trainer(short_run(tmp_path / "run", "dtype=fp16")).training_step()
    assert metrics["ratio/first_update_max_deviation"] == 0
    assert 0 < metrics["grad_norm"] < float("inf")


def test_a_run_from_python_takes_a_model_a_callable_settings_and_two_data_sets(tmp_path):
    """TRL's shape: a model, a callable, settings and two data sets."""
    trainer = FlowGRPOTrainer(
        model=tiny_policy(),
        reward_funcs=[lambda images, prompts, **_: images[:, 0].mean((1, 2))],
        args=short_run(tmp_path / "run", "prompts_per_step=1", "steps=1"),
        train_dataset=['red text "CAT" on a blue background'],
        eval_dataset=['red text "DOG" on a blue background'],
    )
    assert "reward" in trainer.train()


@pytest.mark.usefixtures("no_report")
def test_an_old_run_is_not_overwritten(tmp_path):
    args = short_run(tmp_path / "run")
    small.trainer(args).train()
    with pytest.raises(ValueError, match="--resume"):
        small.trainer(args).train()
    with pytest.raises(ValueError, match="no checkpoint"):
        small.trainer(short_run(tmp_path / "new")).train(resume=True)
