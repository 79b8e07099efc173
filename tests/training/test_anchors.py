"""Anchors against direct computation in float64: references, KLs, and what a resumed run has of them."""

import pytest
import torch
from support import small_policy as small
from support.run_contents import MEASURED

from flow_grpo import sde
from flow_grpo.config.anchor_config import decay_at
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.report import page
from flow_grpo.run_folder import checkpoint
from flow_grpo.tracking import tracker as tracking
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.anchors import References, add_references, copied_references
from flow_grpo.training.losses import ClipRange

ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7], [0.3, 4.0, -6.0]])
ROWS = torch.tensor([4, 0, 5, 1])
REAL = torch.ones(len(ROWS), dtype=torch.bool)
BASE, EMA = {"to": "base", "weight": 0.5}, {"to": "ema", "weight": 2.0, "decay": 0.3}
GUIDED = {"to": "guided", "weight": 0.7, "guidance": 4.5}


def collected(steps=True, name=None, seed=1, **objective):
    """A policy that has moved since it drew the images, with copies that are others again; its settings, images and loss."""
    policy, window = small.policy(), [0, 1] if steps else []
    of_steps = {"name": "reinforce", "transition": "flow_sde"}
    own = {**(of_steps if steps else {"name": "sft"}), **({"name": name} if name else {}), **objective}
    args = small.settings(objective=own, rewards={"jpeg_size": 1, "sharpness": 0})
    for number, adapter in enumerate(copied_references(args.objective)):
        policy.lora.add_adapter_copy(adapter)
        small.move(policy, 0.3, seed=10 + number, adapter=adapter)
    experience = small.experience(policy, args, ADVANTAGE, window)
    small.move(policy, 0.2, seed=seed)
    conditioning = policy.encode(experience.batch.prompts)
    if steps:
        return policy, args, experience, small.step_loss(policy, args, experience, conditioning, ClipRange())
    return policy, args, experience, small.forward_process_loss(policy, args, experience, conditioning, 0)


def place(experience, terms, k, steps):
    """State and timestep of all rows at a trained step or noise level."""
    if steps:
        return experience.trajectory.x[:, k], experience.trajectory.schedule.timesteps[experience.trajectory.steps[k]]
    level = terms.noise_levels[k]
    column = level.sigma.view(-1, 1, 1, 1)
    return (1 - column) * experience.trajectory.final + column * level.eps, level.timestep


def velocities(policy, experience, terms, k, steps):
    """Of the policy, with its gradient, and of each reference, float64, by calls of its own."""
    x, timestep = place(experience, terms, k, steps)
    rows, conditioning = torch.arange(len(x)), policy.encode(experience.batch.prompts)

    def of(model, prompts):
        return model.velocity(x, timestep, prompts, rows).double()

    seen = {"now": of(policy, conditioning)}
    with torch.no_grad():
        with policy.base_model():
            seen["base"] = of(policy, conditioning)
            own = small.policy(lora=False, guidance=4.5)
            seen["guided"] = of(own, own.encode(experience.batch.prompts))
        for name in (one for one in ("ema",) if f"anchor_{one}" in policy.lora.adapters):
            with policy.lora.use(f"anchor_{name}"):
                seen[name] = of(policy, conditioning)
    return seen


def apart(one, other):
    return (one - other).square().flatten(1).mean(1)


def gradient(policy, value):
    parameters = list(policy.trainable_parameters().values())
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])


# -- KLs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "kl"), [(True, None), (True, "k3"), (True, "flow_grpo"), (True, "velocity"), (False, None)]
)
def test_one_anchor_to_the_base_model_is_kl_weight_to_the_last_bit(steps, kl):
    *_, short = collected(steps, kl=kl, kl_weight=0.5)
    *_, anchored = collected(steps, anchors=[BASE], kl=kl)
    for one, other in zip(short.losses(ROWS, REAL), anchored.losses(ROWS, REAL), strict=True):
        assert torch.equal(one.value, other.value)
        assert torch.equal(one.metrics["kl"], other.metrics["kl/base"])
        assert one.metrics["kl"].min() > 0


