"""The doctor: each verdict flips at an illness planted into the real parts, and a healthy run has nothing wrong."""

import io
import json
import os
import signal

import pytest
import torch
from rich.console import Console
from support import broken_rewards as sick
from support.cli_process import begin, run
from support.embedded import CALL, short_run
from support.paths import SAMPLE_OBJECTIVES, SAMPLE_REWARDS
from support.sample_rewards import brightness, flat, nan, raises, rank

import rewards
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.data.prompts import load_prompts
from flow_grpo.doctor import result
from flow_grpo.doctor import rewards as reward_checkup
from flow_grpo.doctor import run as checkup
from flow_grpo.doctor import show as doctor
from flow_grpo.doctor.result import FINE, WARNING, WRONG, Verdict
from flow_grpo.doctor.reward_probe import look_at
from flow_grpo.evaluation.group_dependence import RewardInputs
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.tiny import pretrain, world
from flow_grpo.trainer import FlowGRPOTrainer
from rewards import WeightedSum

OFTEN_SEEN = [
    f'red text "{word}" on a blue background' for word in ("CAT", "HORSE", "FOX", "EMU", "OWL", "BEE", "ANT", "COW")
]
HELD_OUT = [prompt.replace("red", "white") for prompt in OFTEN_SEEN]


@pytest.fixture(scope="module")
def policy() -> Policy:
    """One for all tests here: each adds its updates, none asks for a fresh one."""
    return load_policy("tiny", "cpu", "fp32", **CALL)


@pytest.fixture
def trainer(policy, tmp_path):
    """A short run by that policy, with settings of its own."""

    def built(*overrides: str, train: list[str] | None = None, held_out: list[str] | None = None, **more) -> FlowGRPOTrainer:
        args = short_run(tmp_path / "run", "evaluation.limit=8", *overrides)
        return FlowGRPOTrainer(policy, more.get("reward"), args, train or OFTEN_SEEN, held_out or HELD_OUT)

    return built


@pytest.fixture(scope="module")
def signs() -> RewardInputs:
    """Two signs for each of four prompts: its own, and that of the prompt before."""
    colors = (("red", "blue"), ("white", "black"), ("blue", "white"), ("black", "red"))
    prompts = [f'{ink} text "CAT" on a {ground} background' for ink, ground in colors for _ in range(2)]
    images = pretrain.pictures([world.parse(prompt) for prompt in prompts]) / 2 + 0.5
    images[1::2] = images[::2].roll(1, 0)
    return RewardInputs(images, prompts, {})


def levels(found: list[Verdict]) -> dict[str, str]:
    return {verdict.check: verdict.level for verdict in found}


# -- a whole look -----------------------------------------------------------------------------------------------------


