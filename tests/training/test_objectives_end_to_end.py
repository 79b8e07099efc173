"""The family of methods on the small policy, each transition on the embedded model too: every objective learns, every combination
starts at ratio 1, and what surrounds them, resampling, skipped prompts, stages, given images, own functions, does what it says."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from support import small_policy as small
from support.embedded import short_run, tiny_policy
from support.method_names import ON_FINAL_LATENTS, ON_STEPS, STOCHASTIC
from support.paths import SAMPLE_OBJECTIVES, SAMPLE_REWARDS
from support.run_contents import numbers, same, weights

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.anchor_config import DecayRamp
from flow_grpo.config.objective_by_name import OBJECTIVES
from flow_grpo.config.sections import OptimizerConfig
from flow_grpo.data.grid import ImageInfo, save_grid, save_image
from flow_grpo.distributed.processes import Processes
from flow_grpo.errors import Interrupted
from flow_grpo.evaluation.generate import generate_images
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.critic import Critic, gae
from flow_grpo.training.group_advantages import select_rows
from flow_grpo.training.losses import ClipRange
from flow_grpo.training.update import Optimizer

BRIGHT = f"{SAMPLE_REWARDS}:brightness"
OWN = SAMPLE_OBJECTIVES
FEW_STEPS = "sampling={steps: 4}"
STEPS = [*ON_STEPS, f"{OWN}:sigmoid"]
FINALS = [*ON_FINAL_LATENTS, f"{OWN}:matching"]


def objective(name: str, **settings) -> list[str]:
    clips = name in ON_STEPS and "clip_low" in OBJECTIVES[name].model_fields
    wide = {"clip_low": 0.1, "clip_high": 0.1} if clips else {}
    family = {"family": "forward_process"} if name == FINALS[-1] else {}
    text = json.dumps({"name": name, **family, **wide, **settings})
    return [f"objective={text}", *([FEW_STEPS] if name in FINALS else [])]


pytestmark = pytest.mark.usefixtures("no_report")
QUICK = ("grpo", "awm")  # one of steps, one of final latents


@pytest.mark.parametrize(
    ("name", "transition"),
    [  # each objective and each transition; the rest repeat them
        pytest.param(name, transition, marks=[pytest.mark.slow] * (name != "grpo" and transition != "cps"))
        for name in STEPS
        for transition in STOCHASTIC
    ],
)
def test_the_ratio_is_exactly_1_for_every_combination(tmp_path, name, transition):
    dtype = "bf16" if transition in ("cps", "flow_sde") else "fp32"
    several = [] if name == "reinforce" else ["updates=2", "epochs=2"]
    run = short_run(tmp_path, *objective(name), f"objective.transition={transition}", *several, f"dtype={dtype}")
    metrics = (FlowGRPOTrainer(args=run) if name == "grpo" else small.trainer(run)).training_step()
    assert metrics["ratio/first_update_max_deviation"] == 0
    assert (metrics["ratio/max_deviation"] > 0) == bool(several), "later updates see a policy that has moved"


@pytest.mark.parametrize(
    "name",
    [  # distill trains towards a teacher, whatever the reward is
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in STEPS + FINALS
        if "sigmoid" not in name and name != "distill"
    ],
)
def test_every_objective_raises_its_reward(tmp_path, name):
    """Of two short runs that differ in the sign of the reward, the one that is paid for brightness draws brighter images."""
    steps, lr, images = (2, 1.6e-2, 4) if name in QUICK else (4, 8e-3, 8)
    ends = []
    for sign in (1, -1):
        run = short_run(
            tmp_path / str(sign),
            *objective(name),
            f"rewards={{'{BRIGHT}': {sign}}}",
            f"images_per_prompt={images}",
            f"microbatch={2 * images}",
            f"optimizer.lr={lr}",
        )
        trainer = FlowGRPOTrainer(args=run)
        for _ in range(steps):
            trainer.training_step()
        ends.append(trainer.evaluate().means()["brightness"])
    assert ends[0] - ends[1] > 0.005


def test_the_critic_learns_the_mean_reward_and_its_advantages_are_normalised(tmp_path):
    trainer = small.trainer(short_run(tmp_path, *objective("ppo"), "images_per_prompt=8", "microbatch=16"))
    losses = [trainer.training_step()["critic/loss"] for _ in range(8)]
    assert losses[-1] < 0.2 * losses[0]
    advantage = small.collect(trainer, 8).advantage
    assert advantage.shape == (16, 3)
    assert abs(float(advantage.mean())) < 1e-5
    assert float(advantage.std(correction=0)) == pytest.approx(1, abs=2e-2)


def test_gae_is_the_sum_of_discounted_surprises():
    values, reward = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([5.0])
    surprises = [3 - 1, 2 - 3, 5 - 2]
    expected = [surprises[0] + 0.5 * surprises[1] + 0.25 * surprises[2], surprises[1] + 0.5 * surprises[2], surprises[2]]
    torch.testing.assert_close(gae(values, reward, 0.5), torch.tensor([expected]))
    torch.testing.assert_close(gae(values, reward, 1.0), reward[:, None] - values)
    torch.testing.assert_close(gae(values, reward, 0.0), torch.tensor([[2.0, -1.0, 3.0]]))


def test_a_rare_reward_does_not_drown_all_else_in_ppo_either():
    critic = Critic(torch.Size([2, 2, 2]), 3, seed=0)
    schedule = SimpleNamespace(sigmas=torch.tensor([1.0, 0.5, 0.0]))
    states = torch.zeros(400, 1, 2, 2, 2)
    trajectory = SimpleNamespace(x=states, steps=[0], schedule=schedule)
    advantage, _ = critic.advantages(trajectory, (torch.arange(400) == 7).float(), torch.zeros(400, 3))
    assert advantage.max() == advantage[7] == 5


def test_the_critic_takes_packed_latents_too():
    critic = Critic(torch.Size([10, 4]), 3, seed=0)
    assert critic(torch.randn(2, 10, 4), torch.rand(2), torch.randn(2, 3)).shape == (2,)


def test_step_weight_std_multiplies_the_gradient_of_a_step_by_its_std(tmp_path):
    """With a window of one step the whole gradient is that step's, so its norm is multiplied by the transition's std."""
    one = "sampling={steps: 4, transition: cps, noise_level: 0.8, window: {schedule: fixed, size: 1, first_step: 1}}"
    norms = []
    for weight in ("uniform", "std"):
        trainer = small.trainer(short_run(tmp_path / weight, one, f"objective.step_weight={weight}"))
        norms.append(trainer.training_step()["grad_norm"])
    std = float(trainer.stage.sampler.schedule.sigmas[2]) * math.sin(0.8 * math.pi / 2)
    assert norms[1] / norms[0] == pytest.approx(std, rel=1e-4)


@pytest.mark.parametrize("kl", ["gaussian", "velocity"])
def test_each_kl_is_0_at_the_base_model_and_pulls_back_to_it(tmp_path, kl):
    strength = 100
    distances = []
    for weight in (0.0, strength):
        run = short_run(tmp_path / str(weight), f"objective.kl={kl}", f"objective.kl_weight={weight}", "steps=6")
        trainer = small.trainer(run)
        trainer.train()
        distances.append(sum(float((v**2).sum()) for k, v in trainer.policy.adapter_state().items() if "lora_B" in k))
    kls = [row["kl"] for row in numbers(tmp_path / str(strength)) if "kl" in row]
    assert kls[0] == pytest.approx(0, abs=1e-7)
    assert kls[-1] > 0
    assert distances[1] < 0.95 * distances[0]


def test_k3_is_measured_and_has_a_gradient(tmp_path):
    """Its terms are squares of mean log-ratios, so its weight is a large one, and its pull a noisy one."""
    ends = []
    for weight in (0.0, 1e6):
        run = short_run(tmp_path / str(weight), "objective.kl=k3", f"objective.kl_weight={weight}", "steps=3")
        trainer = small.trainer(run)
        trainer.train()
        ends.append(trainer.policy.adapter_state())
    kls = [row["kl"] for row in numbers(tmp_path / "1000000.0") if "kl" in row]
    assert kls[0] == pytest.approx(0, abs=1e-7)
    assert kls[-1] > 0
    assert not same(*ends)


def test_the_published_kl_is_the_gaussian_one_times_the_length_of_the_step(tmp_path):
    one = "sampling={steps: 4, transition: flow_sde, noise_level: 0.8, window: {schedule: fixed, size: 1, first_step: 1}}"
    metrics = {}
    for kl in ("gaussian", "flow_grpo"):
        run = short_run(tmp_path / kl, one, f"objective.kl={kl}", "objective.kl_weight=1e-9", "updates=2")
        trainer = small.trainer(run)
        metrics[kl] = trainer.training_step()["kl"]
    sigmas = trainer.stage.sampler.schedule.sigmas
    assert metrics["flow_grpo"] / metrics["gaussian"] == pytest.approx(float(sigmas[1] - sigmas[2]), rel=1e-3)


def test_auto_clip_ranges_are_the_quantile_of_the_ratios_seen():
    clip = ClipRange()
    assert clip.range_at(3) == math.inf
    clip.observe(3, torch.zeros(5))
    clip.update(Processes())
    assert clip.range_at(3) == math.inf, "ratios before the first update say nothing"
    clip.observe(3, torch.linspace(0, 0.4, 5))
    clip.observe(3, torch.linspace(0.5, 1, 6))  # two micro-batches of one update
    clip.update(Processes())
    assert clip.range_at(3) == pytest.approx(0.9)
    clip.observe(3, torch.cat([torch.linspace(0, 2, 11), torch.tensor([math.nan, math.inf])]))  # fp16 overflows
    clip.update(Processes())
    assert clip.range_at(3) == pytest.approx(0.9 * 0.9 + 0.1 * 1.8)
    assert clip.range_at(2) == math.inf


@pytest.mark.slow
def test_auto_clip_ranges_clip_about_the_share_they_are_asked_to_and_are_resumed(tmp_path):
    auto = objective("grpo", clip_low="auto", clip_high="auto")
    args = short_run(tmp_path / "whole", *auto, "updates=2", "epochs=2", "steps=6", "save_every=1", "images_per_prompt=8")
    trainer = small.trainer(args)
    trainer.train()
    rows = [row for row in numbers(tmp_path / "whole") if "loss" in row][2:]
    assert all(f"clip_range/step_{step}" in rows[0] for step in (0, 1, 2))
    clipped = sum(row["clip_ratio/low_mean"] + row["clip_ratio/high_mean"] for row in rows) / len(rows)
    assert 0 < clipped < 0.1, "of the 0.1 outside, those that would be pushed further, in three updates of four"
    parts = args.model_copy(update={"output_dir": str(tmp_path / "parts")})
    small.trainer(parts.model_copy(update={"steps": 3})).train()
    small.trainer(parts).train(resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("name", ["ppo", "dppo"])
def test_the_critic_resumes_exactly(tmp_path, name):
    common = [
        "save_every=1",
        "steps=4",
        "evaluation.every=2",
        *objective(name),
    ]
    small.trainer(short_run(tmp_path / "whole", *common)).train()
    args = short_run(tmp_path / "parts", *common)
    small.trainer(args.model_copy(update={"steps": 2})).train()
    small.trainer(args).train(resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert numbers(tmp_path / "parts")[-2:] == numbers(tmp_path / "whole")[-2:]


def half_flat(images, prompts):
    """Prompts of an even number of letters have no signal."""
    values = images.mean((1, 2, 3))
    return torch.where(torch.tensor([len(p) % 2 == 0 for p in prompts]), torch.zeros(()), values)


def test_a_reward_that_may_be_dropped_takes_its_groups_out_of_the_step_alone(tmp_path, capsys):
    flaky = SAMPLE_REWARDS
    rewards = f"rewards={{'{BRIGHT}': 1, '{flaky}:sometimes_nan': {{weight: 1, on_error: drop}}}}"
    common = ["prompts_per_step=4", "microbatch=4", "evaluation.prompts=null", "objective.advantage=batch_std"]
    trainer = small.trainer(short_run(tmp_path / "run", rewards, *common))
    experience = small.collect(trainer, 0)
    dropped = [g for g in range(4) if "U" in experience.batch.prompts[4 * g]]
    assert 0 < len(dropped) < 4, "the example must drop some groups and keep some"
    kept = ~torch.isin(experience.batch.group, torch.tensor(dropped))
    assert torch.isfinite(experience.advantage).all()
    assert (experience.advantage[~kept] == 0).all()
    assert (experience.advantage[kept] != 0).all()
    assert experience.rows.tolist() == kept.nonzero()[:, 0].tolist()
    assert experience.groups.tolist() == [g for g in range(4) if g not in dropped], "the mean is over those that are left"
    assert experience.metrics["frac_reward_dropped"] == len(dropped) / 4
    total = 2 * torch.tensor([float(v) for v in found_brightness(trainer, experience)])[kept]
    mean = total.view(-1, 4).mean(1, keepdim=True).expand(-1, 4).flatten()
    torch.testing.assert_close(
        experience.advantage[kept], (total - mean) / (total.std(correction=0) + 1e-4), rtol=1e-3, atol=1e-3
    )
    small.trainer(short_run(tmp_path / "run", rewards, *common)).train()
    assert "warning: reward" in capsys.readouterr().out


def found_brightness(trainer, experience):
    return trainer.policy.decode(experience.trajectory.final).mean((1, 2, 3))


def test_the_critic_is_spared_what_was_dropped(tmp_path):
    rewards = f"rewards={{'{SAMPLE_REWARDS}:sometimes_nan': {{weight: 1, on_error: drop}}}}"
    run = short_run(tmp_path, rewards, *objective("ppo"), "prompts_per_step=4", "microbatch=4", "evaluation.prompts=null")
    trainer = small.trainer(run)
    metrics = trainer.training_step()
    assert 0 < metrics["frac_reward_dropped"] < 1
    assert math.isfinite(metrics["critic/loss"])
    assert metrics["grad_rms"] > 0


def test_a_dropped_reward_of_weight_0_spoils_nothing(tmp_path):
    flaky = SAMPLE_REWARDS
    rewards = f"rewards={{'{BRIGHT}': 1, '{flaky}:sometimes_nan': {{weight: 0, on_error: drop}}}}"
    run = short_run(tmp_path, rewards, "prompts_per_step=4", "microbatch=4", "evaluation.prompts=null")
    experience = small.collect(small.trainer(run), 0)
    assert len(experience.rows) == 16
    assert math.isfinite(experience.metrics["rewards/sometimes_nan/mean"])


def test_a_reward_that_raises_and_may_be_dropped_leaves_the_adapter_alone(tmp_path):
    rewards = f"rewards={{'{SAMPLE_REWARDS}:raises': {{weight: 1, on_error: drop}}}}"
    trainer = small.trainer(short_run(tmp_path, rewards, "evaluation.prompts=null"))
    start = trainer.policy.adapter_state()
    metrics = trainer.training_step()
    assert metrics["frac_reward_dropped"] == 1
    assert same(start, trainer.policy.adapter_state())
    assert "the camera is off" in trainer.rewards.drop_messages[0]


def test_several_rewards_report_their_shares_of_the_advantage(tmp_path):
    rewards = f"rewards={{'{BRIGHT}': 1, jpeg_size: 0.001}}"
    run = short_run(tmp_path, rewards, "objective.advantage=gdpo", "evaluation.prompts=null")
    metrics = small.trainer(run).training_step()
    shares = [value for name, value in metrics.items() if name.startswith("advantage/share/")]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert -1 <= metrics["advantage/correlation/brightness/jpeg_size"] <= 1


def test_an_own_objective_and_an_own_advantage_by_file(tmp_path):
    own = objective(f"{OWN}:sigmoid", options={"sharpness": 2.0}, advantage=f"{OWN}:sign")
    trainer = small.trainer(short_run(tmp_path, *own))
    experience = small.collect(trainer, 0)
    assert set(experience.advantage.tolist()) <= {-1.0, 1.0}
    assert trainer.training_step()["grad_rms"] > 0
    assert len(SAMPLE_OBJECTIVES.read_text().split("def matching")[0].split("def sigmoid")[1].splitlines()) < 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{OWN}:without_gradient", "carries a gradient"),
        (f"{OWN}:raises", "raised KeyError"),
    ],
)
def test_an_own_objective_that_fails_is_a_clear_error(tmp_path, name, words):
    trainer = small.trainer(short_run(tmp_path, *objective(name)))
    with pytest.raises(ValueError, match=words):
        trainer.training_step()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{OWN}:missing", "has no missing"),
        (f"{OWN}:torch", "is not a function"),
        ("nowhere.py:fn", "there is no objective file nowhere.py"),
    ],
)
def test_an_own_objective_that_is_not_there_is_reported_before_the_run(tmp_path, name, words):
    with pytest.raises(ValueError, match=words):
        small.trainer(short_run(tmp_path, *objective(name)))


@pytest.mark.parametrize(
    ("name", "solver", "more"), [("nft", "dpm_2m", []), ("grpo", "dpm_2m", ["sampling.window.last_step=0"])]
)
def test_a_solver_of_order_2_draws_the_rollouts(tmp_path, name, solver, more):
    """The ratio of the trained steps stays exactly 1."""
    finals = {}
    for one in ("euler", solver):
        run = short_run(tmp_path / one, *objective(name), f"sampling.solver={one}", *more)
        trainer = small.trainer(run)
        finals[one] = small.collect(trainer, 0).trajectory.final
        assert trainer.training_step().get("ratio/first_update_max_deviation", 0) == 0
    distance = (finals["euler"] - finals[solver]).abs().mean()
    assert 0 < float(distance) < 0.5


def pictures(folder: Path, count: int = 4, embedded: bool = False) -> tuple[list[str], torch.Tensor]:
    prompts = [f'red text "{word}" on a blue background' for word in ("CAT", "DOG", "SUN", "OWL")][:count]
    policy = tiny_policy() if embedded else small.policy(lora=False)
    images = generate_images(policy, prompts, list(range(count)), 4)
    folder.mkdir(parents=True)
    for i, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        save_image(folder / f"{i}.png", image, ImageInfo(prompt, i, "tiny"))
    return prompts, images


def test_latents_are_what_decoding_turns_into_the_images():
    policy = tiny_policy()
    images = generate_images(policy, ['red text "CAT" on a blue background'] * 2, [0, 1], 10)
    again = policy.decode(policy.encode_images(images))
    assert float((again - images).abs().mean()) < 0.05


def test_sft_on_given_images_learns_them(tmp_path):
    pictures(tmp_path / "pictures")
    given = objective("sft", dataset=str(tmp_path / "pictures"), num_noise_levels=2)
    trainer = small.trainer(short_run(tmp_path / "run", *given, "steps=12", "optimizer.lr=5e-3"))
    errors = [trainer.training_step()["sft/error"] for _ in range(12)]
    assert sum(errors[-4:]) < 0.95 * sum(errors[:4])


def test_supervised_fine_tuning_then_grpo_is_one_run(tmp_path):
    """The second stage is bit-identical to a run of its own that starts from the first one's adapter."""
    pictures(tmp_path / "pictures")
    stages = [
        {"steps": 2, "objective": {"name": "sft", "dataset": str(tmp_path / "pictures")}},
        {"steps": 2, "objective": {"name": "grpo"}},
    ]
    args = short_run(tmp_path / "whole", f"stages={json.dumps(stages)}", "save_every=1")
    assert args.steps == 4
    small.trainer(args).train()
    rows = [row for row in numbers(tmp_path / "whole") if "loss" in row]
    assert ["sft/error" in row for row in rows] == [True, True, False, False]
    assert rows[2]["ratio/first_update_max_deviation"] == 0
    for stop in (1, 2, 3):
        parts = args.model_copy(update={"output_dir": str(tmp_path / f"parts{stop}")})
        trainer = small.trainer(parts)
        for _ in range(stop):
            trainer.training_step()
        trainer.save()
        (tmp_path / f"parts{stop}" / "config.yaml").write_text(parts.to_yaml())
        small.trainer(parts).train(resume=True)
        assert same(weights(tmp_path / f"parts{stop}"), weights(tmp_path / "whole"))


