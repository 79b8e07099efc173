"""Anchors against direct computation in float64: references, KLs, gates, the norm guard, and what a resumed run has of them."""

import math

import pytest
import torch
from support import small_policy as small
from support.run_contents import MEASURED

from flow_grpo import advantages, objectives, sde
from flow_grpo.config.anchors import decay_at
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.report import page
from flow_grpo.rewards import WeightedSum
from flow_grpo.run_folder import checkpoint
from flow_grpo.tracking import tracker as tracking
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.anchors import AnchorCopies, add_references, copied_references
from flow_grpo.training.gates import DisagreementGate, advantage_gate, disagreement
from flow_grpo.training.step_loss import ClipRange

ADVANTAGE = torch.tensor([[1.0, -0.5, -0.7], [0.3, 4.0, -6.0]])
ROWS = torch.tensor([4, 0, 5, 1])
REAL = torch.ones(len(ROWS), dtype=torch.bool)
BASE, EMA = {"to": "base", "weight": 0.5}, {"to": "ema", "weight": 2.0, "decay": 0.3}
RESET, GUIDED = {"to": "reset", "weight": 3.0, "every": 2}, {"to": "guided", "weight": 0.7, "guidance": 4.5}


def collected(steps=True, name=None, seed=1, **objective):
    """A policy that has moved since it drew the images, with copies that are others again; its settings, images and loss."""
    policy, window = small.policy(), [0, 1] if steps else []
    own = {"name": name or ("reinforce" if steps else "sft"), **objective}
    args = small.settings(
        sampling={"transition": "flow_sde" if steps else "ode"}, objective=own, rewards={"jpeg_size": 1, "sharpness": 0}
    )
    for number, adapter in enumerate(copied_references(args.objective)):
        policy.lora.add_adapter_copy(adapter)
        small.move(policy, 0.3, seed=10 + number, adapter=adapter)
    experience = small.experience(policy, args, ADVANTAGE, window)
    small.move(policy, 0.2, seed=seed)
    conditioning = policy.encode(experience.batch.prompts)
    if steps:
        return policy, args, experience, small.step_loss(policy, args, experience, conditioning, ClipRange(0.9))
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
        for name in (one for one in ("ema", "reset") if f"anchor_{one}" in policy.lora.adapters):
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
    *_, anchored = collected(steps, anchors=[{**BASE, "kl": kl}])
    for one, other in zip(short.losses(ROWS, REAL), anchored.losses(ROWS, REAL), strict=True):
        assert torch.equal(one.value, other.value)
        assert torch.equal(one.metrics["kl"], other.metrics["kl/base"])
        assert one.metrics["kl"].min() > 0


@pytest.mark.parametrize("steps", [True, False])
def test_several_anchors_add_up_and_each_reports_its_own(steps):
    anchors = [{**one, "kl": "velocity"} for one in (BASE, EMA, RESET, GUIDED)]
    policy, _, experience, terms = collected(steps, anchors=anchors, kl_weight=0.1, kl="velocity")
    *_, plain = collected(steps)
    for k, (loss, without) in enumerate(zip(terms.losses(ROWS, REAL), plain.losses(ROWS, REAL), strict=True)):
        seen = velocities(policy, experience, terms, k, steps)
        kls = {name: apart(seen["now"], seen[name])[ROWS] for name in ("base", "ema", "reset", "guided")}
        expected = 0.6 * kls["base"] + 2 * kls["ema"] + 3 * kls["reset"] + 0.7 * kls["guided"]
        torch.testing.assert_close((loss.value - without.value).double(), expected, rtol=1e-3, atol=1e-5)
        for name, distance in {"": kls["base"], **kls}.items():
            metric = loss.metrics[f"kl/{name}" if name else "kl"]
            torch.testing.assert_close(metric.double(), distance.detach(), rtol=1e-3, atol=1e-7)
        assert len({round(float(distance[0]), 6) for distance in kls.values()}) == 4, "they are four references"
        ours = gradient(policy, loss.value[1]) - gradient(plain.policy, without.value[1])
        torch.testing.assert_close(ours, gradient(policy, expected[1]), rtol=1e-3, atol=1e-4 * float(ours.abs().max()))