def test_a_healthy_run_has_nothing_wrong_and_nothing_is_written(tmp_path):
    settings = [
        "prompts_per_step=6", "microbatch=12", "updates=2", "sampling.steps=6", "sampling.window={kind: fixed, size: 2}",
        "evaluation={prompts: prompts/signs_eval.txt, limit: 8, steps: 4}", f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    sections = list(checkup.examine(FlowGRPOConfig.from_yaml("tiny_grpo", settings)))
    assert [title for title, _ in sections] == ["machine", "prompts", "rewards", "groups", "an update", "what it takes"]
    found = {verdict.check: verdict for _, part in sections for verdict in part}
    assert not [verdict for verdict in found.values() if verdict.level == WRONG]
    assert result.conclusion(found.values()).startswith("Nothing is wrong")
    for check in ("ratio before the first update", "gradient against Adam's eps", "made by the trained steps", "clip range",
                  "another micro-batch", "the longest prompt's end", "ocr: reads the prompt", "ocr: scored twice",
                  "ocr: other images of a prompt", "ocr: side effects", "color: side effects"):  # fmt: skip
        assert found[check].level == FINE, found[check]
    assert "clip: side effects" not in found, "of one that is not trained on, only what is wrong is said"
    assert {check for check in found if check.startswith("step ")} == {"step 0 at sigma 1.00", "step 1 at sigma 0.92"}
    assert not (tmp_path / "run").exists()


def test_stages_of_given_images_final_latents_and_a_critic_are_looked_at_without_what_they_lack(tmp_path, signs):
    save_grid(tmp_path / "signs.png", signs.images, [ImageInfo(prompt, 0, "") for prompt in signs.prompts], columns=2)
    stages = [
        {"steps": 1, "objective": {"name": "sft", "data": str(tmp_path / "signs.png")}, "sampling": {"transition": "ode"}},
        {"steps": 1, "objective": {"name": "awm"}, "sampling": {"transition": "ode"}},
        {"steps": 1, "objective": {"name": "ppo"}},
    ]
    sections = dict(checkup.examine(short_run(tmp_path / "run", f"stages={json.dumps(stages)}")))
    assert not [verdict for found in sections.values() for verdict in found if verdict.level == WRONG]
    first, second, third = "stage 1, sft", "stage 2, awm", "stage 3, ppo"
    assert [title for title in sections if title.startswith("rewards")] == ["rewards"], "they are the same in all stages"
    assert f"groups of {first}" not in sections
    checks = {title: levels(found) for title, found in sections.items()}
    assert "made by the trained steps" not in checks[f"groups of {second}"]
    assert "made by the trained steps" in checks[f"groups of {third}"]
    assert "groups without signal" not in checks[f"groups of {third}"], "a critic needs no other image"
    assert "clip range" in checks[f"an update of {third}"]
    assert not [check for check in checks[f"an update of {second}"] if check.startswith(("clip", "step"))]
    assert {"a step of stage 1", "a step of stage 3", "the run"} <= checks["what it takes"].keys()


# -- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "check", "level"),
    [
        (flat, "values", WRONG),
        (nan, "values", WRONG),
        (sick.dark, "values", FINE),
        (sick.random, "scored twice", WRONG),
        (sick.shaky, "scored twice", WARNING),
        (brightness, "scored twice", FINE),
        (brightness, "reads the prompt", WARNING),
        (sick.random, "reads the prompt", WARNING),
        (rewards.load("color"), "reads the prompt", FINE),
        (sick.length, "within a group", WRONG),
        (brightness, "within a group", FINE),
        (rank, "other images of a prompt", WARNING),
        (brightness, "other images of a prompt", FINE),
        (sick.inverts, "side effects", WRONG),
        (sick.doubles, "side effects", WARNING),
        (sick.with_gradient, "side effects", WARNING),
        (brightness, "side effects", FINE),
    ],
)
def test_what_is_ill_about_a_reward(signs, reward, check, level):
    torch.manual_seed(0)  # for the rewards that are chance
    look = look_at(getattr(reward, "__name__", "r"), reward, signs)
    assert levels(reward_checkup.judge_trained("r", look, 2, False, []))[f"r: {check}"] == level


def test_a_reward_among_others(signs):
    """One that says nothing may stand beside one that does, and one that ignores the prompt beside one that reads it."""
    color, bright, still = (look_at("r", one, signs) for one in (rewards.load("color"), brightness, flat))
    assert levels(reward_checkup.judge_trained("r", still, 2, False, [color]))["r: values"] == WARNING
    assert levels(reward_checkup.judge_trained("r", still, 2, False, [still]))["r: values"] == WRONG
    assert levels(reward_checkup.judge_trained("r", bright, 2, False, [color]))["r: reads the prompt"] == FINE


@pytest.mark.parametrize("reward", [raises, nan])
def test_a_broken_reward_ends_the_look_with_its_name(policy, tmp_path, reward):
    name = f"{SAMPLE_REWARDS}:{reward.__name__}"
    sections = dict(checkup.examine(short_run(tmp_path, f"rewards={{{name}: 1}}")))
    assert list(sections)[-1] == "rewards"
    (broken,) = [verdict for verdict in sections["rewards"] if verdict.level == WRONG]
    assert broken.check == f"{reward.__name__}: values"
    if reward is raises:
        assert "the camera is off" in broken.says


