"""Teachers: saved LoRAs that a policy is held near, and `distill`, which learns from them alone."""

import pytest
import torch
from support import small_policy as small

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy

ROWS = torch.arange(6)


def saved(folder, seed=3, rank=3, targets=("to_k", "to_v"), by=0.5):
    """A LoRA of another rank and of other layers than the trained one; the policy that it makes of the base model."""
    teacher = small.policy(lora=False)
    teacher.add_lora(rank, 2.0, list(targets), seed=seed)
    small.move(teacher, by, seed=seed)
    teacher.save(folder)
    return teacher


def anchor(folder, **more):
    return {"to": "teacher", "lora": str(folder), "weight": 1.0, **more}


def run(folder, *anchors, **changes):
    objective = {"name": "distill", "anchors": list(anchors), "shared_noise": False}
    return small.settings(
        **{
            "objective": objective,
            "rewards": {"jpeg_size": 1},
            "prompts": None,
            "output_dir": str(folder),
            "optimizer": {"lr": 2e-2},
            **changes,
        }
    )


def velocity(policy: Policy, guidance=None):
    """Of six rows of the prompts, by a call of its own."""
    model = policy.with_guidance(guidance)
    schedule, shape = model.schedule(4)
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.velocity(x, schedule.timesteps[1], model.encode(small.PROMPTS.prompts), ROWS)


@pytest.mark.parametrize("guidance", [None, 4.0])
def test_a_teacher_is_the_base_model_with_its_lora_and_stays_so(tmp_path, guidance):
    alone = saved(tmp_path / "teacher")
    args = run(tmp_path / "run", anchor(tmp_path / "teacher", **({"guidance": guidance} if guidance else {})), steps=2)
    trainer = small.trainer(args, train_dataset=small.PROMPTS)
    [adapter] = [named.adapter for named in args.objective.named_anchors]
    before = velocity(trainer.policy)
    trainer.train()
    with trainer.policy.lora.use(adapter):
        torch.testing.assert_close(velocity(trainer.policy, guidance), velocity(alone, guidance), rtol=1e-5, atol=1e-6)
    assert not torch.equal(velocity(trainer.policy), before)


def test_distillation_reaches_the_teacher_and_trains_on_no_reward(tmp_path):
    alone = saved(tmp_path / "teacher", targets=("to_q", "to_out.0"), by=0.3)
    trainer = small.trainer(
        run(tmp_path / "run", anchor(tmp_path / "teacher"), steps=12, optimizer={"lr": 0.05}, lora={"rank": 3, "alpha": 3}),
        train_dataset=small.PROMPTS,
    )
    apart = (velocity(trainer.policy) - velocity(alone)).square().mean()
    rows = [trainer.training_step() for _ in range(12)]
    assert (velocity(trainer.policy) - velocity(alone)).square().mean() < 0.2 * apart
    assert all(row["loss"] == pytest.approx(row["kl/teacher"], rel=1e-5) for row in rows)
    assert set(trainer.policy.adapter_state()) == set(trainer.policy.trainable_parameters()), "a checkpoint has no teacher"


def test_each_teacher_teaches_its_own_prompts(tmp_path):
    for name, words in {"cats": "a cat\nthe cat\none cat\nmy cat", "dogs": "a dog\nthe dog\none dog\nthat dog"}.items():
        (tmp_path / f"{name}.txt").write_text(words)
        saved(tmp_path / name, seed=len(words))
    sets = [{"file": str(tmp_path / "cats.txt")}, {"file": str(tmp_path / "dogs.txt")}]
    both = [anchor(tmp_path / name, prompts=name) for name in ("cats", "dogs")]
    for own in (both, both[:1]):
        trainer = small.trainer(run(tmp_path / f"run{len(own)}", *own, prompts=sets, prompts_per_step=4))
        steps = (small.collect(trainer, step) for step in range(20))
        experience = next(one for one in steps if len({"cat" in prompt for prompt in one.batch.prompts}) == 2)
        conditioning = trainer.policy.encode(experience.batch.prompts)
        terms = small.forward_process_loss(trainer.policy, trainer.args, experience, conditioning, 0)
        rows = torch.arange(len(experience.batch.prompts))
        [loss] = terms.losses(rows, torch.ones(len(rows), dtype=torch.bool))
        is_cat = torch.tensor(["cat" in prompt for prompt in experience.batch.prompts])
        assert loss.metrics["kl/teacher"][is_cat].min() > 0
        assert not loss.metrics["kl/teacher"][~is_cat].any()
        if own == both:
            assert loss.metrics["kl/teacher_2"][~is_cat].min() > 0
            assert not loss.metrics["kl/teacher_2"][is_cat].any()
        expected = sum(loss.metrics[named.metric] for named in trainer.args.objective.named_anchors)
        torch.testing.assert_close(loss.value.detach(), expected)


def test_a_run_does_not_go_on_with_another_teacher(tmp_path):
    saved(tmp_path / "teacher")
    args = run(tmp_path / "run", anchor(tmp_path / "teacher"), steps=1)
    small.trainer(args, train_dataset=small.PROMPTS).train()
    saved(tmp_path / "teacher", seed=4)
    more = args.model_copy(update={"steps": 2})
    with pytest.raises(FlowGRPOError, match=r"objective\.anchors"):
        small.trainer(more, train_dataset=small.PROMPTS).train(resume=True)


REFUSED = {
    "no teacher": ({"name": "distill", "anchors": []}, {}, "learns from its anchors"),
    "no LoRA": ({"anchors": [{"to": "teacher", "weight": 1}]}, {}, "needs lora, for example edits.safetensors"),
    "a LoRA of the base": (
        {"anchors": [{"to": "base", "lora": "a", "weight": 1}]},
        {},
        "does not use lora; one to teacher does",
    ),
    "a set of none": (
        {"anchors": [anchor("a", prompts="edits")]},
        {},
        "no prompt set edits for a teacher. `prompts` is one set",
    ),
    "another set": (
        {"anchors": [anchor("a", prompts="edit")]},
        {"prompts": [{"file": "edits.txt"}]},
        "no prompt set edit for a teacher. Did you mean edits?",
    ),
    "an advantage": ({"name": "distill", "advantage": "rloo", "anchors": [anchor("a")]}, {}, "it trains by its anchors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_teacher_can_teach_is_refused_in_one_sentence(case):
    objective, changes, words = REFUSED[case]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        small.settings(objective=objective, rewards={"jpeg_size": 1}, **changes)
    assert words in str(error.value)


@pytest.mark.parametrize("found", ["nothing", "a damaged file", "a whole transformer"])
def test_a_teacher_that_cannot_be_loaded_is_named(tmp_path, found):
    folder = tmp_path / "teacher"
    if found == "a damaged file":
        saved(folder)
        [file] = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    elif found == "a whole transformer":
        full = small.policy(lora=False)
        full.enable_full_finetuning()
        full.save(folder)
    with pytest.raises(FlowGRPOError, match=r"teacher"):
        small.trainer(run(tmp_path / "run", anchor(folder)), train_dataset=small.PROMPTS)