def test_the_kl_to_a_copy_is_of_the_transitions_on_steps():
    policy, _, experience, terms = collected(anchors=[{**EMA, "kl": "gaussian"}])
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
    policy, args, _, terms = collected(False, name="dpo", anchors=anchors, norm_guard=1.0)
    named = args.objective.named_anchors
    assert [anchor.metric for anchor in named] == ["kl/base", "kl/base_2", "kl/ema", "kl/ema_2", "kl/ema_3"]
    assert [anchor.reference for anchor in named] == ["base", "base", "ema", "ema_2", "ema"]
    assert args.objective.references == ["base", "ema", "ema_2"]
    calls, velocity = [], policy.velocity
    monkeypatch.setattr(policy, "velocity", lambda *given: calls.append(1) or velocity(*given))
    [loss] = terms.losses(ROWS, REAL)
    assert len(calls) == 4, "the policy, the base model for dpo, two anchors and the guard, and two averages"
    assert torch.equal(loss.metrics["kl/base"], loss.metrics["kl/base_2"])
    assert torch.equal(loss.metrics["kl/ema"], loss.metrics["kl/ema_3"])
    assert not torch.equal(loss.metrics["kl/ema"], loss.metrics["kl/ema_2"])


def test_the_base_model_is_evaluated_where_an_anchor_the_objective_or_the_norm_guard_needs_it():
    assert small.settings().objective.references == []
    for objective in ({"kl_weight": 1.0}, {"anchors": [BASE]}, {"norm_guard": 1.0}):
        assert small.settings(objective=objective).objective.references == ["base"]
    for name, references in {"sft": [], "dpo": ["base"], "dgpo": ["base"]}.items():
        assert small.settings(sampling=ODE, objective={"name": name}).objective.references == references


def test_the_guided_reference_extrapolates_from_the_empty_prompt():
    policy = small.policy()
    x, t, rows = (
        torch.randn(2, *small.SHAPE, generator=torch.Generator().manual_seed(3)),
        torch.tensor(700.0),
        torch.arange(2),
    )
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
    monkeypatch.setattr("flow_grpo.policy.guidance.FlowPipeline.velocity", lambda self, x, *given: x)
    with pytest.raises(ValueError, match=r"StableDiffusion3Pipeline has no guidance.*set to: base"):
        add_references(policy, [small.settings(objective={"anchors": [GUIDED]}).objective])


# -- gates ------------------------------------------------------------------------------------------------------------


def test_the_advantage_gate_holds_good_images_and_leaves_1e_4_of_the_worst():
    advantage = torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, 9.0], dtype=torch.float64)
    m = 1e-4 / 0.1
    expected = torch.tensor([m + a * (1 - m) for a in (0, 0, 0.5, 0.75, 1, 1)], dtype=torch.float64)
    torch.testing.assert_close(advantage_gate(advantage, 0.1), expected, rtol=1e-12, atol=0)
    assert (advantage_gate(advantage, 1e-5) == 1).all()
    torch.testing.assert_close(advantage_gate(advantage / 2, 0.1, 2.5), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "goodness"), [("nft", 0.75), ("epg", 0.6)])
def test_the_advantage_gate_maps_advantages_as_its_objective_does(name, goodness):
    """An advantage of 1 is half of nft's advantage_max of 2; epg has none, so it is a fifth of 5."""
    own = {"advantage_max": 2.0} if name == "nft" else {}
    *_, terms = collected(False, name=name, anchors=[{**BASE, "gate": "advantage"}], **own)
    object.__setattr__(terms.anchors.experience, "advantage", torch.ones(6))
    m = 1e-4 / 0.5
    (anchor,) = terms.anchors.anchors
    weight = terms.anchors._weight(anchor.config, ROWS)
    torch.testing.assert_close(weight, torch.full((4,), 0.5 * (m + goodness * (1 - m))))