def test_a_reward_of_evaluations_alone_is_called_once_and_not_billed_to_the_rollout(signs):
    calls = {"trained": 0, "watched": 0}

    def counted(name: str):
        def reward(images, prompts):
            calls[name] += 1
            return images.mean((1, 2, 3))

        return reward

    sums = WeightedSum({name: counted(name) for name in calls}, {"trained": 1.0, "watched": 0.0})
    looks, found = reward_checkup.scores(sums, ["trained"], signs, 2, drawing=0.0)
    assert calls == {"trained": 10, "watched": 1}, "four times all or some, a group twice, and its four images alone"
    assert torch.equal(looks["watched"].values, looks["trained"].values)
    says = {verdict.check: verdict.says for verdict in found}
    assert says["trained: a picture"].startswith("100% of a rollout")
    assert "rollout" not in says["watched: a picture"]


def test_a_person_is_not_asked(trainer):
    def human(images, prompts):
        raise AssertionError("somebody was asked")

    built = trainer(reward=human)
    checkup.ask_nobody(built)
    drawn = checkup.draw(built, built.source)
    looks, (row,) = checkup.scores(built, drawn)
    assert (looks, row.check, row.number) == ({}, "human: values", "not asked")
    assert checkup.can_score(built, looks)
    assert list(levels(checkup.groups(built, built.source, drawn))) == ["another micro-batch"]
    assert checkup.update(built)[0] is not None


def test_a_rollout_that_fails_has_a_verdict(tmp_path):
    """Where the trained steps are chosen by what a reward says, it fails before anybody looks at it."""
    name = f"{SAMPLE_REWARDS}:raises"
    window = "sampling.window={kind: auto, size: 2}"
    sections = dict(checkup.examine(short_run(tmp_path, f"rewards={{{name}: 1}}", window)))
    (failed,) = sections["groups"]
    assert (failed.check, failed.level) == ("a rollout", WRONG)
    assert "the camera is off" in failed.says


# -- prompts, groups, updates -------------------------------------------------------------------------------------------


def test_prompts_that_come_twice_leak_are_few_or_cut_off(trainer):
    healthy = levels(checkup.prompts(trainer("steps=2")))
    assert set(healthy.values()) == {FINE}
    twice = levels(checkup.prompts(trainer(train=[*OFTEN_SEEN, OFTEN_SEEN[0].upper()])))
    assert twice["prompts that come twice"] == WARNING
    leaks = [levels(checkup.prompts(trainer(held_out=[*HELD_OUT[n:], *OFTEN_SEEN[:n]]))) for n in (1, 4)]
    assert [found["held-out prompts trained on"] for found in leaks] == [WARNING, WRONG]
    bench = levels(checkup.prompts(trainer(train=[*OFTEN_SEEN, "a photo of a bench"])))
    assert bench["test sets trained on"] == WARNING
    assert bench["held-out prompts trained on"] == FINE
    assert levels(checkup.prompts(trainer("steps=2000")))["training prompts"] == WARNING
    assert levels(checkup.prompts(trainer(held_out=HELD_OUT[:7])))["held-out prompts"] == WARNING
    long = 'red text "CAT" on a blue background' + " and on a red one" * 20
    assert levels(checkup.prompts(trainer(train=[*OFTEN_SEEN, long])))["the longest prompt's end"] == WARNING


def in_groups(trainer: FlowGRPOTrainer) -> dict[str, str]:
    drawn = checkup.draw(trainer, trainer.stage.source)
    return levels(checkup.groups(trainer, trainer.stage.source, drawn))