@pytest.mark.parametrize("steps", [True, False])
def test_several_anchors_add_up_and_each_reports_its_own(steps):
    policy, _, experience, terms = collected(steps, anchors=[BASE, EMA, GUIDED], kl_weight=0.1, kl="velocity")
    *_, plain = collected(steps)
    for k, (loss, without) in enumerate(zip(terms.losses(ROWS, REAL), plain.losses(ROWS, REAL), strict=True)):
        seen = velocities(policy, experience, terms, k, steps)
        kls = {name: apart(seen["now"], seen[name])[ROWS] for name in ("base", "ema", "guided")}
        expected = 0.6 * kls["base"] + 2 * kls["ema"] + 0.7 * kls["guided"]
        torch.testing.assert_close((loss.value - without.value).double(), expected, rtol=1e-3, atol=1e-5)
        for name, distance in {"": kls["base"], **kls}.items():
            metric = loss.metrics[f"kl/{name}" if name else "kl"]
            torch.testing.assert_close(metric.double(), distance.detach(), rtol=1e-3, atol=1e-7)
        assert len({round(float(distance[0]), 6) for distance in kls.values()}) == 3, "they are three references"
        ours = gradient(policy, loss.value[1]) - gradient(plain.policy, without.value[1])
        torch.testing.assert_close(ours, gradient(policy, expected[1]), rtol=1e-3, atol=1e-4 * float(ours.abs().max()))


def test_the_kl_to_a_copy_is_of_the_transitions_on_steps():
    policy, _, experience, terms = collected(anchors=[EMA], kl="gaussian")
    for k, loss in enumerate(terms.losses(ROWS, REAL)):
        seen = velocities(policy, experience, terms, k, True)
        sigma, after = (s.double() for s in experience.trajectory.schedule.sigmas[k : k + 2])
        x, top = experience.trajectory.x[:, k].double(), float(experience.trajectory.schedule.sigmas[1])
        (mean, std), (other, _) = (
            sde.transition("flow_sde", x, seen[name], sigma, after, 0.8, top) for name in ("now", "ema")
        )
        expected = apart(mean, other) / (2 * float(std) ** 2)
        torch.testing.assert_close(loss.metrics["kl/ema"].double(), expected.detach()[ROWS], rtol=1e-3, atol=1e-9)


def test_anchors_to_one_reference_share_its_velocity_and_have_metrics_of_their_own(monkeypatch):
    anchors = [BASE, {**BASE, "weight": 1.5}, EMA, {**EMA, "decay": 0.9}, {**EMA, "weight": 9}]
    policy, args, _, terms = collected(False, name="dpo", anchors=anchors)
    named = args.objective.named_anchors
    assert [anchor.metric for anchor in named] == ["kl/base", "kl/base_2", "kl/ema", "kl/ema_2", "kl/ema_3"]
    assert [anchor.reference for anchor in named] == ["base", "base", "ema", "ema_2", "ema"]
    assert args.objective.references == ["base", "ema", "ema_2"]
    calls, velocity = [], policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda *given: calls.append(1) or velocity(*given))
    [loss] = terms.losses(ROWS, REAL)
    assert len(calls) == 4, "the policy, the base model for dpo, two anchors, and two averages"
    assert torch.equal(loss.metrics["kl/base"], loss.metrics["kl/base_2"])
    assert torch.equal(loss.metrics["kl/ema"], loss.metrics["kl/ema_3"])
    assert not torch.equal(loss.metrics["kl/ema"], loss.metrics["kl/ema_2"])


