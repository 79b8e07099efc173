"""The loop on a small policy: what each of its settings does, what a checkpoint holds, and what is left when a step fails."""

import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import small_policy as small
from support.embedded import short_run
from support.run_contents import MEASURED

from dev.tiny import pretrain
from flow_grpo.advantages import group_advantages
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.config.stepwise_objectives import WindowConfig
from flow_grpo.data.grid import ImageInfo, read_grid, save_image
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.evaluation.generate import SEED, generate_images, image_seed
from flow_grpo.policy import devices
from flow_grpo.policy.lora import TRAINED
from flow_grpo.policy.step_meter import PHASES
from flow_grpo.report.summary import headline
from flow_grpo.run_folder import checkpoint
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import duration
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training import setup
from flow_grpo.training.rollouts import trained_steps
from flow_grpo.training.state import Stage

HELD_OUT = small.PromptSet(["a moon", "a fish", "a ship"], [{}] * 3)


def bright(images, prompts):
    return images.mean((1, 2, 3))


@pytest.fixture(autouse=True)
def _plain(request):
    """One test here has its report and its curves drawn."""
    if "real_report" not in request.keywords:
        request.getfixturevalue("no_report")


def made(folder, reward=bright, policy=None, held_out=None, prompts=small.PROMPTS, **changes):
    """A trainer with a run folder there."""
    evaluation = {"steps": 2, "every": 0, **changes.pop("evaluation", {})}
    optimizer = {"lr": 0.02, "eps": 0.005, **changes.pop("optimizer", {})}
    args = small.settings(output_dir=str(folder), evaluation=evaluation, optimizer=optimizer, **changes)
    return FlowGRPOTrainer(policy or small.policy(lora=args.lora is not None), reward, args, prompts, held_out)


def weights(policy, adapter="default"):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters(adapter).values()]).clone()


def averaged(policy):
    return torch.cat([policy.ema.average[name].flatten() for name in policy.trainable_parameters()]).clone()


def written(policy):
    """The averaged LoRA as a file has it: alpha / rank is a factor of lora_B."""
    config = policy.lora.transformer.peft_config[TRAINED]
    factors = {name: config.lora_alpha / config.r if "lora_B" in name else 1 for name in policy.trainable_parameters()}
    return torch.cat([(policy.ema.average[name] * factor).flatten() for name, factor in factors.items()])