def test_noise_that_changes_nothing_or_destroys_the_pictures(trainer):
    hardly = in_groups(trainer("sampling.noise_level=0.01"))
    assert hardly["made by the trained steps"] == WRONG
    assert hardly["reward with and without noise"] == FINE
    settings = ["rewards={ocr: 1}", "sampling.steps=6", "prompts_per_step=4", "microbatch=16"]
    much = in_groups(trainer(*settings, "sampling={transition: dance_sde, noise_level: 3.0}"))
    assert much["reward with and without noise"] == WRONG
    right = in_groups(trainer(*settings, "sampling={transition: cps, noise_level: 0.5, window: {kind: fixed, size: 3}}"))
    assert right["made by the trained steps"] == right["reward with and without noise"] == FINE


def test_a_group_of_two_and_groups_without_signal(trainer):
    two = in_groups(trainer("images_per_prompt=2", "microbatch=4"))
    assert two["images of a prompt"] == WARNING
    assert in_groups(trainer(reward=flat))["groups without signal"] == WRONG


def test_one_reward_that_drowns_another(trainer):
    own = str(SAMPLE_REWARDS)
    drowned = trainer(f"rewards={{'{own}:brightness': 100.0, sharpness: 0.01}}")
    assert in_groups(drowned)["shares of the advantage"] == WARNING


def after_an_update(trainer: FlowGRPOTrainer) -> dict[str, str]:
    return levels(checkup.update(trainer)[1])


def test_adams_eps_and_clip_ranges(trainer):
    two = "updates=2"
    ill = after_an_update(trainer(two, "optimizer.eps=1.0e-3", "objective={clip_low: 1.0e-9, clip_high: 1.0e-9}"))
    assert ill["gradient against Adam's eps"] == WRONG
    assert ill["clip range"] == WRONG
    wide = after_an_update(trainer(two, "objective={clip_low: 10, clip_high: 10}"))
    assert wide["clip range"] == WARNING
    assert wide["gradient against Adam's eps"] == wide["ratio before the first update"] == FINE
    assert after_an_update(trainer("objective={clip_low: 1.0e-9, clip_high: 1.0e-9}"))["clip range"] == FINE, "it never acts"


def test_a_late_step_that_drowns_the_early_ones(trainer):
    assert after_an_update(trainer())["the furthest step"] == WARNING
    assert after_an_update(trainer("objective.step_weight=std"))["the furthest step"] == FINE
    assert after_an_update(trainer("sampling.window={kind: all, last: 1}"))["the furthest step"] == FINE


def test_a_step_that_fails_says_why(policy, trainer):
    linear = policy.pipe.transformer.proj_out
    policy.pipe.transformer.proj_out = torch.nn.Sequential(linear, torch.nn.Dropout(0.5).train())
    try:
        metrics, (failed,) = checkup.update(trainer())
    finally:
        policy.pipe.transformer.proj_out = linear
    assert metrics is None
    assert failed.level == WRONG
    assert "deviates from 1" in failed.says


def test_memory_that_runs_out_says_what_to_set(trainer, monkeypatch):
    def collect(step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    built = trainer()
    monkeypatch.setattr(built.source, "collect", collect)
    metrics, (failed,) = checkup.update(built)
    assert metrics is None
    assert failed.level == WRONG
    assert "a smaller microbatch" in failed.says


def test_memory_that_runs_out_in_an_evaluation_is_a_verdict_too(tmp_path, monkeypatch):
    def draw(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def stage(trainer, looks, steps, title):
        steps.append({"time/step": 1.0})
        yield from ()

    monkeypatch.setattr(checkup, "stage", stage)
    monkeypatch.setattr(checkup.evaluate, "draw", draw)
    title, (failed,) = list(checkup.examine(short_run(tmp_path / "run")))[-1]
    assert (title, failed.check, failed.level) == ("what it takes", "an evaluation", WRONG)


def test_an_objective_of_ones_own_moves_ratios_as_any_other(trainer):
    own = f"{SAMPLE_OBJECTIVES}:sigmoid"
    found = after_an_update(trainer(f"objective={{name: '{own}'}}"))
    assert WRONG not in found.values()
    assert len([check for check in found if check.startswith("step ")]) == 3


def test_no_signal_no_update(trainer):
    _, found = checkup.update(trainer(reward=flat))
    assert levels(found)["gradient against Adam's eps"] == WRONG


# -- numbers alone ----------------------------------------------------------------------------------------------------

NORM = {f"blocks.{i}.to_q.lora_A.weight": 1e-3 for i in range(10)}
SOLVED = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.2, 1.0]])


