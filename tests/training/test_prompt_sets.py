"""Prompt sets with rewards of their own in a training step: who scores what, and against what it is compared."""

import math
from types import SimpleNamespace

import pytest
import torch
from support import small_policy as small
from support.run_contents import MEASURED
from support.thread_processes import run_as_processes

from flow_grpo import FlowGRPOTrainer
from flow_grpo.data.prompts import join_sets, sampler_of
from flow_grpo.distributed.processes import Processes
from flow_grpo.rewards import WeightedSum
from flow_grpo.run_folder.metrics_file import read_metrics
from flow_grpo.training.group_advantages import contribution_metrics

BRIGHT = small.PromptSet(["a cat", "a dog", "a sun", "a owl"], [{"prompt_set": "bright", "rewards": {"mean": None}}] * 4)
SHARP = small.PromptSet(
    ["a tree", "a boat", "a cat", "a dog"],
    [{"prompt_set": "sharp", "rewards": {"detail": 3.0, "mean": 0.5}}] * 4,
)
MIXTURE = join_sets(["bright", "sharp"], [BRIGHT, SHARP], [1.0, 1.0])
CALLS: list[str] = []


def mean(images, prompts):
    return images.mean((1, 2, 3))


def detail(images, prompts, prompt_set):
    CALLS.extend(prompt_set)
    return 100 * images.diff(dim=-1).abs().mean((1, 2, 3))


def measured(images, prompts):
    return [1.0] * len(prompts)


def collect(processes=None, advantage="grpo", drop=(), prompts=MIXTURE, **functions):
    rewards = {"mean": mean, "detail": detail, "measured": measured, **functions}
    weighted = WeightedSum(rewards, {"mean": 1.0, "detail": 1.0, "measured": 0.0}, drop)
    args = small.settings(prompts_per_step=4, objective={"advantage": advantage})
    rolls = small.rollouts(small.policy(), args, [0, 2], weighted, processes=processes or Processes())
    rolls.prompt_sampler = sampler_of(prompts, 1)
    return rolls, rolls.collect(3)


@pytest.fixture(scope="module")
def step():
    CALLS.clear()
    rolls, experience = collect()
    names = [row["prompt_set"] for row in experience.batch.metadata]
    assert set(names) == {"bright", "sharp"}
    return experience, rolls.policy.decode(experience.trajectory.final, 6), torch.tensor([name == "sharp" for name in names])


def by_hand(step) -> torch.Tensor:
    """The sum of each image over the rewards of its prompt."""
    experience, images, _ = step
    total = []
    for row, image in zip(experience.batch.metadata, images, strict=True):
        values = {"mean": mean(image[None], [""]), "detail": detail(image[None], [""], [])}
        total.append(sum((weight or 1.0) * values[name] for name, weight in row["rewards"].items()))
    return torch.cat(total)


def test_each_image_is_scored_by_the_rewards_of_its_prompt_alone(step):
    experience, _, sharp = step
    assert set(CALLS) == {"sharp"}
    torch.testing.assert_close(experience.scores.total, by_hand(step))
    assert experience.scores.by_name["detail"].isnan().tolist() == (~sharp).tolist()
    assert experience.scores.by_name["measured"].tolist() == [1.0] * 12, "what is only measured is measured of all"


def test_a_reward_that_does_not_score_an_image_is_none_that_was_dropped(step):
    experience, _, sharp = step
    assert len(experience.groups) == 4
    assert experience.rows.tolist() == list(range(12))
    assert "frac_reward_dropped" not in experience.metrics
    assert experience.metrics["reward/sharp"] == pytest.approx(experience.scores.total[sharp].mean().item())
    assert experience.metrics["reward/bright"] == pytest.approx(experience.scores.total[~sharp].mean().item())
    assert experience.metrics["rewards/detail/mean"] == pytest.approx(
        experience.scores.by_name["detail"][sharp].mean().item()
    )
    assert "advantage/share/bright/mean" not in experience.metrics, "it has one reward"


def test_a_reward_that_no_set_of_a_step_names_is_no_metric_of_it():
    metrics = collect(prompts=join_sets(["bright", "sharp"], [BRIGHT, SHARP], [1.0, 1e-12]))[1].metrics
    assert {"rewards/mean/mean", "rewards/measured/mean"} <= metrics.keys()
    assert "rewards/detail/mean" not in metrics
    assert not [name for name, value in metrics.items() if math.isnan(value)]