def test_the_base_model_is_evaluated_where_an_anchor_or_the_objective_needs_it():
    assert small.settings().objective.references == []
    for objective in ({"kl_weight": 1.0}, {"anchors": [BASE]}):
        assert small.settings(objective=objective).objective.references == ["base"]
    for name, references in {"sft": [], "dpo": ["base"], "dgpo": ["base"]}.items():
        assert small.settings(objective={"name": name}).objective.references == references


def test_the_guided_reference_extrapolates_from_the_empty_prompt():
    policy = small.policy()
    x = torch.randn(2, *small.SHAPE, generator=torch.Generator().manual_seed(3))
    t, rows = torch.tensor(700.0), torch.arange(2)
    prompts = small.PROMPTS.prompts[:2]
    with torch.no_grad(), policy.base_model():
        with_prompt, without = (policy.velocity(x, t, policy.encode(p), rows) for p in (prompts, ["", ""]))
        model = policy.with_guidance(4.5)
        velocity = model.velocity(x, t, model.encode(prompts), rows)
    torch.testing.assert_close(velocity, without + 4.5 * (with_prompt - without))
    assert policy.with_guidance(4.5) is model
    assert all(parameter.requires_grad for parameter in policy.trainable_parameters().values())


def test_the_guided_references_prompts_are_encoded_once_for_all_rows_and_noise_levels(monkeypatch):
    *_, terms = collected(False, anchors=[GUIDED, {**GUIDED, "guidance": 2.0}], num_noise_levels=3)
    encoded, encode = [], FlowPipeline.encode
    monkeypatch.setattr(FlowPipeline, "encode", lambda self, prompts: encoded.append(self.guidance) or encode(self, prompts))
    for rows in (ROWS, ROWS - 1):
        assert len(list(terms.losses(rows % 6, REAL))) == 3
    assert sorted(encoded) == [2.0, 4.5]


def test_a_pipeline_without_guidance_has_no_guided_reference(monkeypatch):
    policy = small.policy(lora=False)
    monkeypatch.setattr("flow_grpo.policy.loading.FlowPipeline.velocity", lambda self, x, *given: x)
    with pytest.raises(ValueError, match=r"StableDiffusion3Pipeline has no guidance.*set to: base"):
        add_references(policy, [small.settings(objective={"anchors": [GUIDED]}).objective])


# -- copies -----------------------------------------------------------------------------------------------------------


def flat(policy, adapter="default"):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters(adapter).values()]).clone()


def test_an_average_may_begin_at_the_policy_and_slow_down():
    policy = small.policy()
    ramp = {"to": "ema", "weight": 1.0, "decay": {"rate": 0.2, "max": 0.5}}
    objective = small.settings(objective={"anchors": [ramp, {**ramp, "weight": 3.0}]}).objective
    assert list(copied_references(objective)) == ["anchor_ema"], "equal ramps share an average"
    policy.lora.add_adapter_copy("anchor_ema")
    references, expected = References(policy, objective, start=10), flat(policy)
    for step, decay in zip(range(10, 14), (0.2, 0.4, 0.5, 0.5), strict=True):
        small.move(policy, seed=step)
        references.update(step)
        expected = expected.lerp(flat(policy), 1 - decay)
        torch.testing.assert_close(flat(policy, "anchor_ema"), expected)


def test_the_awm_preset_has_both_published_references_in_their_published_proportion():
    """beta 0.003, ema_beta 1 and a decay of min(0.001 step, 0.3), with advantages divided by 5, which ours are not."""
    objective = FlowGRPOConfig.from_yaml("sd35_medium_ocr_awm").objective
    anchors = [anchor.config for anchor in objective.named_anchors]
    published = {"base": 0.003, "ema": 1.0}
    assert {anchor.to: anchor.weight / 5 for anchor in anchors} == pytest.approx(published)
    (ema,) = [anchor for anchor in anchors if anchor.to == "ema"]
    assert [decay_at(ema.decay, step) for step in (1, 100, 300, 2000)] == pytest.approx([0.001, 0.1, 0.3, 0.3])


def bright(images, prompts):
    return images.mean((1, 2, 3))