@pytest.mark.parametrize(
    ("verdict", "level"),
    [
        (result.device("cpu", "bf16", 1e10, 1e12, False), WARNING),
        (result.device("cpu", "fp32", 1e12, 1e12, True), WARNING),
        (result.device("cuda", "bf16", 9e14, 5e13, True), FINE),
        (result.threads(1, 16, 8), WARNING),
        (result.threads(8, 16, 8), FINE),
        (result.threads(16, 16, 8), FINE),
        (result.threads(2, 2, 8), FINE),
        (result.threads(15, 16, None), WARNING),
        (reward_checkup.values("r", torch.tensor([1.0] * 19 + [0.0]), False, WRONG), WARNING),
        (reward_checkup.values("r", torch.tensor([0.0] * 19 + [1.0]), False, WRONG), WARNING),
        (reward_checkup.values("r", torch.tensor([0.0, 0.5, 1.0]), False, WRONG), FINE),
        (reward_checkup.values("r", torch.tensor([0.0, 0.5, torch.nan]), True, WRONG), WARNING),
        (reward_checkup.values("r", torch.tensor([torch.nan] * 3), True, WRONG), WRONG),
        (reward_checkup.latency("r", 2.0, 0.8), WARNING),
        (reward_checkup.latency("r", 2.0, 0.3), FINE),
        (result.signal(torch.tensor([False, False, True]), SOLVED), WARNING),
        (result.signal(torch.tensor([False, True, True]), SOLVED), FINE),
        (result.batch_free(0.2, 1e-3), WARNING),
        (result.batch_free(1e-5, 1e-3), FINE),
        (result.ratio(1e-6), WRONG),
        (result.ratio(0.0), FINE),
        (result.gradient(NORM, 1000, 1e-15, 1.0, overflow=True), WARNING),
        (result.clip_range(torch.zeros(8), 1e-3, 1e-3, 2), WARNING),
        (result.reach(dict.fromkeys(NORM, 0.0), whole=False), WRONG),
        (result.reach({**NORM, **dict.fromkeys(list(NORM)[:3], 0.0)}, whole=False), WARNING),
        (result.reach({**NORM, **dict.fromkeys(list(NORM)[:3], 0.0)}, whole=True), WARNING),
        (result.reach({**NORM, "blocks.9.to_q.lora_A.weight": 0.0}, whole=False), FINE),
        (result.step_time("a step", {"reward": 1.0, "update": 9.0, "step": 10.0}, 2.0), WARNING),
        (result.step_time("a step", {"reward": 9.0, "update": 1.0, "step": 10.0}, 2.0), FINE),
        (result.memory(15.5e9, 16e9, None, alone=True), WARNING),
        (result.memory(2e9, 16e9, 1e9, alone=False), FINE),
        (result.disk(2e9, 1e9), WRONG),
        (result.disk(1e8, 1e9), FINE),
        (result.run_folder("runs/x", begun=True), WARNING),
        (result.run_folder("runs/x", begun=False), FINE),
    ],
)
def test_numbers_and_their_verdicts(verdict, level):
    assert verdict.level == level
    assert level == FINE or verdict.says.endswith("."), "what is not fine says what to do"


def test_silent_groups_are_told_apart():
    silent = torch.tensor([False, False, True])
    assert "solved" in result.signal(silent, SOLVED).says
    assert "hopeless" in result.signal(silent, 1.2 - SOLVED).says
    rounded = torch.full((3, 16), 0.9)
    rounded[2, 0] = 0.1
    assert rounded[0].mean() != rounded.max(), "a mean of equal numbers is off by rounding"
    assert "solved" in result.signal(silent, rounded).says