@pytest.mark.parametrize("advantage", ["batch_std", "reinforce_pp", "gdpo", "grpo"])
def test_advantages_are_normalised_over_the_prompts_of_a_set(advantage):
    rolls, experience = collect(advantage=advantage)
    images = rolls.policy.decode(experience.trajectory.final, 6)
    sharp = torch.tensor([row["prompt_set"] == "sharp" for row in experience.batch.metadata])
    total, expected = by_hand((experience, images, None)), torch.zeros(12)
    for rows in (sharp, ~sharp):
        own, groups = total[rows], experience.batch.group[rows]
        group_mean = torch.stack([own[groups == g].mean() for g in groups])
        group_std = torch.stack([own[groups == g].std(correction=0) for g in groups])
        if advantage == "batch_std":
            expected[rows] = (own - group_mean) / (own.std(correction=0) + 1e-4)
        elif advantage == "reinforce_pp":
            expected[rows] = (own - own.mean()) / (own.std(correction=0) + 1e-4)
        elif advantage == "grpo":
            expected[rows] = (own - group_mean) / (group_std + 1e-4)
        else:
            expected[rows] = gdpo_by_hand(experience, images, rows)
    torch.testing.assert_close(experience.advantage, expected.clamp(-5, 5), rtol=1e-3, atol=1e-3)


def gdpo_by_hand(experience, images, rows) -> torch.Tensor:
    """Each reward normalised within its group, the weighted sum of the prompt's rewards, that normalised over the set."""
    total = torch.zeros(12)
    for name, value in (("mean", mean(images, [])), ("detail", detail(images, [], []))):
        for g in experience.batch.group.unique():
            members = experience.batch.group == g
            own = experience.batch.metadata[int(members.nonzero()[0])]["rewards"]
            weight = 0.0 if name not in own else own[name] or 1.0
            total[members] += weight * (value[members] - value[members].mean()) / (value[members].std(correction=0) + 1e-4)
    return (total[rows] - total[rows].mean()) / (total[rows].std(correction=0) + 1e-4)


def test_two_processes_find_the_same(step):
    for rank, experience in enumerate(run_as_processes(2, lambda processes: collect(processes, "reinforce_pp")[1])):
        own = step[0].batch.group % 2 == rank
        whole = collect(advantage="reinforce_pp")[1]
        assert experience.batch.prompts == [whole.batch.prompts[i] for i in own.nonzero()[:, 0]]
        torch.testing.assert_close(experience.advantage, whole.advantage[own], rtol=1e-3, atol=1e-3)
        assert experience.metrics["reward/sharp"] == pytest.approx(whole.metrics["reward/sharp"])


def test_a_reward_that_fails_drops_the_images_that_it_should_have_scored(step):
    def fails(images, prompts):
        raise RuntimeError("no detail")

    _, experience = collect(drop=("detail",), detail=fails)
    _, _, sharp = step
    assert experience.scores.total.isnan().tolist() == sharp.tolist()
    assert experience.groups.tolist() == step[0].batch.group[~sharp].unique().tolist()
    assert experience.metrics["frac_reward_dropped"] == pytest.approx(sharp.float().mean().item())


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("clip", "a prompt set names the reward clip, but the run has mean, detail, measured: add it to `rewards`"),
        ("measured", r"a prompt set names no reward to train on, but measured: name one of mean, detail"),
    ],
)
def test_a_set_may_name_only_rewards_of_the_run(own, words):
    prompts = small.PromptSet(small.PROMPTS.prompts, [{"rewards": {own: None}}] * 6)
    with pytest.raises(ValueError, match=words):
        collect(prompts=prompts)


def brighter(first, second, prompts):
    return (first.mean((1, 2, 3)) > second.mean((1, 2, 3))).float()


brighter.scope = "pair"