def test_gates_are_factors_of_the_weights_of_rows_and_not_of_what_is_reported():
    *_, gated = collected(anchors=[{**BASE, "gate": "advantage"}, {**EMA, "gate": "disagreement"}])
    object.__setattr__(gated.anchors.experience, "disagreement", torch.tensor([0.0, 3.0, 0.0, 0.0, 3.0, 0.0]))
    *_, free = collected(anchors=[BASE, EMA])
    *_, plain = collected()
    factor = advantage_gate(ADVANTAGE.flatten()[ROWS], 0.5)
    for one, other, bare in zip(*(terms.losses(ROWS, REAL) for terms in (gated, free, plain)), strict=True):
        held = torch.tensor([3.0, 0.0, 0.0, 3.0])
        expected = 0.5 * factor * other.metrics["kl/base"] + 2 * held * other.metrics["kl/ema"]
        torch.testing.assert_close(one.value - bare.value, expected, rtol=1e-3, atol=1e-5)
        assert torch.equal(one.metrics["kl/ema"], other.metrics["kl/ema"])


@pytest.mark.parametrize("weight", [0.5, 2e-4])
def test_the_worst_images_are_held_by_1e_4_whatever_the_weight_of_their_anchor(weight):
    *_, gated = collected(anchors=[{"to": "base", "weight": weight, "gate": "advantage"}])
    (anchor,) = gated.anchors.anchors
    found = gated.anchors._weight(anchor.config, torch.tensor([5, 4]))  # of advantages -6 and 4
    torch.testing.assert_close(found, torch.tensor([1e-4, 1e-4 + 0.9 * (weight - 1e-4)]))


def test_disagreement_is_the_rank_of_the_reward_less_the_mean_rank_of_the_others():
    reward = torch.tensor([0.9, 0.1, 0.5, 0.5])  # ranks 4, 1, 2.5, 2.5
    others = torch.tensor([[1.0, 7.0], [2.0, 5.0], [3.0, math.nan], [4.0, 6.0]])  # ranks 1..4, and 3, 1, none, 2
    expected = torch.tensor([4 - (1 + 3) / 2, 1 - (2 + 1) / 2, 2.5 - 3, 2.5 - (4 + 2) / 2]) / 4
    torch.testing.assert_close(disagreement(reward, others), expected)
    assert disagreement(reward, others).argmax() == 0, "the one that the trained reward alone likes"


def test_the_disagreement_gate_holds_a_share_that_follows_the_last_20_steps():
    gate, reward = DisagreementGate(), torch.arange(40.0)
    others = torch.cat([reward[20:], reward[:20]])[:, None]  # the upper half of the rewards is the lower of the others
    opposite = gate.weights(reward, -reward[:, None])
    assert gate.share == 0.1
    assert opposite.nonzero()[:, 0].tolist() == [38, 39], "of the 20 images whose reward is not below the others"
    assert opposite.sum() == 40
    calm = gate.weights(reward, reward[:, None])
    assert gate.share == pytest.approx(0.09)
    assert calm.sum() == 0
    gate.weights(reward, others)
    assert gate.share == pytest.approx(0.09), "between those seen"
    again = DisagreementGate()
    again.load_state_dict(gate.state_dict())
    assert torch.equal(again.weights(reward, others), gate.weights(reward, others))
    for mean in range(1, 40):
        gate._adapt(mean)
    assert gate.share == 0.2
    assert gate.means == [float(m) for m in range(20, 40)]


# -- the norm guard ---------------------------------------------------------------------------------------------------