def red(images, prompts):
    return images[:, 0].mean((1, 2))


ANCHORED = {
    "name": "grpo",
    "anchors": [
        EMA,
        BASE,
    ],
}


def trainer(folder, monkeypatch, processes=None):
    monkeypatch.setattr(page, "write", lambda folders, out: out)
    monkeypatch.setattr(tracking, "plot_curves", lambda folder: None)
    rewards = {f"{__file__}:bright": 1.0, f"{__file__}:red": 0.0}
    optimizer = {"lr": 0.02, "eps": 0.005}
    args = small.settings(
        output_dir=str(folder),
        steps=4,
        save_every=1,
        keep_checkpoints=9,
        objective=ANCHORED,
        rewards=rewards,
        optimizer=optimizer,
    )
    return FlowGRPOTrainer(small.policy(), None, args, small.PROMPTS, None)


def test_a_resumed_run_has_the_copies_that_it_had(tmp_path, monkeypatch):
    whole = trainer(tmp_path / "run", monkeypatch)
    whole.train()
    rows = [row for row in read_metrics(tmp_path / "run") if "kl/ema" in row]
    assert [row["kl/ema"] > 1e-8 for row in rows] == [False, True, True, True], "it is the policy at first"
    state = checkpoint.read(tmp_path / "run" / "checkpoints", 4)
    assert set(state["copies"]) == {"anchor_ema"}
    for later in (3, 4):
        for file in (tmp_path / "run" / "checkpoints" / f"step_{later:06d}").iterdir():
            file.write_bytes(b"")
    again = trainer(tmp_path / "run", monkeypatch)
    again.train(resume=True)
    resumed = [row for row in read_metrics(tmp_path / "run") if "kl/ema" in row]
    for one, other in zip(rows, resumed, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(MEASURED)} == {
            k: v for k, v in other.items() if not k.startswith(MEASURED)
        }
    for name in ("default", *state["copies"]):
        assert torch.equal(flat(whole.policy, name), flat(again.policy, name))


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "decay without ema": ({"anchors": [{**BASE, "decay": 0.3}]}, {}, "to base does not use decay; one to ema does"),
    "guidance without guided": ({"anchors": [{**EMA, "guidance": 3}]}, {}, "to ema does not use guidance; one to guided"),
    "ema without decay": ({"anchors": [{"to": "ema", "weight": 1}]}, {}, "to ema needs decay, for example 0.3"),
    "guided without a scale": ({"anchors": [{"to": "guided", "weight": 1}]}, {}, "to guided needs guidance"),
    "no such reference": ({"anchors": [{"to": "bas", "weight": 1}]}, {}, "objective.anchors.to is 'bas'"),
    "no such setting": ({"anchors": [{**BASE, "wait": 1}]}, {}, "there is no setting objective.anchors.wait"),
    "a KL of steps": (
        {"name": "awm", "kl": "k3", "anchors": [BASE]},
        {},
        "objective.kl=k3 needs trained",
    ),
    "no g": ({"kl": "flow_grpo", "anchors": [BASE]}, {}, "flow_grpo divides by the g"),
    "a copy of all weights": ({"anchors": [EMA]}, {"lora": None}, "ema is a second LoRA, and lora=null has none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_in_a_clear_error(case):
    objective, changes, words = REFUSED[case]
    changes = {"rewards": {"jpeg_size": 1}, **changes}
    if "lora" in changes:
        changes["lora"] = None
    with pytest.raises(ValueError) as error:  # noqa: PT011
        small.settings(objective=objective, **changes)
    assert words in str(error.value).replace("\n", " ")


def test_an_anchor_gives_images_without_signal_a_loss():
    plain = small.settings()
    assert not plain.trains_on_zero_std_groups
    for objective in ({"anchors": [EMA]}, {"kl_weight": 1.0}):
        assert small.settings(objective=objective).trains_on_zero_std_groups