def test_a_run_of_sets_from_files_is_evaluated_by_set_and_resumes_exactly(tmp_path):
    (tmp_path / "signs.txt").write_text("a cat\na dog\na sun\n")
    (tmp_path / "objects.jsonl").write_text('{"prompt": "a tree"}\n{"prompt": "a boat"}\n{"prompt": "a owl"}\n')
    sets = [
        {"file": f"{tmp_path}/signs.txt", "weight": 2, "rewards": ["mean"]},
        {"file": f"{tmp_path}/objects.jsonl", "rewards": ["brighter"]},
    ]
    held_out = [{key: value for key, value in one.items() if key != "weight"} for one in sets]

    def trainer(name):
        args = small.settings(
            prompts=sets,
            output_dir=f"{tmp_path}/{name}",
            evaluation={"prompts": held_out, "max_prompts": 2, "steps": 2, "every": 1},
            optimizer={"lr": 0.02, "eps": 0.005},
            ema_decay=0,
        )
        args.steps, args.save_every = 3, 1
        return FlowGRPOTrainer(small.policy(), [mean, brighter], args)

    whole = trainer("whole")
    whole.train()
    rows = read_metrics(tmp_path / "whole")
    first = next(row for row in rows if "eval/reward" in row)
    assert first["eval/reward/signs"] == pytest.approx(first["eval/mean"])
    assert first["eval/reward/objects"] == pytest.approx(first["eval/brighter"])
    assert first["eval/reward"] == pytest.approx((first["eval/reward/signs"] + first["eval/reward/objects"]) / 2)
    assert {name for row in rows for name in row} >= {"reward/signs", "reward/objects"}

    broken = trainer("broken")
    broken.callbacks.callbacks.append(SimpleNamespace(on_step_end=stop_after_two))
    broken.train()
    resumed = trainer("broken")
    resumed.train(resume=True)
    assert resumed.prompt_sampler.state_dict() == whole.prompt_sampler.state_dict()
    for one, other in zip(rows, read_metrics(tmp_path / "broken"), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(MEASURED)} == {
            k: v for k, v in other.items() if not k.startswith(MEASURED)
        }


def test_a_reward_that_no_held_out_set_has_is_no_metric(tmp_path):
    (tmp_path / "signs.txt").write_text("a cat\na dog\n")
    held_out = [{"file": f"{tmp_path}/signs.txt", "name": name, "rewards": ["mean"]} for name in ("one", "two")]
    args = small.settings(
        prompts=f"{tmp_path}/signs.txt",
        output_dir=f"{tmp_path}/run",
        evaluation={"prompts": held_out, "steps": 2, "every": 1},
    )
    args.steps = 1
    FlowGRPOTrainer(small.policy(), [mean, brighter], args).train()
    evaluated = [row for row in read_metrics(tmp_path / "run") if "eval/reward" in row]
    assert evaluated[0]["eval/reward"] == pytest.approx(evaluated[0]["eval/mean"])
    assert not any("brighter" in name for row in evaluated for name in row if name.startswith("eval/"))


def test_a_set_that_names_an_unknown_reward_is_refused_before_the_run(tmp_path):
    (tmp_path / "signs.txt").write_text("a cat\na dog\n")
    args = small.settings(prompts=[{"file": f"{tmp_path}/signs.txt", "rewards": ["clip"]}], output_dir=f"{tmp_path}/run")
    with pytest.raises(ValueError, match="a prompt set names the reward clip, but the run has mean: add it to `rewards`"):
        FlowGRPOTrainer(small.policy(), [mean], args)


def test_contributions_are_those_of_the_rewards_that_score_any_image():
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    by_reward = torch.tensor(
        [[0.0, 1.0, 2.0, 1.0, 0.0, 5.0], [1.0, 0.0, 3.0, 0.0, 2.0, 2.0], [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]]
    ).T
    names = ["a", "b", "c"]
    both = contribution_metrics(names[:2], by_reward[:, :2], torch.tensor([1.0, 2.0]), group, method="grpo")
    assert both.keys() == {"advantage/share/a", "advantage/share/b", "advantage/correlation/a/b"}
    assert both["advantage/share/a"] + both["advantage/share/b"] == pytest.approx(1)
    of_set = contribution_metrics(
        names[:2], by_reward[:, :2], torch.tensor([1.0, 2.0]), group, method="grpo", prompt_set="signs"
    )
    assert list(of_set.values()) == list(both.values())
    assert of_set.keys() == {"advantage/share/signs/a", "advantage/share/signs/b", "advantage/correlation/signs/a/b"}
    by_row = torch.tensor([[1.0, 0.0, 0.0]] * 3 + [[0.0, 2.0, 0.0]] * 3)  # each image by one, the third by none
    rows = contribution_metrics(names, by_reward.where(by_row != 0, 0), by_row, group, method="grpo")
    assert rows.keys() == both.keys()
    assert contribution_metrics(["a"], by_reward[:, :1], torch.ones(1), group, method="grpo") == {}


def stop_after_two(args, state, control, **kwargs):
    control.should_training_stop = state.global_step == 2