def test_the_norm_guard_is_the_squared_relative_excess_and_its_gradient_vanishes_below():
    generator = torch.Generator().manual_seed(0)
    v, v_ref = (torch.randn(3, 2, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    lengths = torch.tensor([0.5, 1.0, 1.2], dtype=torch.float64)
    v = v / v.flatten(1).norm(dim=1).view(-1, 1, 1) * (lengths * v_ref.flatten(1).norm(dim=1)).view(-1, 1, 1)
    v.requires_grad_(True)
    ratio = objectives.velocity_norm_ratio(v, v_ref)
    torch.testing.assert_close(ratio.double(), lengths, rtol=1e-6, atol=0)
    guard = objectives.norm_guard(ratio)
    torch.testing.assert_close(guard.double(), torch.tensor([0, 0, 0.04], dtype=torch.float64), rtol=1e-5, atol=1e-12)
    [slope] = torch.autograd.grad(guard.sum(), v)
    assert (slope[0] == 0).all()
    expected = 2 * 0.2 * v[2] / (v[2].norm() * v_ref[2].norm())
    torch.testing.assert_close(slope[2], expected.detach(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("steps", [True, False])
def test_the_norm_guard_adds_its_weight_and_reports_the_ratio(steps):
    policy, _, experience, terms = collected(steps, seed=3, norm_guard=5.0)
    *_, plain = collected(steps, seed=3)
    for k, (loss, without) in enumerate(zip(terms.losses(ROWS, REAL), plain.losses(ROWS, REAL), strict=True)):
        seen = velocities(policy, experience, terms, k, steps)
        ratio = (seen["now"].flatten(1).norm(dim=1) / seen["base"].flatten(1).norm(dim=1))[ROWS]
        torch.testing.assert_close(loss.metrics["velocity_norm/ratio"].double(), ratio.detach(), rtol=1e-4, atol=0)
        expected = 5 * (ratio - 1).clamp_min(0).square()
        assert expected.max() > 0
        torch.testing.assert_close((loss.value - without.value).double(), expected.detach(), rtol=1e-3, atol=1e-5)


# -- copies -----------------------------------------------------------------------------------------------------------


def flat(policy, adapter="default"):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters(adapter).values()]).clone()


def test_averages_follow_and_other_copies_are_renewed_when_old_or_far():
    anchors = [EMA, RESET, {"to": "reset", "weight": 1, "threshold": 0.5}]
    policy = small.policy()
    objective = small.settings(objective={"anchors": anchors}).objective
    names = list(copied_references(objective))
    assert names == ["anchor_ema", "anchor_reset", "anchor_reset_2"]
    for name in names:
        policy.lora.add_adapter_copy(name)
        small.move(policy, seed=5, adapter=name)
    copies = AnchorCopies(policy, objective, start=10)
    expected = dict.fromkeys(names, flat(policy))
    renewed = {"anchor_reset": [11, 13], "anchor_reset_2": [12]}
    for step, far in zip(range(10, 14), (0.5, math.nan, 0.6, 0.0), strict=True):
        assert all(torch.equal(flat(policy, name), value) for name, value in expected.items())
        small.move(policy, seed=step)
        copies.update(step, {"kl/ema": 9.0, "kl/reset": 9.0, "kl/reset_2": far})
        now = flat(policy)
        expected["anchor_ema"] = expected["anchor_ema"].lerp(now, 0.7)
        for name, steps in renewed.items():
            if step in steps:
                expected[name] = now
    assert all(torch.equal(flat(policy, name), value) for name, value in expected.items())
    assert copies.state_dict() == {"anchor_reset": 14, "anchor_reset_2": 13}
    again = AnchorCopies(policy, objective, start=0)
    again.load_state_dict({})
    assert again.state_dict() == {"anchor_reset": 0, "anchor_reset_2": 0}, "of a checkpoint without them"


def test_an_average_may_begin_at_the_policy_and_slow_down():
    policy = small.policy()
    ramp = {"to": "ema", "weight": 1.0, "decay": {"rate": 0.2, "max": 0.5}}
    objective = small.settings(objective={"anchors": [ramp, {**ramp, "weight": 3.0}]}).objective
    assert list(copied_references(objective)) == ["anchor_ema"], "equal ramps share an average"
    policy.lora.add_adapter_copy("anchor_ema")
    copies, expected = AnchorCopies(policy, objective, start=10), flat(policy)
    for step, decay in zip(range(10, 14), (0.2, 0.4, 0.5, 0.5), strict=True):
        small.move(policy, seed=step)
        copies.update(step, {})
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
        {**EMA, "gate": "disagreement"},
        {**RESET, "every": 3},
        {"to": "reset", "weight": 1, "threshold": 1e-4},
        {**BASE, "gate": "advantage"},
    ],
    "norm_guard": 1.0,
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


def test_a_resumed_run_has_the_copies_and_the_gate_that_it_had(tmp_path, monkeypatch):
    whole = trainer(tmp_path / "run", monkeypatch)
    whole.train()
    rows = [row for row in read_metrics(tmp_path / "run") if "kl/ema" in row]
    assert [row["kl/ema"] > 1e-8 for row in rows] == [False, True, True, True], "it is the policy at first"
    state = checkpoint.read(tmp_path / "run" / "checkpoints", 4)
    assert state["anchors"] == {"anchor_reset": 3, "anchor_reset_2": 4}
    assert set(state["copies"]) == {"anchor_ema", "anchor_reset", "anchor_reset_2"}
    assert len(state["memory"]["disagreement"]["means"]) == 4
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

ODE = {"transition": "ode"}
REFUSED = {
    "decay without ema": ({"anchors": [{**BASE, "decay": 0.3}]}, {}, "to base does not use decay; one to ema does"),
    "guidance without guided": ({"anchors": [{**EMA, "guidance": 3}]}, {}, "to ema does not use guidance; one to guided"),
    "threshold without reset": ({"anchors": [{**EMA, "threshold": 3}]}, {}, "to ema does not use threshold; one to reset"),
    "ema without decay": ({"anchors": [{"to": "ema", "weight": 1}]}, {}, "to ema needs decay, for example 0.3"),
    "reset without a rule": ({"anchors": [{"to": "reset", "weight": 1}]}, {}, "to reset needs every or threshold"),
    "guided without a scale": ({"anchors": [{"to": "guided", "weight": 1}]}, {}, "to guided needs guidance"),
    "no such reference": ({"anchors": [{"to": "bas", "weight": 1}]}, {}, "objective.anchors.to is 'bas'"),
    "no such setting": ({"anchors": [{**BASE, "wait": 1}]}, {}, "there is no setting objective.anchors.wait"),
    "a KL of steps": (
        {"name": "awm", "anchors": [{**BASE, "kl": "k3"}]},
        {"sampling": ODE},
        "objective.kl=k3 needs trained",
    ),
    "no g": ({"anchors": [{**BASE, "kl": "flow_grpo"}]}, {"sampling": {"transition": "cps"}}, "flow_grpo divides by the g"),
    "no log-probability": (
        {"anchors": [{**BASE, "kl": "k3"}]},
        {"sampling": {"log_prob": "unnormalized"}},
        "kl=k3 is an estimate",
    ),
    "a copy of all weights": ({"anchors": [EMA]}, {"lora": None}, "ema is a second LoRA, and lora=null has none"),
    "nothing to disagree with": ({"anchors": [{**BASE, "gate": "disagreement"}]}, {}, "with rewards of weight 0: add one"),
    "the critic's advantages": ({"name": "ppo", "anchors": [{**BASE, "gate": "advantage"}]}, {}, "one for each step"),
    "given images": (
        {"name": "sft", "dataset": "x.jsonl", "anchors": [{**BASE, "gate": "advantage"}]},
        {"sampling": ODE},
        "images from a dataset have none",
    ),
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
    for objective in ({"anchors": [EMA]}, {"norm_guard": 1.0}, {"kl_weight": 1.0}):
        assert small.settings(objective=objective).trains_on_zero_std_groups


# -- rewards and advantages within a group ----------------------------------------------------------------------------


def uneven(images, prompts):
    return images[:, 1].mean((1, 2))


@pytest.mark.parametrize("advantage", ["dr_grpo", "gdpo"])
def test_a_step_caps_rewards_and_weighs_advantages_by_the_diversity_reward(advantage):
    objective = {"advantage": advantage, "reward_cap": 0.6, "diversity_weight": "uneven"}
    args = small.settings(
        objective=objective, rewards={"bright": 1, "red": 2, "uneven": 0}, images_per_prompt=4, microbatch=8
    )
    rewards = WeightedSum({"bright": bright, "red": red, "uneven": uneven}, {"bright": 1.0, "red": 2.0, "uneven": 0.0})
    found = small.rollouts(small.policy(), args, [0, 1], rewards).collect(0)
    values, group = found.scores.by_name, found.batch.group
    both = torch.stack([values["bright"], values["red"]], 1)
    weights = torch.tensor([1.0, 2.0])
    given = both if advantage == "gdpo" else both @ weights
    capped = advantages.capped(given, group, 0.6)
    assert (capped < given).any()
    plain = advantages.group_advantages(capped, group, advantage, weights=weights)
    expected = advantages.diversity_weighted(plain, values["uneven"], group)
    assert not torch.equal(expected, plain)
    torch.testing.assert_close(found.advantage, expected, rtol=1e-4, atol=1e-7)


def test_a_function_keeps_the_name_that_the_diversity_weight_has_for_it(tmp_path):
    args = small.settings(
        objective={"diversity_weight": "uneven"},
        rewards={"bright": 1, "uneven": 0},
        images_per_prompt=4,
        microbatch=8,
        output=str(tmp_path),
    )
    recorded = small.trainer(args, reward_funcs=[bright, uneven], train_dataset=small.PROMPTS).args
    assert recorded.rewards["uneven"].weight == 0
    assert FlowGRPOConfig.model_validate(recorded.model_dump()).rewards == recorded.rewards, "its config can be read again"


def test_a_diversity_reward_of_the_users_own_file_is_named_as_in_the_config():
    advantages_by_name = []
    for name in ("uneven", "own.py:uneven"):
        args = small.settings(
            objective={"diversity_weight": name}, rewards={"bright": 1, name: 0}, images_per_prompt=4, microbatch=8
        )
        rewards = WeightedSum({"bright": bright, "uneven": uneven}, {"bright": 1.0, "uneven": 0.0}, names={name: "uneven"})
        advantages_by_name.append(small.rollouts(small.policy(), args, [0, 1], rewards).collect(0).advantage)
    assert advantages_by_name[0].any()
    assert torch.equal(*advantages_by_name)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"diversity_weight": "jpeg_size"}, "objective.diversity_weight=jpeg_size is none of the rewards of weight 0"),
        ({"anchors": [{**BASE, "gate": "disagreement"}]}, "compares the trained reward with rewards of weight 0"),
    ],
)
def test_rewards_of_weight_0_must_be_among_those_that_the_trainer_is_given(tmp_path, objective, words):
    args = small.settings(output=str(tmp_path / "run"), objective=objective, rewards={"bright": 1, "jpeg_size": 0})
    with pytest.raises(ValueError, match=words):
        FlowGRPOTrainer(small.policy(), bright, args, small.PROMPTS)


