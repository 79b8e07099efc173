"""What the classes of objectives and the rows of advantages and transitions say of each function is so, and new ones are found."""

import contextlib
import importlib
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.embedded import short_run
from support.method_names import ON_FINAL_LATENTS
from support.run_contents import MEASURED

from flow_grpo import advantages, sde
from flow_grpo.advantages import ADVANTAGES
from flow_grpo.config.objective_by_name import OBJECTIVES, section_type
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.sde import TRANSITIONS
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.types import GradientState, NoisedImage, TrainedStep


def rows(stepwise: bool, old: bool = True, reference: bool = True, name: str = "") -> Any:
    """Four rows that a policy has moved on, with velocities that want a gradient."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if stepwise:
        log_prob = (0.1 * draw(4)).requires_grad_()
        mean = draw(4, 3).requires_grad_()
        return TrainedStep(log_prob, 0.1 * draw(4), mean, draw(4, 3), torch.full((4, 1), 0.3), torch.tensor(-0.1))
    if name in OBJECTIVES and OBJECTIVES[name].needs.reward_gradient:
        return GradientState(draw(4, 3).requires_grad_(), draw(4, 3), -0.2, draw(4, 3), draw(4, 3), draw(4, 3))
    sigma, v = torch.rand(4, generator=generator), draw(4, 3).requires_grad_()
    x0, eps, v_rollout, v_old, v_ref = (draw(4, 3) for _ in range(5))
    return NoisedImage(x0, eps, sigma, v, v_rollout, v_old if old else None, v_ref if reference else None)


def value(name: str, given: TrainedStep | NoisedImage, advantage: torch.Tensor) -> torch.Tensor:
    wanted = {"clip_low": 0.5, "clip_high": 0.5, "beta": 0.1}
    kind = OBJECTIVES[name]
    config: Any = kind(name=name, **{key: one for key, one in wanted.items() if key in kind.model_fields})
    if kind.needs.group_mean:
        given = replace(given, group_mean=config.group_statistic(given, advantage).detach().mean().expand(4))
    return config.loss(given, advantage).value


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_has_a_loss_of_each_row(name):
    assert value(name, rows(OBJECTIVES[name].stepwise, name=name), torch.ones(4)).shape == (4,)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_without_an_advantage_have_no_gradient_where_the_table_says_so(name):
    kind = OBJECTIVES[name]
    given = rows(kind.stepwise, name=name)
    loss = value(name, given, torch.zeros(4))
    grads = torch.autograd.grad(loss.sum(), given.log_prob if kind.stepwise else given.v, allow_unused=True)[0]
    silent = not loss.any() and (grads is None or not grads.any())
    # advantages, weights of moves, teachers
    gives_its_own = kind.needs.critic or kind.needs.moves == "if_better" or kind.needs.anchors
    assert silent == (kind.needs.zero_at_zero_advantage or gives_its_own)


@pytest.mark.parametrize("name", ON_FINAL_LATENTS)
def test_rows_without_an_advantage_have_no_gradient_at_a_ratio_of_1_where_the_table_says_so(name):
    needs, given = OBJECTIVES[name].needs, rows(False)
    loss = value(name, replace(given, v_rollout=given.v.detach()), torch.zeros(4))
    silent = not loss.any() and not torch.autograd.grad(loss.sum(), given.v)[0].any()
    assert silent == (needs.zero_at_zero_advantage or needs.zero_at_ratio_1 or needs.anchors)


@pytest.mark.parametrize(
    ("name", "updates", "trains"),
    [("awm", 2, False), ("pepg", 1, False), ("pepg", 2, True), ("crd", 1, True), ("dgpo", 2, False)],
)
def test_groups_without_signal_are_trained_on_where_their_loss_is_not_0(name, updates, trains):
    args = FlowGRPOConfig.from_yaml("compare/pepg", [f"objective={{name: {name}}}", f"updates={updates}"])
    assert args.trains_on_zero_std_groups == trains


@pytest.mark.parametrize("name", ON_FINAL_LATENTS)
def test_an_objective_needs_the_mean_of_a_group_where_it_says_so(name):
    given, needs = rows(False), OBJECTIVES[name].needs
    kind: Any = section_type(name)(name=name)
    with pytest.raises(AssertionError) if needs.group_mean else contextlib.nullcontext():
        kind.loss(given, torch.ones(4))


@pytest.mark.parametrize("name", ON_FINAL_LATENTS)
def test_an_objective_needs_the_velocities_that_its_row_names(name):
    needs = OBJECTIVES[name].needs
    for missing, needed in (("old", needs.old_policy), ("reference", needs.reference)):
        given = rows(False, **{missing: False})
        if needed:
            with pytest.raises(AssertionError):
                value(name, given, torch.ones(4))
        else:
            assert torch.equal(value(name, given, torch.ones(4)), value(name, rows(False), torch.ones(4)))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_of_equal_rewards_has_advantages_where_the_batch_is_compared(name):
    advantage = advantages.group_advantages(torch.tensor([1.0, 1.0, 0.0, 3.0]), torch.tensor([0, 0, 1, 1]), name)
    assert bool(advantage[:2].any()) == ADVANTAGES[name].over_batch


@pytest.mark.parametrize("name", ADVANTAGES)
def test_several_rewards_are_taken_one_by_one_or_as_their_sum(name):
    reward, group = torch.tensor([[1.0, 0.0], [2.0, 9.0], [4.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0, 0, 0])
    of_both, of_sum = (advantages.group_advantages(one, group, name) for one in (reward, reward.sum(1)))
    assert torch.allclose(of_both, of_sum) != ADVANTAGES[name].each_reward


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_has_noise_where_the_table_says_so(name):
    row, x = TRANSITIONS[name], torch.randn(2, 3)
    assert bool(sde.transition(name, x, x, 0.6, 0.5, 0.7)[1].any()) == row.stochastic
    assert bool(sde.transition(name, x, x, 0.2, 0.0, 0.7)[1].any()) == row.noise_at_end
    most = min(row.max_noise_level, 9.0)
    sde.transition(name, x, x, 0.6, 0.5, most)
    if row.max_noise_level < 9:
        with pytest.raises(ValueError, match="out of range"):
            sde.transition(name, x, x, 0.6, 0.5, most + 0.01)


# -- settings that the method does not read -------------------------------------------------------------------------------------

UNREAD = {
    "objective.threshold=2": "threshold; dppo does",
    "objective.beta=2": "beta; nft, crd, dgpo and dpo do",
    "objective.step_weight=std": "step_weight; grpo, reinforce, dppo, ppo and your own function do",
    "objective.options={a: 1}": "options; your own function does",
    "objective.family=stepwise": "family; your own function does",
    **{
        setting: f"{setting.split('.')[1].partition('=')[0]}; grpo, reinforce, grpo_guard, dppo, ppo and your own function do"
        for setting in (
            "objective.window.size=2",
            "objective.noise_level=0.1",
            "objective.shared_initial_noise=true",
            "objective.keep_graphs=true",
        )
    },
}


@pytest.mark.parametrize("setting", UNREAD)
def test_a_setting_that_the_objective_does_not_read_is_refused(setting):
    with pytest.raises(ValueError, match=re.escape(f"objective awm does not use {UNREAD[setting]}") + ": remove it"):
        FlowGRPOConfig.from_yaml("tiny_ocr", [setting])


@pytest.mark.parametrize("name", ["sft", "dpo", "ppo"])
def test_an_advantage_is_refused_where_the_objective_has_none(name):
    overrides = [f"objective.name={name}", "objective.advantage=rloo"]
    with pytest.raises(ValueError, match=f"objective {name} does not use advantage: it"):
        FlowGRPOConfig.from_yaml("tiny_ocr", overrides)
    assert OBJECTIVES[name].needs.takes_advantage is False
    inherited = FlowGRPOConfig.from_yaml("tiny_ocr", overrides[:1]).objective
    assert inherited.advantage == "grpo", "that of the file, for its own objective, is left out"


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("forward_process", {"step_weight": "std"}),
        ("stepwise", {"num_noise_levels": 2}),
        ("stepwise", {"shared_noise": False}),
    ],
)
def test_an_own_function_has_the_settings_of_its_family(family, setting):
    for other in ("stepwise", "forward_process"):
        own = {"name": "file.py:loss", "family": other, **setting}
        if other == family:
            with pytest.raises(ValueError, match=f"does not use {next(iter(setting))}"):
                FlowGRPOConfig(prompts="signs", objective=own)
        else:
            assert FlowGRPOConfig(prompts="signs", objective=own).objective.stepwise == (other == "stepwise")


@pytest.mark.parametrize("config", ["tiny_grpo", "tiny_ocr"])
def test_every_objective_takes_the_solvers_of_one_velocity_a_step(config):
    for solver in ("euler", "dpm_2m"):
        assert FlowGRPOConfig.from_yaml(config, [f"sampling.solver={solver}"]).sampling.solver == solver


@pytest.mark.parametrize(
    "setting", ["objective.num_noise_levels=2", "objective.sigma_range=[0, 0.8]", "objective.loss_weight=ghuber"]
)
def test_what_final_latents_need_is_refused_on_steps(setting):
    with pytest.raises(ValueError, match="objective grpo does not use"):
        FlowGRPOConfig.from_yaml("tiny_grpo", [setting])
    FlowGRPOConfig.from_yaml("tiny_ocr", [setting])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("file", ["tiny_ocr", "tiny_grpo"])
def test_an_override_may_choose_any_objective_over_a_file_of_another(name, file):
    """The file's settings that the objective does not read are left out, in whatever order the overrides come."""
    pairs = [f"objective.name={name}"]
    if OBJECTIVES[name].stepwise:
        pairs += ["objective.transition=cps", "objective.noise_level=0.5"]
    if "clip_low" in OBJECTIVES[name].model_fields:
        pairs.append("objective.clip_low=0.5")
    if name == "ppo":
        pairs.append("objective.advantage=grpo")
    configs = [FlowGRPOConfig.from_yaml(file, given) for given in (pairs, pairs[::-1])]
    assert configs[0] == configs[1]
    assert configs[0].objective.name == name
    assert type(configs[0].objective).model_fields.keys() == section_type(name).model_fields.keys()