def test_a_run_can_be_stopped_and_resumed_in_the_first_step_of_a_stage(tmp_path):
    stages = [{"steps": 1, "objective": {"name": "ppo"}}, {"steps": 2, "objective": {"name": "grpo"}}]
    args = short_run(tmp_path / "whole", f"stages={json.dumps(stages)}", "save_every=1", "evaluation.prompts=null")
    small.trainer(args).train()
    parts = args.model_copy(update={"output_dir": str(tmp_path / "parts")})
    trainer = small.trainer(parts)
    step = trainer.training_step

    def stopped() -> dict:
        trainer.processes.stop_requested = trainer.step == 1  # within the second stage's first rollout
        return step()

    trainer.training_step = stopped
    with pytest.raises(Interrupted):
        trainer.train()
    small.trainer(parts).train(resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_nft_after_another_stage_begins_with_that_stages_policy_as_the_old_one(tmp_path):
    stages = [{"steps": 2, "objective": {"name": "sft"}}, {"steps": 2, "objective": {"name": "nft"}}]
    trainer = small.trainer(short_run(tmp_path, FEW_STEPS, f"stages={json.dumps(stages)}"))
    for _ in range(2):
        trainer.training_step()
    trained = trainer.policy.adapter_state()
    trainer.state.enter_stage(2)
    old = trainer.policy.adapter_state("old")
    assert any(value.abs().max() > 0 for name, value in trained.items() if "lora_B" in name)
    assert all(torch.equal(value, old[name.replace(".default.", ".old.")]) for name, value in trained.items())


@pytest.mark.parametrize(
    ("ramp", "decays"),
    [
        (DecayRamp(rate=0.001, max=0.5), {0: 0, 1: 0.001, 100: 0.1, 500: 0.5, 900: 0.5}),
        (DecayRamp(after=75, rate=0.0075, max=0.999), {74: 0, 75: 0, 85: 0.075, 208: 0.9975, 209: 0.999, 9000: 0.999}),
    ],
)
def test_the_published_ramps_of_nfts_old_policy(ramp, decays):
    assert {steps: ramp.at(steps) for steps in decays} == pytest.approx(decays)


def test_nfts_old_policy_follows_by_a_ramp_of_optimizer_steps(tmp_path):
    ramp = {"rate": 0.1, "max": 0.35}
    run = short_run(tmp_path, *objective("nft", old_policy_decay=ramp), "updates=2", "optimizer.lr=0.01")
    trainer = small.trainer(run)
    expected = trainer.policy.adapter_state("old")
    for decay in (0.2, 0.35):  # after 2 and 4 optimizer steps
        trainer.training_step()
        trained = trainer.policy.adapter_state()
        expected = {
            name: decay * old + (1 - decay) * trained[name.replace(".old.", ".default.")] for name, old in expected.items()
        }
        for name, value in trainer.policy.adapter_state("old").items():
            torch.testing.assert_close(value, expected[name])
    assert any(not torch.equal(old, trained[name.replace(".old.", ".default.")]) for name, old in expected.items())


def test_the_moving_average_takes_in_the_weights_every_so_many_optimizer_steps(tmp_path):
    """Two updates a training step, every third of them counted: the first of step 2 and the second of step 3."""
    trainer = small.trainer(short_run(tmp_path, "updates=2", "ema_every=3", "ema_decay=0.15", "steps=3"))
    expected, steps = trainer.policy.ema.state_dict(), []
    trainer.stage.update.optimizer.adamw.register_step_post_hook(lambda *_: steps.append(trainer.policy.adapter_state()))
    for _ in range(3):
        trainer.training_step()
    assert len(steps) == 6
    for taken in (steps[2], steps[5]):
        expected = {name: 0.15 * value + 0.85 * taken[name] for name, value in expected.items()}
    for name, value in trainer.policy.ema.state_dict().items():
        torch.testing.assert_close(value, expected[name])


def test_training_on_given_images_can_be_stopped(tmp_path):
    pictures(tmp_path / "pictures")
    run = short_run(tmp_path / "run", *objective("sft", dataset=str(tmp_path / "pictures")), "steps=50")
    trainer = small.trainer(run)
    step = trainer.training_step

    def stopped() -> dict:
        trainer.processes.stop_requested = trainer.step == 1
        return step()

    trainer.training_step = stopped
    with pytest.raises(Interrupted):
        trainer.train()
    assert (tmp_path / "run" / "checkpoints" / "step_000002").exists()


def test_half_a_step_is_not_saved(tmp_path, monkeypatch):
    """A gradient that is no number in the second update of a step: the checkpoint before that step stays the newest."""
    trainer = small.trainer(short_run(tmp_path / "run", "updates=2", "save_every=1", "evaluation.prompts=null"))
    reduce, calls = trainer.stage.update.optimizer.reduce_gradients, []

    def spoiled() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            next(iter(trainer.policy.trainable_parameters().values())).grad.fill_(math.nan)
        return reduce()

    monkeypatch.setattr(trainer.stage.update.optimizer, "reduce_gradients", spoiled)
    with pytest.raises(ValueError, match="gradient of step 2 is not finite"):
        trainer.train()
    whole = short_run(tmp_path / "whole", "updates=2", "save_every=1", "evaluation.prompts=null")
    small.trainer(whole).train()
    small.trainer(whole.model_copy(update={"output_dir": str(tmp_path / "run")})).train(resume=True)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_offline_dpo_learns_which_image_is_preferred(tmp_path):
    prompts, images = pictures(tmp_path / "pictures", embedded=True)
    for i, image in enumerate(images):
        save_image(tmp_path / "pictures" / f"{i}_bad.png", 1 - image, ImageInfo(prompts[i], i, "tiny"))
    rows = [{"prompt": p, "chosen": f"pictures/{i}.png", "rejected": f"pictures/{i}_bad.png"} for i, p in enumerate(prompts)]
    table = tmp_path / "votes.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    run = short_run(tmp_path / "run", *objective("dpo", dataset=str(table), beta=5.0), "optimizer.lr=3e-3")
    trainer = FlowGRPOTrainer(args=run)
    losses = [trainer.training_step()["loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4), "at the base model nothing is preferred yet"
    assert sum(losses[-3:]) / 3 < 0.9 * math.log(2)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"prompt": "a", "image": "x.png"}],
            "no votes in a form that is known: give the columns prompt, chosen and rejected;",
        ),
        ([{"prompt": "a", "chosen": "x.png", "rejected": "y.png"}], "x.png does not exist"),
    ],
)
def test_given_images_that_do_not_fit_are_a_sentence(tmp_path, rows, words):
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=words):
        small.trainer(short_run(tmp_path / "run", *objective("dpo", dataset=str(tmp_path / "votes.jsonl"))))