@pytest.mark.parametrize(
    ("objective", "changes", "words"),
    [
        ({"name": "ppo", "reward_cap": 0.75}, {}, "objective ppo does not use reward_cap: its critic makes the advantages"),
        (
            {"name": "sft", "diversity_weight": "sharpness"},
            {"sampling": ODE},
            "objective sft does not use diversity_weight: it trains on the best of a group",
        ),
        (
            {"name": "dpo", "anchors": [{**BASE, "gate": "advantage"}]},
            {"sampling": ODE},
            "gate=advantage needs advantages, and dpo trains on the best of a group, without them: set gate=none",
        ),
        ({"diversity_weight": "least_distance"}, {}, "add it by rewards.least_distance=0"),
        ({"diversity_weight": "jpeg_size"}, {}, "is no reward of weight 0"),
        (
            {"diversity_weight": "sharpness", "anchors": [{**BASE, "gate": "disagreement"}]},
            {"rewards": {"jpeg_size": 1, "sharpness": 0}},
            "compares the trained reward with rewards of weight 0",
        ),
    ],
)
def test_a_cap_and_a_diversity_weight_are_refused_where_nothing_reads_them(objective, changes, words):
    with pytest.raises(ValueError, match=words):
        small.settings(objective=objective, **{"rewards": {"jpeg_size": 1}, **changes})