def test_a_stage_leaves_out_what_its_objective_does_not_read_and_may_not_set_it():
    stages = "stages=[{{steps: 1, objective: {{name: nft{}}}}}, {{steps: 1}}]"
    (_, first), (_, second) = FlowGRPOConfig.from_yaml("tiny_grpo", [stages.format("")]).resolved_stages()
    assert not hasattr(first.objective, "clip_low")
    assert not hasattr(first.objective, "noise_level")
    assert (second.objective.clip_low, second.objective.noise_level) == (1e-3, 0.7)
    with pytest.raises(ValueError, match="stage 1: objective nft does not use threshold; dppo does"):
        FlowGRPOConfig.from_yaml("tiny_grpo", [stages.format(", threshold: 2")])


def test_a_custom_function_has_options_and_an_error_names_settings_it_never_gets():
    args = FlowGRPOConfig(objective={"name": "a.py:f", "options": {"x": 1}, "step_weight": "std"})
    assert args.objective.options == {"x": 1}
    with pytest.raises(ValueError, match=r"objective a\.py:f does not use clip_low; grpo, grpo_guard, ppo and awm do"):
        FlowGRPOConfig(objective={"name": "a.py:f", "clip_low": 0.1})


# -- a new method ---------------------------------------------------------------------------------------------------------------