def test_a_grid_can_be_learned_from(tmp_path):
    prompts, images = pictures(tmp_path / "pictures")
    save_grid(tmp_path / "sheet.png", images, [ImageInfo(p, 0, "tiny") for p in prompts], columns=2)
    run = short_run(tmp_path / "run", *objective("sft", dataset=str(tmp_path / "sheet.png")))
    experience = small.collect(small.trainer(run), 0)
    assert set(experience.batch.prompts) == set(prompts)


def test_best_and_worst_are_chosen_among_groups_with_signal():
    reward = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.3, 0.3, 2.0, 3.0, 1.0])
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    signal = group != 1
    assert select_rows("best", reward, group, signal)[0].tolist() == [1, 7]
    assert select_rows("best_and_worst", reward, group, signal)[0].tolist() == [1, 0, 7, 8]
    rows, per_group = select_rows("all", reward, group, signal)
    assert (rows.tolist(), per_group) == ([0, 1, 2, 6, 7, 8], 3)


def test_stages_that_make_no_sense_are_refused(tmp_path):
    for stages, words in (
        ([{"objective": {"name": "nft"}}], "stage 1 has no steps"),
        ([{"steps": 2, "model": "other"}], "stage 1 can't set model"),
        ([{"steps": 2, "objective": {"name": "nft", "transition": "cps"}}], "nft does not use transition"),
    ):
        with pytest.raises(ValueError, match=words):
            FlowGRPOConfig.from_yaml("tiny_grpo", [f"stages={json.dumps(stages)}", "objective.keep_graphs=false"])