def numbers(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def rows(folder):
    return [numbers(row) for row in read_metrics(Path(folder))]


def saved(folder):
    return sorted(int(place.name.removeprefix("step_")) for place in (Path(folder) / "checkpoints").iterdir())


def latest(folder):
    return checkpoint.latest(Path(folder) / "checkpoints")[0]


# -- a step -----------------------------------------------------------------------------------------------------------------


def test_a_step_is_collected_and_learned_from_and_tells_its_numbers_and_seconds(tmp_path, monkeypatch):
    clock = [50.0]
    monkeypatch.setattr("flow_grpo.training.state.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("flow_grpo.policy.step_meter.matmul_peak", lambda *device: 1e12)

    def takes(seconds, call):
        def slow(*args):
            clock[0] += seconds
            return call(*args)

        return slow

    trainer = made(tmp_path / "run")
    same = made(tmp_path / "same")
    trainer.experience = takes(5.0, trainer.experience)
    learn, finish = trainer.stage.update.__class__.__call__, trainer.stage.update._finish
    trainer.stage.update._finish = takes(7.0, finish)
    for step in (0, 1):
        assert trainer.step == step
        before = weights(trainer.policy)
        metrics = trainer.training_step()
        experience = small.collect(same, step)
        expected = {**experience.metrics, **learn(same.stage.update, experience, step)}
        assert numbers(metrics) == numbers(expected)
        assert metrics["time/update"] == 7.0
        assert metrics["time/step"] == 12.0
        assert {name for name in metrics if name.startswith("time/")} == {
            f"time/{name}" for name in ("update", "step", *PHASES)
        }
        assert metrics["speed/images_per_second"] == metrics["images"] / 12.0
        assert metrics["speed/tflop_per_second"] == metrics["speed/mfu"] == metrics["speed/tflop"] / 12.0
        assert not torch.equal(weights(trainer.policy), before)
        assert torch.equal(weights(trainer.policy), weights(same.policy))
    assert not (tmp_path / "run").exists(), "nothing is written before the run begins"


def state_of(trainer):
    """All that a step that has not happened leaves as it was."""
    critic = trainer.stage.critic and [p.clone() for p in trainer.stage.critic.parameters()]
    return {
        "step": trainer.step,
        "weights": weights(trainer.policy),
        "average": averaged(trainer.policy),
        "dealer": trainer.prompt_sampler.state_dict(),
        "clip": trainer.stage.update.clip.state_dict(),
        "microbatch": trainer.stage.microbatch,
        "critic": critic,
        "moments": [v["exp_avg"].clone() for v in trainer.stage.update.optimizer.adamw.state.values()],
        "gradients": [p.grad for p in trainer.policy.trainable_parameters().values() if p.grad is not None],
    }


def alike(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


RICH = {
    "sampling": {"window": {"schedule": "random", "size": 2}},
    "objective": {"clip_low": "auto", "clip_high": "auto"},
    "epochs": 2,
}
PPO = {"objective": {"name": "ppo"}, "sampling": {"window": {"schedule": "all"}}}


KEPT = {"sampling": {"keep_graphs": True, "window": {"schedule": "all"}}}


@pytest.fixture(scope="module")
def second_step(tmp_path_factory):
    """The metrics of the second step of a run with these settings."""
    known = {}

    def metrics(changes):
        if id(changes) not in known:
            trainer = made(tmp_path_factory.mktemp("same"), **changes)
            trainer.training_step()
            known[id(changes)] = trainer.training_step()
        return known[id(changes)]

    return metrics


@pytest.mark.parametrize("changes", [RICH, PPO, KEPT])
@pytest.mark.parametrize("failure", ["stopped", "reward", "memory", "gradient"])
def test_a_step_that_fails_has_not_happened(tmp_path, second_step, changes, failure):
    """Whether the rollout is left, the reward fails, memory runs out at micro-batches of 1, or the gradient is no number."""
    expected, trainer = second_step(changes), made(tmp_path, **changes)
    trainer.training_step()
    before = state_of(trainer)
    reward, velocity = trainer.rewards.rewards["bright"], trainer.policy.velocity
    reduce, hits = trainer.stage.update.optimizer.reduce_gradients, []

    def fails(*args):
        hits.append(1)
        if failure == "stopped":
            trainer.processes.stop_requested = True
        if failure == "memory" and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return velocity(*args)

    def spoiled():
        for p in trainer.policy.trainable_parameters().values():
            p.grad.fill_(math.nan)
        return reduce()

    trainer.policy.velocity = fails
    if failure == "reward":
        trainer.rewards.rewards["bright"] = lambda images, prompts: [math.nan] * len(prompts)
    if failure == "gradient":
        trainer.stage.update.optimizer.reduce_gradients = spoiled
    kind = {"stopped": Interrupted, "memory": torch.OutOfMemoryError}.get(failure, ValueError)
    with pytest.raises(kind):
        trainer.training_step()
    assert hits
    after = state_of(trainer)
    if failure == "memory":
        assert after.pop("microbatch") == 1
        before.pop("microbatch")
        trainer.stage.set_microbatch(6)
    for name, value in before.items():
        assert alike(value, after[name]), name
    trainer.processes.stop_requested, trainer.rewards.rewards["bright"] = False, reward
    trainer.policy.velocity, trainer.stage.update.optimizer.reduce_gradients = velocity, reduce
    assert numbers(trainer.training_step()) == numbers(expected)


def test_a_step_that_fails_half_way_through_an_update_leaves_no_gradient(tmp_path):
    same, trainer = (made(tmp_path / name, microbatch=2) for name in ("same", "run"))
    velocity, calls = trainer.policy.velocity, []

    def fails(*args):
        calls.append(torch.is_grad_enabled())
        if calls.count(True) == 2:
            raise ValueError("once")
        return velocity(*args)

    trainer.policy.velocity = fails
    with pytest.raises(ValueError, match="once"):
        trainer.training_step()
    assert not any(p.grad is not None and p.grad.any() for p in trainer.policy.trainable_parameters().values())
    trainer.policy.velocity = velocity
    assert numbers(trainer.training_step()) == numbers(same.training_step())
    assert torch.equal(weights(trainer.policy), weights(same.policy))


def test_rollouts_have_the_critic_and_the_processes_of_their_part(tmp_path):
    stage = made(tmp_path, **PPO).stage
    assert stage.compare.critic is stage.critic is not None
    assert stage.sampler.processes is stage.update.processes is stage.processes
    two, one = small.Two(), made(tmp_path, prompts_per_step=4, microbatch=2)
    spread = Stage(0, one.stage.args, one.policy, one.prompt_sampler, one.rewards, processes=two)
    assert spread.sampler.processes is spread.update.processes is two


def test_a_micro_batch_of_pairs_is_even(tmp_path):
    """18 rows: of plain rows 3 would do."""
    dpo = {"objective": {"name": "dpo"}}
    trainer = made(tmp_path, prompts_per_step=3, images_per_prompt=6, microbatch=6, **dpo)
    trainer.stage.set_microbatch(3)
    assert trainer.stage.microbatch == 2


def scarce(trainer, most, when=torch.is_grad_enabled):
    """Memory for micro-batches of `most` rows."""
    velocity = trainer.policy.velocity

    def limited(x, *rest):
        if len(x) > most and when():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return velocity(x, *rest)

    trainer.policy.velocity = limited


@pytest.mark.parametrize("sampling", [{}, {"keep_graphs": True}])
def test_memory_that_runs_out_halves_the_micro_batch_from_there_on(tmp_path, sampling):
    """12 rows: 12, then the largest that divides them up to 6, up to 3; in the update, or where graphs are kept in the rollout."""
    trainer = made(tmp_path / "run", prompts_per_step=4, microbatch=12, sampling=sampling)
    plain = made(tmp_path / "plain", prompts_per_step=4, microbatch=3, sampling=sampling)
    scarce(trainer, 3)
    for step in (0, 1):
        told = numbers(trainer.training_step()), numbers(plain.training_step())
        assert told[0] == told[1]
        assert trainer.step == step + 1
    assert trainer.stage.microbatch == 3
    assert trainer.stage.warnings == [
        f"memory ran out with microbatch={former}; the run goes on with {now}." for former, now in ((12, 6), (6, 3))
    ]
    assert torch.equal(weights(trainer.policy), weights(plain.policy))


@pytest.mark.parametrize("drop", [False, True])
def test_memory_that_runs_out_in_a_reward_halves_the_micro_batch_too(tmp_path, drop):
    trainer = made(tmp_path / "run", prompts_per_step=4, microbatch=12)
    plain = made(tmp_path / "plain", prompts_per_step=4, microbatch=3)

    def large(images, prompts):
        if trainer.stage.microbatch > 3:  # the model has the rest
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return bright(images, prompts)

    trainer.rewards.rewards["bright"] = large
    trainer.rewards.drop_on_error |= {"bright"} if drop else set()
    assert numbers(trainer.training_step()) == numbers(plain.training_step())
    assert trainer.stage.microbatch == 3
    assert len(trainer.stage.warnings) == 2
    assert not trainer.rewards.drop_messages


def test_pairs_are_never_parted(tmp_path):
    dpo = {"objective": {"name": "dpo"}}
    trainer = made(tmp_path / "run", prompts_per_step=4, images_per_prompt=4, microbatch=16, **dpo)
    scarce(trainer, 1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step()
    assert trainer.stage.microbatch == 2
    assert len(trainer.stage.warnings) == 3


def test_memory_that_runs_out_after_the_weights_have_moved_or_on_one_of_several_ends_the_run(tmp_path):
    trainer = made(tmp_path / "run", updates=2, prompts_per_step=4, microbatch=6)
    moves, step = [], trainer.stage.update.optimizer.step
    trainer.stage.update.optimizer.step = lambda lr, norm: moves.append(lr) or step(lr, norm)
    scarce(trainer, 0, lambda: bool(moves) and torch.is_grad_enabled())
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step()
    assert trainer.stage.microbatch == 6
    assert not trainer.stage.warnings
    several = made(tmp_path / "several")
    several.processes = several.stage.processes = small.Two()
    scarce(several, 0)
    with pytest.raises(torch.OutOfMemoryError):
        several.training_step()
    assert several.stage.microbatch == 6


def test_what_a_failed_step_held_of_a_gpu_is_given_back_before_it_is_done_again(tmp_path, monkeypatch):
    """On a CPU there is nothing to give back."""
    trainer, given_back = made(tmp_path / "run"), []
    scarce(trainer, 3)
    cpu, velocity = trainer.policy.device, trainer.policy.velocity

    def on_a_gpu(*args):
        try:
            return velocity(*args)
        except torch.OutOfMemoryError:
            trainer.policy.device = torch.device("cuda")
            raise

    def empty():
        given_back.append(trainer.stage.update.optimizer.parameters[0].grad)
        trainer.policy.device = cpu

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    trainer.training_step()
    assert not given_back
    trainer.stage.set_microbatch(6)
    trainer.policy.velocity = on_a_gpu
    trainer.training_step()
    assert given_back == [None]
    assert trainer.stage.microbatch == 3


def test_a_failed_attempts_rollout_is_gone_when_the_next_one_begins(tmp_path):
    trainer = made(tmp_path / "run")
    scarce(trainer, 3, torch.is_grad_enabled)  # in the update, when the rollout is done
    experience, seen, alive = trainer.experience, [], []

    def watched():
        gc.collect()
        alive.append([ref() is not None for ref in seen])
        found = experience()
        seen.append(weakref.ref(found))
        return found

    trainer.experience = watched
    trainer.training_step()
    assert alive == [[], [False]]


# -- checkpoints ------------------------------------------------------------------------------------------------------------


def loud_prompts(images, prompts):
    """Half of the prompts have no signal."""
    values = bright(images, prompts)
    return torch.where(torch.tensor([len(p) % 2 == 0 for p in prompts]), torch.zeros(()), values)


STAGES = [
    {"steps": 2, "objective": {"name": "sft"}},
    {"steps": 3, "objective": {"name": "grpo"}, "optimizer": {"lr": 0.05}},
]
DRAWN_BY_OLD = {"name": "nft", "rollout_policy": "old", "old_policy_decay": {"start": 0.3, "rate": 0.1, "max": 0.9}}
COPIES = {"nft": {"old"}, "crd": {"old"}}  # of the policy, in a checkpoint
RUNS = {
    "rich": ({**RICH, "microbatch": 12, "prompts_per_step": 4}, loud_prompts),
    "ppo": (PPO, bright),
    "crd": ({"objective": {"name": "crd"}}, bright),
    "nft": ({"objective": DRAWN_BY_OLD, "ema_decay": 0}, bright),
    "stages": ({"stages": STAGES}, bright),
    "fp16": ({"dtype": "fp16"}, bright),
    "whole": ({"lora": None, "objective": {"kl_weight": 1.0}, "epochs": 2}, bright),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("stop", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_holds_all_that_the_next_steps_depend_on(tmp_path, name, stop):
    changes, reward = RUNS[name]
    dtype = torch.float16 if name == "fp16" else torch.float32

    def trainer(folder):
        policy = small.policy(dtype, lora=name != "whole")
        return made(tmp_path / folder, reward, policy=policy, **changes)

    first, second = trainer("run"), trainer("other")
    if name == "rich":
        scarce(first, 6)
    if name == "fp16":  # one overflow
        first.stage.update.optimizer.scaler.update(1024.0)
    for _ in range(stop):
        first.training_step()
    first.save()
    second.state.load_state_dict(latest(tmp_path / "run"))
    assert second.step == stop
    for step in (stop, stop + 1):
        told = numbers(first.training_step()), numbers(second.training_step())
        assert told[0] == told[1]
        assert torch.equal(weights(first.policy), weights(second.policy)), step
    assert first.policy.ema.average.keys() == second.policy.ema.average.keys()
    assert bool(first.policy.ema.average) == (name != "nft")
    if name != "nft":
        assert torch.equal(averaged(first.policy), averaged(second.policy))
    for one in (first, second):
        one.save()
    one, other = (latest(tmp_path / folder) for folder in ("run", "other"))
    one["memory"].pop("compare")  # the critic
    other["memory"].pop("compare")
    assert one["memory"] == other["memory"]
    assert one.keys() == other.keys()
    assert one.keys() & {"old", "rollout"} == COPIES.get(name, set())
    for copy in COPIES.get(name, ()):
        assert torch.equal(weights(first.policy, copy), weights(second.policy, copy))
        assert not torch.equal(weights(first.policy, copy), weights(first.policy))
    if name == "rich":
        assert one["memory"]["microbatch"] == 6
        assert one["memory"]["clip"]


def test_a_checkpoint_between_two_stages_belongs_to_the_one_that_has_ended(tmp_path):
    first = made(tmp_path / "run", stages=STAGES)
    for _ in range(2):
        first.training_step()
    first.save()
    assert latest(tmp_path / "run")["begin"] == 0
    second = made(tmp_path / "other", stages=STAGES)
    second.state.load_state_dict(latest(tmp_path / "run"))
    assert second.stage.args.objective.name == "sft"
    assert second.stage.update.optimizer.state_dict()["optimizer"]["state"], "its moments"
    first.training_step()
    first.save()
    assert latest(tmp_path / "run")["begin"] == 2
    second.training_step()
    assert second.stage.args.objective.name == "grpo"
    assert torch.equal(weights(first.policy), weights(second.policy))


def test_a_run_saved_by_one_process_fits_its_micro_batch_to_more(tmp_path):
    trainer = made(tmp_path / "run", prompts_per_step=4, microbatch=12)
    trainer.training_step()
    trainer.save()
    more = made(tmp_path / "more", prompts_per_step=4, microbatch=12)
    more.stage.processes = small.Two()
    more.state.load_state_dict(latest(tmp_path / "run"))
    assert more.stage.microbatch == 6


def test_every_so_many_steps_are_saved_and_so_many_are_kept(tmp_path):
    made(tmp_path / "a" / "b" / "all", steps=5, save_every=2, keep_checkpoints=9).train()
    assert saved(tmp_path / "a" / "b" / "all") == [0, 2, 4, 5]
    made(tmp_path / "few", steps=3, save_every=1, keep_checkpoints=2).train()
    assert saved(tmp_path / "few") == [2, 3]
    assert latest(tmp_path / "few")["step"] == 3


def test_only_the_first_process_writes_and_the_others_help_where_weights_are_spread(tmp_path):
    trainer = made(tmp_path / "run")
    trainer.state.processes = small.Two(rank=1)
    asked = []

    def asking(gather):
        def gathering(adapter="default", keep_on_this_rank=True):
            asked.append(adapter if isinstance(adapter, bool) else keep_on_this_rank)
            return gather(adapter) if isinstance(adapter, bool) else gather(adapter, keep_on_this_rank)

        return gathering

    trainer.stage.update.optimizer.state_dict = asking(trainer.stage.update.optimizer.state_dict)
    trainer.policy.adapter_state = asking(trainer.policy.adapter_state)
    assert not trainer.state.save(), "it wrote none"
    assert not asked
    trainer.stage.update.optimizer.is_sharded = True
    assert not trainer.state.save()
    assert asked == [False, False]
    trainer.processes = trainer.state.processes = small.Two()
    assert trainer.state.save()
    assert asked == [False, False, True, True]
    assert saved(tmp_path / "run") == [0]


# -- evaluation -------------------------------------------------------------------------------------------------------------


@pytest.mark.real_report
def test_a_report_is_written_at_each_evaluation(tmp_path):
    trainer, seen = made(tmp_path / "run", held_out=HELD_OUT, steps=1), []
    step = trainer.training_step
    trainer.training_step = lambda: seen.append((tmp_path / "run" / "report.html").exists()) or step()
    trainer.train()
    assert seen == [True]


@pytest.mark.parametrize(("every", "expected"), [(2, [0, 2, 4, 5]), (0, [0, 5]), (5, [0, 5])])
def test_held_out_prompts_are_drawn_before_and_after_and_every_so_many_steps(tmp_path, every, expected):
    evaluation = made(tmp_path / "run", held_out=HELD_OUT, steps=5, evaluation={"every": every, "max_prompts": 2}).train()
    told = [row for row in rows(tmp_path / "run") if "eval/reward" in row]
    assert [row["step"] for row in told] == expected
    assert {f"eval/{name}": value for name, value in evaluation.items()}.items() <= told[-1].items()
    assert evaluation["reward"] == pytest.approx(evaluation["bright"])
    content = json.loads((tmp_path / "run" / "pictures" / "step_000000" / "evaluation.json").read_text())
    assert content["prompts"] == ["a moon", "a fish"]
    assert content["seeds"] == [image_seed(SEED, place) for place in range(2)]
    assert content["trained"] == ["bright"]
    assert (tmp_path / "run" / "before_after.png").exists()


def test_it_is_the_moving_average_that_is_evaluated_and_saved(tmp_path):
    settings = {"evaluation": {"steps": 3}, "steps": 3, "ema_decay": 0.7, "optimizer": {"lr": 0.3}}
    trainer = made(tmp_path / "run", held_out=HELD_OUT, **settings)
    evaluation = trainer.train()
    mean, now = averaged(trainer.policy), weights(trainer.policy)
    assert (mean - now).abs().max() > 0.05
    other = small.policy()
    with torch.no_grad():
        for name, parameter in other.trainable_parameters().items():
            parameter.copy_(trainer.policy.ema.average[name])
    expected = generate_images(other, HELD_OUT.prompts, [image_seed(SEED, place) for place in range(3)], 3).mean((1, 2, 3))
    assert evaluation["reward"] == pytest.approx(float(expected.mean()), abs=1e-6)
    values = trainer.evaluate()
    torch.testing.assert_close(values.values["bright"], expected, rtol=0, atol=1e-6)
    assert len(values.diversity) == 3
    assert sorted(values.images) == [0, 1, 2]
    assert torch.equal(weights(trainer.policy), now), "training goes on from where it was"
    file = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    kept = torch.cat([v.flatten() for v in file.values()])
    assert sorted(kept.tolist()) == pytest.approx(sorted(written(trainer.policy).tolist()))


def test_sixteen_prompts_are_shown_before_and_after_and_drawn_twice(tmp_path):
    held_out = small.PromptSet([f"a {n}" for n in range(18)], [{}] * 18)
    trainer = made(tmp_path / "run", held_out=held_out, steps=1, evaluation={"steps": 1})
    trainer.train()
    for name in ("before", "after"):
        _, cells = read_grid(tmp_path / "run" / f"{name}.png")
        assert cells == [
            ImageInfo(f"a {n}", image_seed(SEED, n), f"StableDiffusion3Pipeline, {name} training") for n in range(16)
        ]
    _, cells = read_grid(tmp_path / "run" / "before_after.png")
    assert [cell.seed for cell in cells] == [image_seed(SEED, n) for n in range(16) for _ in range(2)]
    evaluation = trainer.evaluate()
    assert len(evaluation.diversity) == 16
    assert set(evaluation.images) >= set(range(16))


def test_the_weights_of_the_best_evaluation_are_kept_as_they_were_drawn(tmp_path):
    """The first prompts are the brightest in step 1 by a measure that is not trained on."""
    trainer = made(
        tmp_path / "run", held_out=HELD_OUT, steps=3, evaluation={"every": 1}, ema_decay=0.7, optimizer={"lr": 0.3}
    )
    averages, evaluated = {}, trainer.evaluator.evaluate

    def scripted(microbatch):
        evaluation = evaluated(microbatch)
        averages[trainer.step] = written(trainer.policy)
        values = torch.tensor([[0.1, 0.9, 0.4, 0.2][trainer.step]] * 3)
        return type(evaluation)(**{**vars(evaluation), "values": {"reward": values, "bright": values}})

    trainer.evaluator.evaluate = scripted
    trainer.train()
    file = load_file(tmp_path / "run" / "best" / "pytorch_lora_weights.safetensors")
    assert sorted(torch.cat([v.flatten() for v in file.values()]).tolist()) == pytest.approx(sorted(averages[1].tolist()))
    told = [row for row in rows(tmp_path / "run") if "eval/reward" in row]
    assert [row["monitor/best_step"] for row in told] == [0, 1, 1, 1]


def test_the_best_weights_of_a_step_that_a_resumed_run_does_again_are_deleted(tmp_path):
    settings = {"held_out": HELD_OUT, "steps": 3, "save_every": 2, "keep_checkpoints": 9, "evaluation": {"every": 1}}
    first = made(tmp_path / "run", **settings)
    best_last(first)
    first.train()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000003")
    kept, again = [], made(tmp_path / "run", **settings)
    best_last(again)
    step = again.training_step
    again.training_step = lambda: (kept.append((tmp_path / "run" / "best").exists()), step())[1]
    assert (tmp_path / "run" / "best").exists()
    again.train(resume=True)
    assert kept == [False]
    assert (tmp_path / "run" / "best").exists()


def best_last(trainer):
    """Evaluations by which each step is better than the one before."""
    evaluated = trainer.evaluator.evaluate

    def scripted(microbatch):
        return dataclasses.replace(evaluated(microbatch), values={"reward": torch.full((3,), float(trainer.step))})

    trainer.evaluator.evaluate = scripted


def test_what_is_measured_and_not_trained_on_is_in_no_sum(tmp_path):
    trainer = made(
        tmp_path / "run", held_out=HELD_OUT, prompts_per_step=1, evaluation={"rewards": {"jpeg_size": 1.0}, "steps": 2}
    )
    assert list(trainer.rewards.rewards) == ["bright"]
    assert sorted(trainer.eval_rewards.rewards) == ["bright", "jpeg_size"]
    means = trainer.evaluate().means()
    assert means["reward"] == pytest.approx(means["bright"])
    assert "rewards/jpeg_size/mean" not in trainer.training_step()
    with pytest.raises(ValueError, match=r"no held-out prompts: set evaluation\.prompts"):
        made(tmp_path / "without").evaluate()


def test_images_are_kept_of_the_first_step_and_of_those_that_are_evaluated(tmp_path):
    evaluation = {"every": 2}
    trainer = made(tmp_path / "run", held_out=HELD_OUT, steps=5, evaluation=evaluation)
    trainer.train()
    kept = sorted(place.parent.name for place in (tmp_path / "run" / "pictures").glob("*/groups.json"))
    assert kept == [f"step_{step:06d}" for step in (1, 2, 4, 5)]
    groups = json.loads((tmp_path / "run" / "pictures" / "step_000001" / "groups.json").read_text())["groups"]
    rewards = torch.tensor([group["reward"] for group in groups])
    told = next(row for row in rows(tmp_path / "run") if row["step"] == 1)
    assert told["reward"] == pytest.approx(float(rewards.mean()), abs=1e-6)
    expected = group_advantages(rewards.flatten(), torch.arange(6) // 3)
    assert [a for group in groups for a in group["advantage"]] == pytest.approx(expected.tolist(), abs=1e-4)
    first = json.loads((tmp_path / "run" / "pictures" / "step_000000" / "evaluation.json").read_text())
    assert first["values"]["reward"]
    assert sorted(p.name for p in (tmp_path / "run" / "pictures" / "step_000000").glob("*.webp"))


# -- windows and stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "expected"), [
    ({"schedule": "all"}, [[0, 1, 2, 3]] * 6),
    ({"schedule": "all", "first_step": 1, "last_step": 2}, [[1, 2]] * 6),
    ({"schedule": "fixed", "size": 2, "first_step": 1}, [[1, 2]] * 6),
])  # fmt: skip
def test_the_steps_of_a_window_are_those_by_hand_in_each_training_step(tmp_path, window, expected):
    trainer = made(tmp_path / "run", sampling={"steps": 5, "window": window})
    assert [trainer.stage.sampler.window(step) for step in range(6)] == expected
    assert small.collect(trainer, 3).trajectory.steps == expected[3]


def test_a_random_window_is_drawn_from_seed_and_step_and_the_ode_has_none(tmp_path):
    window = {"schedule": "random", "size": 2, "first_step": 1}
    trainers = [made(tmp_path, sampling={"steps": 6, "window": window}, seed=seed) for seed in (0, 5)]
    drawn = [trainer.stage.sampler.window(step) for trainer in trainers for step in range(9)]
    settings = WindowConfig.model_validate(window)
    expected = [trained_steps(settings, 6, step, seed) for seed in (0, 5) for step in range(9)]
    assert drawn == expected
    assert {tuple(w) for w in drawn} == {(1, 2), (2, 3), (3, 4)}
    trainer = made(tmp_path, objective={"name": "sft"}, sampling={"steps": 5})
    assert trainer.stage.sampler.window(0) == []


def test_a_stage_begins_with_an_optimizer_a_window_and_an_old_policy_of_its_own(tmp_path):
    window = {"schedule": "fixed", "size": 1, "first_step": 1}
    stages = [
        {"steps": 3, "objective": {"name": "ppo"}},
        {"steps": 4, "sampling": {"window": window}, "optimizer": {"warmup_steps": 4, "lr": 0.08}, "microbatch": 3},
        {"steps": 2, "objective": {"name": "nft"}},
    ]
    trainer = made(tmp_path / "run", stages=stages)
    assert trainer.args.steps == 9
    assert (trainer.stage.start, trainer.stage.args.objective.name) == (0, "ppo")
    assert trainer.stage.critic is not None
    for _ in range(3):
        trainer.training_step()
    assert trainer.stage.update.optimizer.state_dict()["optimizer"]["state"]
    windows, rates = [], []
    for step in range(3, 7):
        metrics = trainer.training_step()
        windows.append(trainer.stage.sampler.window(step))
        rates.append(metrics["lr"])
        assert (trainer.stage.start, trainer.stage.microbatch) == (3, 3)
    assert trainer.stage.critic is None
    assert windows == [[1]] * 4
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08])
    moments = trainer.stage.update.optimizer.state_dict()["optimizer"]["state"]
    assert all(float(value["step"]) == 4 for value in moments.values()), "of this stage alone"
    trained = weights(trainer.policy)
    assert not torch.equal(weights(trainer.policy, "old"), trained)
    trainer.state.enter_stage(7)
    assert torch.equal(weights(trainer.policy, "old"), trained)
    assert trainer.stage.start == 7
    update = trainer.stage.update
    trainer.state.enter_stage(8)
    assert trainer.stage.update is update, "within a stage nothing begins anew"


def test_a_part_may_train_on_given_images(tmp_path):
    images = generate_images(small.policy(), ["a cat", "a dog"], [0, 1], 2)
    for i, image in enumerate(images):
        save_image(tmp_path / f"{i}.png", image, ImageInfo("", i, "small"))
    table = [{"prompt": f"a {word}", "image": f"{i}.png"} for i, word in enumerate(("cat", "dog"))]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, table)))
    given = {"objective": {"name": "sft", "dataset": str(tmp_path / "table.jsonl")}}
    trainer = made(tmp_path / "run", steps=2, prompts=["a b"], **given)  # fewer than a step deals, and none is dealt
    trainer.train()
    told = rows(tmp_path / "run")
    assert [row["images"] for row in told] == [0.0, 0.0]
    assert all(row["sft/error"] > 0 and row["grad_norm"] > 0 for row in told)
    assert not list((tmp_path / "run").rglob("groups.json"))


