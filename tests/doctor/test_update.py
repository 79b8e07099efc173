"""The doctor's checks of an update: each result flips at a fault planted into the real parts."""

import pytest
import torch
from support import small_policy as small
from support.checks import statuses
from support.paths import SAMPLE_OBJECTIVES
from support.sample_rewards import flat

from flow_grpo.doctor import update
from flow_grpo.doctor.result import ERROR, OK, WARNING, Status
from flow_grpo.doctor.run import RunChecks
from flow_grpo.trainer import FlowGRPOTrainer

NORM = {f"blocks.{i}.to_q.lora_A.weight": 1e-3 for i in range(10)}
LARGEST = "ratio drift, largest/smallest step"


def steep(images, prompts):
    return images.mean((1, 2, 3)).round() + 0 * images.sum((1, 2, 3))


steep.differentiable = True


def checked(trainer: FlowGRPOTrainer) -> dict[str, Status]:
    return statuses(RunChecks(trainer).check_update())


def test_adams_eps_and_clip_ranges(trainer):
    two = "updates=2"
    bad = checked(trainer(two, "optimizer.eps=1.0e-3", "objective={clip_low: 1.0e-9, clip_high: 1.0e-9}"))
    assert bad["gradient vs Adam's eps"] == ERROR
    assert bad["clip range"] == ERROR
    wide = checked(trainer(two, "objective={clip_low: 10, clip_high: 10}"))
    assert wide["clip range"] == WARNING
    assert wide["gradient vs Adam's eps"] == wide["ratio before the first update"] == OK
    once = RunChecks(trainer("objective={clip_low: 1.0e-9, clip_high: 1.0e-9}")).check_update()
    assert statuses(once)["clip range"] == OK, "it is never active"
    assert not any("of its clip range" in result.message for result in once)


def test_a_late_step_that_dominates_the_early_ones(trainer):
    assert checked(trainer())[LARGEST] == WARNING
    assert checked(trainer("objective.step_weight=std"))[LARGEST] == OK
    assert checked(trainer("objective.window={schedule: all, last_step: 1}"))[LARGEST] == OK


def test_the_single_update_skips_warmup(policy, trainer):
    built = trainer("optimizer.warmup_steps=1000")
    before = {name: weight.detach().clone() for name, weight in policy.trainable_parameters().items()}
    update.single_update(policy, built.stage.args, small.collect(built, 0), 0, built.processes)
    moved = max((weight - before[name]).abs().max().item() for name, weight in policy.trainable_parameters().items())
    assert moved > 0.5 * built.args.optimizer.lr


def test_a_step_that_fails_says_why(policy, trainer):
    linear = policy.pipe.transformer.proj_out
    policy.pipe.transformer.proj_out = torch.nn.Sequential(linear, torch.nn.Dropout(0.5).train())
    checks = RunChecks(trainer())
    try:
        (failed,) = checks.check_update()
    finally:
        policy.pipe.transformer.proj_out = linear
    assert checks.step_metrics == []
    assert failed.status == ERROR
    assert "deviates from 1" in failed.message


def test_out_of_memory_says_what_to_set(trainer, monkeypatch):
    def collect():
        raise torch.OutOfMemoryError("CUDA out of memory")

    built = trainer()
    monkeypatch.setattr(built, "experience", collect)
    (failed,) = RunChecks(built).check_update()
    assert failed.status == ERROR
    assert "a smaller microbatch" in failed.message


def test_a_custom_objective_moves_ratios_as_any_other(trainer):
    results = checked(trainer(f"objective={{name: '{SAMPLE_OBJECTIVES}:sigmoid'}}"))
    assert ERROR not in results.values()
    assert len([name for name in results if name.startswith("step ")]) == 3


@pytest.mark.parametrize("overrides", [(), ("objective.kl_weight=0.01",)], ids=["no update", "an update by the KL alone"])
def test_a_gradient_without_signal_is_not_judged(trainer, overrides):
    """Its size, its coverage and the ratios would be blamed on settings, and the cause is the reward."""
    results = checked(trainer(*overrides, reward=flat))
    assert {name: status for name, status in results.items() if status != OK} == {"gradient": WARNING}


def test_a_gradient_of_the_reward_that_is_0_is_the_only_finding(trainer):
    results = checked(trainer("objective={name: refl}", reward=steep))
    assert {name: status for name, status in results.items() if status != OK} == {"gradient": ERROR}


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (update.initial_ratio(1e-6), ERROR),
        (update.initial_ratio(0.0), OK),
        (update.clip_range(torch.zeros(8), 1e-3, 1e-3, 2), WARNING),
        (update.gradient_coverage(dict.fromkeys(NORM, 0.0), full_finetuning=False), ERROR),
        (update.gradient_coverage({**NORM, **dict.fromkeys(list(NORM)[:3], 0.0)}, full_finetuning=False), WARNING),
        (update.gradient_coverage({**NORM, **dict.fromkeys(list(NORM)[:3], 0.0)}, full_finetuning=True), WARNING),
        (update.gradient_coverage({**NORM, "blocks.9.to_q.lora_A.weight": 0.0}, full_finetuning=False), OK),
    ],
)
def test_each_measure_of_an_update_gets_its_status_and_advice(result, status):
    assert result.status == status
    assert status == OK or result.message.endswith("."), "it says what to do"


def test_an_overflow_is_no_missing_gradient():
    weight = torch.nn.Parameter(torch.zeros(1))
    gradients = update.GradientStats({"weight": weight}, torch.optim.AdamW([weight]))
    assert update.gradient_size(gradients, overflow=True).status == WARNING
    assert update.gradient_size(gradients, overflow=False).status == ERROR


def test_the_advice_fits_what_is_trained():
    assert "near 0" not in update.clip_range(torch.zeros(8), 1e-3, 1e-3, 2).message
    lora, weights = (update.gradient_coverage(dict.fromkeys(NORM, 0.0), full) for full in (False, True))
    assert (lora.name, weights.name) == ("LoRA parameters receiving gradient", "weights receiving gradient")
    assert "lora.targets" in lora.message
    assert "lora" not in weights.message.partition(": ")[2]