def test_advice_fits_what_it_is_given_for():
    assert "near 0" not in result.clip_range(torch.zeros(8), 1e-3, 1e-3, 2).says
    lora, weights = (result.reach(dict.fromkeys(NORM, 0.0), whole) for whole in (False, True))
    assert (lora.check, weights.check) == ("LoRA parameters with gradient", "weights with gradient")
    assert "lora.targets" in lora.says
    assert "lora" not in weights.says.partition(": ")[2]
    often, few = result.enough(10, 2, 1000), result.enough(10, 8, 2)
    assert often.level == few.level == WARNING
    assert "by heart" in often.says
    assert "by heart" not in few.says


# -- what is seen -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    """A table of 80 columns, verdicts in a file, the exit status of something wrong, and no word more after Ctrl-C."""
    reward = f"{SAMPLE_REWARDS}:nan"
    args = short_run(tmp_path / "run", f"rewards={{{reward}: 1}}")
    (tmp_path / "short.yaml").write_text(args.to_yaml())
    lines = run("doctor", "short.yaml", "--json", "look/found.json", cwd=tmp_path, code=1).splitlines()
    table, (sentence, file) = lines[:-2], lines[-2:]
    assert all(len(line) <= 80 for line in table)
    assert any("WRONG: are not finite" in line for line in table)
    content = json.loads((tmp_path / "look/found.json").read_text())
    assert content["conclusion"] == sentence
    assert "mend that before you train" in sentence
    wrong = [row["check"] for row in content["verdicts"] if row["level"] == WRONG]
    assert wrong == ["nan: values"]
    assert file == "verdicts: look/found.json"
    assert {path.name for path in tmp_path.iterdir()} == {"short.yaml", "look"}

    (tmp_path / "long.yaml").write_text(short_run(tmp_path / "run").to_yaml())  # nothing ends this look early
    command = begin("doctor", "long.yaml", cwd=tmp_path)
    command.wait_for(lambda: command.output.startswith("tiny, grpo"))
    os.kill(command.process.pid, signal.SIGINT)
    command.finish(130)


def test_what_was_found_is_kept_and_no_text_of_others_reaches_the_terminal_as_it_is(tmp_path, monkeypatch):
    """A look that ends by an error, of a run whose names and sentences hold escape sequences and markup."""
    evil = "\x1b[7m[b]x[/c]"

    def sections(args):
        yield f"groups of {evil}", [Verdict(evil, evil, WRONG, f"{evil}.")]
        raise ValueError("the camera is off")

    monkeypatch.setattr(checkup, "examine", sections)
    shown, file = io.StringIO(), tmp_path / "found.json"
    args = short_run(tmp_path).model_copy(update={"model": evil})
    with pytest.raises(ValueError, match="the camera is off"):
        doctor.examine(Console(file=shown, width=300), args, file)
    assert "\x1b" not in shown.getvalue()
    assert shown.getvalue().count(r"\x1b[7m[b]x[/c]") == 5
    content = json.loads(file.read_text())
    assert [verdict["level"] for verdict in content["verdicts"]] == [WRONG]
    assert content["conclusion"] == "The look was not finished."


def test_prompts_that_are_not_all_asked_for_are_counted():
    assert result.enough(5000, 8, 2).says == "the run takes 16 of them once"
    assert result.enough(16, 8, 2).says == "each comes up 1.0 times in the run"
    assert "up 0" not in "".join(result.enough(count, 2, steps).says for count in range(4, 60) for steps in range(1, 60))


def test_the_shipped_prompts_are_clean():
    train, held_out = (load_prompts(f"prompts/signs_{name}.txt").prompts for name in ("train", "eval"))
    assert result.repeated(train).level == result.leaked(train, held_out).level == FINE