# -- what is said at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), [
    ({"prompts_per_step": 7, "microbatch": 3}, "prompts_per_step=7, but there are only 6 prompts"),
    ({"stages": [{"steps": 1}, {"steps": 1, "prompts_per_step": 7, "microbatch": 3}]}, "prompts_per_step=7, but"),
    ({"objective": {"name": "nowhere.py:mine"}}, "there is no objective file nowhere.py"),
    ({"objective": {"advantage": "nowhere.py:mine"}}, "there is no advantage file nowhere.py"),
    ({"trackers": {"swanlab": {}}}, "trackers: swanlab needs the package"),
    ({"images_per_prompt": 3, "prompts_per_step": 3, "microbatch": 9, "objective": {"name": "dpo"},
      }, "odd|pairs"),
])  # fmt: skip
def test_what_does_not_fit_is_reported_before_the_run(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        made(tmp_path / "run", **changes)


def test_several_processes_have_no_critic(tmp_path, monkeypatch):
    monkeypatch.setattr("flow_grpo.training.setup.Processes.from_environment", lambda device: small.Two())
    with pytest.raises(ValueError, match=r"objective ppo.* on one process"):
        made(tmp_path / "run", held_out=HELD_OUT.head(2), **PPO)
    assert made(tmp_path / "run", held_out=HELD_OUT.head(1)).stage.microbatch == 3, "of 3 rows each"


def test_the_critic_has_the_seed_of_the_run(tmp_path):
    critics = [made(tmp_path, **{**PPO, "seed": seed}).stage.critic for seed in (0, 0, 4)]
    first = [next(critic.parameters()) for critic in critics]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_models_place_may_be_given_and_its_prompts_alone_are_encoded(tmp_path):
    """Once all prompts of a run, held out ones too, have their embeddings on disk, the text encoders are not loaded."""
    pretrain.pipeline().save_pretrained(tmp_path / "model")
    size = {"height": 32, "width": 80, "pipeline_kwargs": {"max_sequence_length": 14}}
    args = small.settings(
        memory={"embedding_cache_dir": str(tmp_path / "kept")}, device="cpu", evaluation={"steps": 2}, **size
    )
    given = str(tmp_path / "model"), [bright], args, ["a cat", "a dog"], ["a moon"]
    first = FlowGRPOTrainer(*given)
    assert first.args.model == given[0]
    assert args.model == "tiny", "settings that were given stay as they were"
    assert first.policy.pipe.text_encoder is not None
    expected = first.evaluate().means()
    first.training_step()
    again = FlowGRPOTrainer(*given)
    assert again.policy.pipe.text_encoder is None
    assert again.evaluate().means() == expected
    more = FlowGRPOTrainer(*given[:4], ["a ship"])
    assert more.policy.pipe.text_encoder is not None


def test_settings_name_what_is_not_given(tmp_path):
    (tmp_path / "train.txt").write_text("a cat\na dog\na sun\n")
    (tmp_path / "held_out.txt").write_text("a moon\na ship\n")
    evaluation = {"prompts": str(tmp_path / "held_out.txt"), "max_prompts": 1}
    args = small.settings(
        prompts=str(tmp_path / "train.txt"),
        rewards={"jpeg_size": 2.0},
        evaluation=evaluation,
    )
    trainer = FlowGRPOTrainer(small.policy(), args=args)
    assert trainer.train_set.prompts == ["a cat", "a dog", "a sun"]
    assert trainer.eval_set.prompts == ["a moon"]
    assert trainer.rewards.weights["jpeg_size"] == 2.0
    assert trainer.prompt_sampler.seed == 0


# -- the run folder -----------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_stopped_with_the_same_numbers(tmp_path, capsys):
    """Also after its end, with more steps: what the earlier end has left is no longer the last."""
    settings = {"held_out": HELD_OUT, "save_every": 1, "keep_checkpoints": 9, "evaluation": {"every": 2}}
    made(tmp_path / "whole", steps=4, **settings).train()
    made(tmp_path / "run", steps=2, **settings).train()
    assert (tmp_path / "run" / "lora").exists()
    assert "LoRA: " in capsys.readouterr().out
    again = made(tmp_path / "run", steps=4, **settings)
    trained = []
    step = again.training_step
    again.training_step = lambda: (trained.append((tmp_path / "run" / "lora").exists()), step())[1]
    begun = []
    again.callbacks.call = lambda event, **kwargs: (
        event == "on_train_begin" and begun.append(again.callbacks.state.global_step)
    )
    again.train(resume=True)
    assert begun == [2], "the step that the run goes on from"
    assert trained == [False, False]
    assert "resumed at step 2 of 4" in capsys.readouterr().out
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    files = [load_file(tmp_path / name / "lora" / "pytorch_lora_weights.safetensors") for name in ("run", "whole")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    done = made(tmp_path / "run", steps=4, **settings)
    kept, save = [], done.state.save_weights
    done.state.save_weights = lambda: (kept.append((tmp_path / "run" / "lora").exists()), save())[1]
    done.train(resume=True)
    assert kept == [True], "a run that is over stays so"
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_a_damaged_checkpoint_is_passed_over_and_what_came_after_is_dropped(tmp_path, capsys):
    settings = {"held_out": HELD_OUT, "save_every": 1, "keep_checkpoints": 9, "evaluation": {"every": 1}, "steps": 3}
    made(tmp_path / "run", **settings).train()
    expected = rows(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step_000003" / "state.pt"
    state.write_bytes(state.read_bytes()[:-9])
    again = made(tmp_path / "run", **settings)
    seen, step = [], again.training_step

    def look():
        pictures = sorted(place.name for place in (tmp_path / "run" / "pictures").iterdir())
        seen.append((saved(tmp_path / "run"), [row["step"] for row in rows(tmp_path / "run")], pictures))
        return step()

    again.training_step = look
    again.train(resume=True)
    [(checkpoints, told, pictures)] = seen
    assert checkpoints == [0, 1, 2]
    assert max(told) == 2
    assert pictures == [f"step_{n:06d}" for n in range(3)]
    output = " ".join(capsys.readouterr().out.split())
    assert "warning: " in output
    assert "step_000003 is damaged" in output
    assert rows(tmp_path / "run") == expected


def test_what_can_not_be_started_or_resumed_gets_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        made(tmp_path / "none").train(resume=True)
    made(tmp_path / "run", steps=1).train()
    with pytest.raises(ValueError, match="already holds a run: go on with it by --resume"):
        made(tmp_path / "run", steps=1).train()
    with pytest.raises(ValueError, match="was begun with seed=0, not 3"):
        made(tmp_path / "run", steps=1, seed=3).train(resume=True)
    state = latest(tmp_path / "run")
    for spoiled in ({**state, "memory": {}}, {k: v for k, v in state.items() if k != "memory"}):
        checkpoint.save(tmp_path / "run" / "checkpoints", 1, spoiled, 1)
        with pytest.raises(ValueError, match=r"written by flow-grpo 0\.2 or before"):
            made(tmp_path / "run", steps=1).train(resume=True)


def test_prompts_that_are_trained_on_and_measured_are_reported_before_the_first_step(tmp_path):
    made(tmp_path / "run", steps=1, held_out=small.PROMPTS).train()
    [(step, warning)] = [(row["step"], row["warning"]) for row in rows(tmp_path / "run") if "warning" in row]
    assert step == 0
    assert "6 of the 6 held-out prompts" in warning


def test_settings_that_may_change_are_written_anew(tmp_path):
    made(tmp_path / "run", steps=1).train()
    made(tmp_path / "run", steps=2, save_every=7).train(resume=True)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "save_every: 7" in config
    assert "steps: 2" in config
    (tmp_path / "run" / "config.yaml").unlink()
    made(tmp_path / "run", steps=2, save_every=7).train(resume=True)
    assert (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.usefixtures("no_report")
def test_a_run_goes_on_in_the_dtype_in_which_it_began(tmp_path, monkeypatch, capsys):
    def run(steps, resume):
        settings = ["dtype=auto", f"steps={steps}", "evaluation.prompts=null"]
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / "run", *settings))
        trainer.train(resume=resume)
        return trainer.policy.dtype

    monkeypatch.setattr(devices, "bf16_speedup", lambda: 4.0)
    monkeypatch.setattr(setup, "bf16_speedup", lambda: 4.0)
    assert run(1, resume=False) == torch.bfloat16
    output = " ".join(capsys.readouterr().out.split())
    assert " on cpu in bfloat16 (4.0 times as fast as float32 at a layer here): 1 step" in output
    monkeypatch.setattr(devices, "bf16_speedup", lambda: 0.5)
    assert run(2, resume=True) == torch.bfloat16, "another machine"
    (tmp_path / "run" / "machine.json").write_text('{"dtype": "float12"}')
    assert run(3, resume=True) == torch.bfloat16, "inputs.json says it too"
    (tmp_path / "run" / "inputs.json").unlink()
    assert run(4, resume=True) == torch.float32


def test_a_run_says_what_it_trains_where(tmp_path, capsys):
    made(tmp_path / "run", steps=2).train()
    output = " ".join(capsys.readouterr().out.split())
    assert "model: StableDiffusion3Pipeline" in (tmp_path / "run" / "config.yaml").read_text()
    assert (
        f"StableDiffusion3Pipeline on cpu in float32: 2 steps of 2 prompts x 3 images; run folder {tmp_path / 'run'}"
        in output
    )
    machine = json.loads((tmp_path / "run" / "machine.json").read_text())
    assert machine["processes"] == 1
    assert (tmp_path / "run" / "config.yaml").read_text() == made(tmp_path / "run", steps=2).args.to_yaml()


@pytest.mark.real_report
def test_without_held_out_prompts_a_run_ends_with_weights_and_a_report(tmp_path, capsys):
    assert made(tmp_path / "run", steps=1).train() == {}
    output = capsys.readouterr().out.replace("\n", "")
    for name, place in (("LoRA", Path("lora", "pytorch_lora_weights.safetensors")), ("report", Path("report.html"))):
        assert (tmp_path / "run" / place).exists()
        assert f"{name}: {tmp_path / 'run' / place}" in output


def test_all_weights_of_a_transformer_are_saved_as_one(tmp_path):
    trainer = made(tmp_path / "run", steps=1, lora=None)
    trainer.train()
    assert (tmp_path / "run" / "transformer" / "config.json").exists()
    assert not (tmp_path / "run" / "lora").exists()


def test_the_trackers_of_a_run_get_its_numbers(tmp_path):
    made(tmp_path / "run", steps=1, trackers={"tensorboard": {}}).train()
    first = list((tmp_path / "run").rglob("events.out*"))
    assert first
    made(tmp_path / "run", steps=2, trackers={"tensorboard": {}}).train(resume=True)
    assert len(list((tmp_path / "run").rglob("events.out*"))) > len(first)


def test_what_was_dropped_or_noted_is_reported_once_with_its_step(tmp_path):
    def flaky(images, prompts):
        flaky.calls += 1
        return [math.nan if flaky.calls == 2 and i == 0 else float(v) for i, v in enumerate(images.mean((1, 2, 3)))]

    flaky.calls = 0
    trainer = made(tmp_path / "run", flaky, steps=3)
    trainer.rewards.drop_on_error.add("flaky")
    trainer.stage.warnings.append("a note")
    trainer.train()
    told = [(row["step"], row["warning"]) for row in rows(tmp_path / "run") if "warning" in row]
    assert told == [(1, "a note"), (2, "reward flaky gave no finite number for 1 of 6 images, whose groups were left out.")]
    assert not trainer.stage.warnings
    assert not trainer.rewards.drop_messages


def test_what_was_dropped_in_the_last_evaluation_is_reported_too(tmp_path):
    def flaky(images, prompts):
        return [math.nan if trainer.step == 1 and i == 0 else float(v) for i, v in enumerate(images.mean((1, 2, 3)))]

    trainer = made(tmp_path / "run", flaky, steps=1, held_out=HELD_OUT)
    trainer.eval_rewards.drop_on_error.add("flaky")
    trainer.train()
    told = [(row["step"], row["warning"]) for row in rows(tmp_path / "run") if "flaky gave" in row.get("warning", "")]
    assert told == [
        (1, "in the evaluation: reward flaky gave no finite number for 1 of 3 images, whose groups were left out.")
    ]


def test_a_callback_that_asks_to_stop_at_an_evaluation_ends_the_run_there(tmp_path):
    class StopAtScore:
        def on_evaluate(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 1

    trainer = made(tmp_path / "run", steps=3, held_out=HELD_OUT, evaluation={"every": 1})
    trainer.callbacks.callbacks.append(StopAtScore())
    trainer.train()
    assert trainer.step == 1
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
    trainer.train(resume=True)
    assert trainer.step == 3


def test_a_run_without_signal_is_warned_of_once_also_if_it_is_resumed(tmp_path, capsys):
    """0.7, whose sum of three is not exactly three times it; in the second step the images differ."""

    def rarely(images, prompts):
        rarely.calls += 1
        return [0.7 + 0.1 * (i % 2) * (rarely.calls == 2) for i in range(len(prompts))]

    rarely.calls = 0
    made(tmp_path / "run", rarely, steps=3).train()
    made(tmp_path / "run", rarely, steps=5).train(resume=True)
    told = [row for row in rows(tmp_path / "run") if "warning" in row]
    assert [row["step"] for row in told] == [1]
    assert [row["frac_reward_zero_std"] for row in rows(tmp_path / "run") if "loss" in row] == [1, 0, 1, 1, 1]
    sentence = "in step 1 all images of each prompt got the same reward, so nothing was learned. If this continues, "
    sentence += f"run `flow-grpo doctor {tmp_path}"
    assert told[0]["warning"].startswith(sentence)
    assert capsys.readouterr().out.count(f"warning: {sentence}") == 1


def test_no_signal_is_no_warning_where_images_are_compared_with_the_batch_or_were_dropped(tmp_path, capsys):
    def by_group(images, prompts):
        return [float(len(prompt)) for prompt in prompts]

    def nothing(images, prompts):
        return [math.nan] * len(prompts)

    made(
        tmp_path / "batch", by_group, prompts=small.PromptSet(["a", "bb"], [{}] * 2), objective={"advantage": "reinforce_pp"}
    ).train()
    dropped = made(tmp_path / "dropped", nothing)
    dropped.rewards.drop_on_error.add("nothing")
    dropped.train()
    sentence = "nothing was learned: in every step all images were left out, as a reward failed or gave no finite number."
    assert f"warning: {sentence}\n" in capsys.readouterr().out
    assert headline(RunReader(tmp_path / "dropped")).endswith(f"but {sentence}")
    for name in ("batch", "dropped"):
        told = [row["warning"] for row in rows(tmp_path / name) if "warning" in row]
        assert not [sentence for sentence in told if "same reward" in sentence]


def test_a_measure_that_falls_while_the_reward_rises_is_warned_of_once(tmp_path):
    held_out = small.PromptSet([f"a {n}" for n in range(8)], [{}] * 8)
    trainer = made(tmp_path / "run", held_out=held_out, steps=3, evaluation={"every": 1, "rewards": {"jpeg_size": 1.0}})
    evaluated = trainer.evaluator.evaluate

    def scripted(microbatch):
        evaluation, step = evaluated(microbatch), trainer.step
        jitter = 1e-3 * torch.arange(8)
        values = {"reward": step + jitter, "bright": step + jitter, "jpeg_size": 10.0 - step + jitter}
        return type(evaluation)(**{**vars(evaluation), "values": values})

    trainer.evaluator.evaluate = scripted
    trainer.train()
    told = [row for row in rows(tmp_path / "run") if row.get("fallen") == "jpeg_size"]
    assert [row["step"] for row in told] == [1]
    assert "jpeg_size, which is not trained on, has fallen by 10%" in told[0]["warning"]
    assert all("time/evaluation" in row for row in read_metrics(tmp_path / "run") if "eval/reward" in row)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, images, prompts):
        return self.scale * images.mean((1, 2, 3))


class Narrow:
    def on_step_end(self, args, state, control):
        pass


def with_bright(**setting) -> dict:
    return {"reward_funcs": bright, "args": small.settings(rewards={"bright": setting})}


def scaled(images, prompts, scale=1.0):
    return scale * images.mean((1, 2, 3))


@pytest.mark.parametrize(("given", "name"), [(scaled, "scaled"), ((scaled,), "scaled"), (Scaled, "Scaled")])
def test_the_options_of_a_given_function_or_class_are_used(given, name):
    args = small.settings(rewards={name: {"options": {"scale": 3.0}}})
    trainer = FlowGRPOTrainer(small.policy(lora=False), given, args, small.PROMPTS)
    images = torch.full((2, 3, 8, 8), 0.25)
    assert trainer.rewards(images, ["a", "b"])[1][name].tolist() == [0.75, 0.75]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"args": {"height": 32}}, "args is of type dict: give FlowGRPOConfig"),
        ({"args": "tiny_ocr"}, "args is of type str: give FlowGRPOConfig"),
        ({"reward_funcs": 3}, "reward_funcs has an object of type int: give names, functions or classes"),
        ({"reward_funcs": [bright, None]}, "reward_funcs has an object of type NoneType"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"reward_funcs": Scaled}, "reward Scaled: missing a required argument: 'scale'; its options are scale"),
        (with_bright(options={"scale": 2}), "reward bright: got an unexpected keyword argument 'scale'"),
        (with_bright(isolate=True), "reward bright was given as an object, which no other process has"),
        (with_bright(remote="http://node2:8000"), "reward bright was given as an object, which no other process has"),
        ({"callbacks": Scaled(1)}, "callbacks is of type Scaled: give a list of objects"),
        ({"callbacks": [Narrow()]}, r"on_step_end of the callback Narrow takes \(args, state, control\): let it take"),
        ({"train_dataset": PromptSet(["a", ""], [{}, {}])}, "the PromptSet, item 2: '' is not a prompt"),
        ({"train_dataset": PromptSet([], [])}, "the PromptSet holds no prompts"),
        (
            {"train_dataset": PromptSet(["a"], [{"images": 1}])},
            "the PromptSet has a column `images`, a name that is reserved",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments, sentence):
    with pytest.raises(FlowGRPOError, match=f"^{sentence}"):
        FlowGRPOTrainer(small.policy(lora=False), **{"args": small.settings(), "train_dataset": small.PROMPTS, **arguments})