def test_a_stage_has_what_is_its_own(tmp_path):
    """Micro-batches that divide its rows."""
    first = {"steps": 2, "objective": {"name": "sft", "dataset": "x"}}
    second = {"steps": 4, "prompts_per_step": 3}
    both = [
        "objective.keep_graphs=false",
        "microbatch=auto",
        "prompts_per_step=8",
        "images_per_prompt=6",
    ]
    both += ["objective.keep_graphs=false"]
    given = FlowGRPOConfig.from_yaml("tiny_grpo", [*both, f"stages={json.dumps([first, second])}"])
    parts = [part for _, part in given.resolved_stages()]
    assert [part.microbatch for part in parts] == [48, 18]
    assert [stage.get("microbatch") for stage in given.stages] == [None, 18]
    assert FlowGRPOConfig.model_validate(yaml.safe_load(given.to_yaml())) == given, "as a run folder keeps it"


def test_per_step_credit_is_given_where_the_images_of_a_prompt_part(tmp_path):
    """One noise for a group up to the trained step; the update replays it exactly, and learns."""
    window = "window: {schedule: fixed, size: 1, first_step: 1}"
    settings = f"objective={{name: grpo, transition: cps, noise_level: 0.8, shared_initial_noise: true, {window}}}"
    trainer = small.trainer(short_run(tmp_path, "sampling.steps=4", settings))
    experience = small.collect(trainer, 0).trajectory
    states = experience.x[:, 0].view(2, 4, *experience.x.shape[2:])
    assert torch.equal(states, states[:, :1].expand_as(states)), "the same picture so far"
    assert (experience.final[0] - experience.final[1]).abs().max() > 0.01
    metrics = trainer.training_step()
    assert metrics["ratio/first_update_max_deviation"] == 0
    assert metrics["grad_norm"] > 0


def test_fp16_that_overflows_for_ever_is_a_clear_error():
    weight = torch.nn.Parameter(torch.ones(2))
    policy = SimpleNamespace(
        trainable_parameters=lambda: {"w": weight},
        is_sharded=False,
        uses_fsdp=False,
        device=torch.device("cpu"),
        dtype=torch.float16,
        meter=SimpleNamespace(timed=lambda name: nullcontext()),
    )
    optimizer, norms = Optimizer(policy, OptimizerConfig(), Processes()), []

    def until_it_stops() -> None:
        for _ in range(40):
            optimizer.backward((weight * torch.inf).sum())
            norms.append(optimizer.reduce_gradients().item())
            optimizer.step(1e-3, norms[-1])

    with pytest.raises(ValueError, match="overflow however small the loss is scaled: set dtype=bf16 or fp32"):
        until_it_stops()
    assert len(norms) == 17, "65536 halved until it is below 1"
    assert torch.equal(weight, torch.ones(2))