NEW = """
from typing import ClassVar, Literal

from flow_grpo import advantages, objectives, sde
from flow_grpo.config.objective import Needs
from flow_grpo.config.stepwise_objectives import Stepwise


def loss(step, advantage, threshold):
    return objectives.dppo(step, advantage, threshold)


class New(Stepwise):
    name: Literal["new"] = "new"
    threshold: float = 1e-5
    needs: ClassVar[Needs] = Needs(ratio=True, zero_at_zero_advantage=True)

    def loss(self, step, advantage, observed_clip=0.0):
        return loss(step, advantage, self.threshold)


def transition(x, v, sigma, sigma_next, noise_level, sigma_max):
    return sde.cps(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=sigma_max)


def advantage(reward, group, size):
    return advantages.rloo(reward, group, size)


advantages.ADVANTAGES["new"] = advantages.AdvantageMethod(advantage)
sde.TRANSITIONS["new"] = sde.Transition(transition, max_noise_level=1.0)
"""


def test_a_new_method_is_a_function_and_a_class_or_row(tmp_path, monkeypatch):
    """A module adds one of each: an objective, an advantage, a transition. A run has the numbers of the functions that they call."""
    for table in (OBJECTIVES, ADVANTAGES, TRANSITIONS):
        monkeypatch.setitem(table, "new", None)  # removed again after the test
    (tmp_path / "new_methods.py").write_text(NEW)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("new_methods")
    calls = []
    for names in (("new", "new", "new"), ("dppo", "rloo", "cps")):
        settings = [
            f"objective={{name: {names[0]}, advantage: {names[1]}, transition: {names[2]}, noise_level: 0.8, threshold: 1.0e-3}}",
            "sampling={steps: 4}",
        ]
        metrics = FlowGRPOTrainer(args=short_run(tmp_path / names[0], *settings)).training_step()
        calls.append({name: number for name, number in metrics.items() if not name.startswith(MEASURED)})
    assert calls[0] == calls[1]
    assert calls[0]["grad_norm"] > 0