def test_a_damaged_picture_ends_no_run(tmp_path):
    held_out = small.PromptSet(["a 1", "a 2"], [{}] * 2)
    trainer = made(tmp_path / "run", held_out=held_out, steps=1)
    trained = trainer.training_step

    def damaging():
        (tmp_path / "run" / "before.png").write_bytes(b"no picture")
        return trained()

    trainer.training_step = damaging
    trainer.train()
    assert (tmp_path / "run" / "lora").is_dir()
    assert rows(tmp_path / "run")[-1]["step"] == 1


# -- how a run is stopped -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "place", "expected"), [
    (signal.SIGINT, "velocity", 1), (signal.SIGTERM, "velocity", 1), (signal.SIGHUP, "velocity", 1), (signal.SIGINT, "reward", 2),
])  # fmt: skip
def test_a_signal_leaves_a_rollout_at_once_and_an_update_at_its_end(tmp_path, number, place, expected):
    trainer = made(tmp_path / "run", steps=9)
    velocity, calls = trainer.policy.velocity, []

    def stops(*args):
        if trainer.step == 1 and not torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), number)
        return velocity(*args)

    def reward(images, prompts):
        if trainer.step == 1:
            os.kill(os.getpid(), number)
        return bright(images, prompts)

    if place == "velocity":
        trainer.policy.velocity = stops
    else:
        trainer.rewards.rewards["bright"] = reward
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as `nohup`, under which tests may run, has it
    try:
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.getsignal(one) for one in handled]
        with pytest.raises(Interrupted):
            trainer.train()
        assert [signal.getsignal(one) for one in handled] == before
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert saved(tmp_path / "run")[-1] == expected
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, expected + 1))
    if place == "velocity":
        assert len(calls) == 2
    made(tmp_path / "run", steps=3).train(resume=True)
    made(tmp_path / "whole", steps=3).train()
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path):
    trainer = made(tmp_path / "run", steps=9)
    velocity = trainer.policy.velocity

    def stops(*args):
        os.kill(os.getpid(), signal.SIGINT)
        assert trainer.processes.stop_requested
        os.kill(os.getpid(), signal.SIGINT)
        return velocity(*args)

    trainer.policy.velocity = stops
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path):
    errors, before = [], signal.getsignal(signal.SIGINT)
    trainer = made(tmp_path / "run", steps=1)
    thread = threading.Thread(target=lambda: errors.append(trainer.train()))
    thread.start()
    thread.join()
    assert errors == [{}]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("half", [False, True])
def test_what_fails_is_saved_before_its_step_but_never_half_of_one(tmp_path, half):
    trainer = made(tmp_path / "run", steps=5, updates=2, microbatch=3)
    reduce, calls = trainer.stage.update.optimizer.reduce_gradients, []

    def fails():
        calls.append(1)
        if len(calls) == (4 if half else 3):
            next(iter(trainer.policy.trainable_parameters().values())).grad.fill_(math.nan)
        return reduce()

    trainer.stage.update.optimizer.reduce_gradients = fails
    with pytest.raises(ValueError, match="gradient of step 2 is not finite"):
        trainer.train()
    assert saved(tmp_path / "run") == ([0] if half else [0, 1])


def test_an_error_between_the_update_and_the_count_of_the_step_saves_no_weights_of_an_uncounted_step(tmp_path):
    trainer = made(tmp_path / "run", steps=3)
    speed = trainer.policy.meter.speed

    def fails(*args, **kwargs):
        if trainer.step == 1:
            raise RuntimeError("the device is gone")
        return speed(*args, **kwargs)

    trainer.policy.meter.speed = fails
    with pytest.raises(RuntimeError, match="the device is gone"):
        trainer.train()
    resumed, same = made(tmp_path / "run", steps=3), made(tmp_path / "same", steps=3)
    resumed.train(resume=True)
    same.train()
    assert torch.equal(weights(resumed.policy), weights(same.policy))


@pytest.mark.parametrize("kind", ["stopped", "failed"])
def test_where_weights_are_spread_only_what_stops_together_is_saved(tmp_path, kind):
    trainer = made(tmp_path / "run", steps=5)
    trainer.stage.update.optimizer.is_sharded = True

    def reward(images, prompts):
        if trainer.step == 1 and kind == "failed":
            return [math.nan] * len(prompts)
        trainer.processes.stop_requested = trainer.step == 1
        return bright(images, prompts)

    trainer.rewards.rewards["bright"] = reward
    with pytest.raises(Interrupted if kind == "stopped" else ValueError):
        trainer.train()
    assert saved(tmp_path / "run") == ([0, 2] if kind == "stopped" else [0])


# -- several processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_alone_writes_and_speaks(tmp_path, rank, monkeypatch, capsys):
    """The other one has the same rows once more, the pictures of the prompts between, and as the first one begins a new run."""

    def other(value):
        if value is None:
            return False, None
        pictures = isinstance(value, dict) and value and all(isinstance(place, int) for place in value)
        return {place + 1 - 2 * rank: picture for place, picture in value.items()} if pictures else value

    monkeypatch.setattr("flow_grpo.training.setup.Processes.from_environment", lambda device: small.Two(other, rank))
    trainer = made(tmp_path / "run", held_out=HELD_OUT.head(2), steps=1, ema_decay=0)
    monkeypatch.setattr("flow_grpo.evaluation.generate.best_and_worst", lambda values: [])
    evaluation = trainer.train()
    files = sorted(place.name for place in (tmp_path / "run").iterdir()) if (tmp_path / "run").exists() else []
    assert ("config.yaml" in files) == (rank == 0)
    assert ("checkpoints" in files) == (rank == 0)
    assert ("lora" in files) == (rank == 0)
    assert ("metrics.jsonl" in files) == (rank == 0)
    assert bool(evaluation) == (rank == 0)
    assert bool(capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize(
    ("settings", "content", "sentence"),
    [
        ({"seed": 5}, {}, "rank 1 has seed=5, and rank 0 has 0: give all machines the same command and files"),
        ({}, {"prompts": "others"}, "the content of prompts of rank 1 is not that of rank 0"),
        ({"output_dir": "elsewhere", "device": "cuda:1"}, {}, None),
        ({"memory": MemoryConfig(embedding_cache_dir="/scratch/node1")}, {}, None),
    ],
)
def test_processes_have_the_same_settings_and_prompts(tmp_path, monkeypatch, settings, content, sentence):
    def other(value):
        has_settings = isinstance(value, tuple) and isinstance(value[0], FlowGRPOConfig)
        return (value[0].model_copy(update=settings), {**value[1], **content}) if has_settings else value

    monkeypatch.setattr("flow_grpo.training.setup.Processes.from_environment", lambda device: small.Two(other))
    with pytest.raises(FlowGRPOError, match=sentence) if sentence else nullcontext():
        made(tmp_path / "run", steps=1)


def test_a_long_run_says_after_its_first_step_how_long_it_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flow_grpo.tracking.tracker.LONG", 0.0)
    small.trainer(short_run(tmp_path, "steps=2", "evaluation.prompts=null")).train()
    seconds = read_metrics(tmp_path)[0]["time/step"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"step 1 took {duration(seconds)}, rewards included. At this speed the next " in said


@pytest.mark.parametrize("objective", ["grpo", "awm", "nft", "ppo", "sft"])
def test_steps_and_evaluations_leave_no_tensors_as_garbage(tmp_path, objective):
    """On a GPU they would take memory until Python collects it: embeddings of new prompts, and held-out images."""
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, f"objective={{name: {objective}}}", "microbatch=4"))
    trainer.training_step()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        trainer.training_step()
        trainer.evaluate()
        gc.collect()
        assert not [type(found) for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
