"""What `eval` measures: every kind of target, pairs, categories, and tables that hostile text can't break."""

import csv
import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console
import torch
from PIL import Image
from rich.console import Console
from scipy import stats
from support import cli_process
from support.embedded import short_run, stir, tiny_policy
from support.paths import SAMPLE_REWARDS
from support.sample_rewards import brighter, brightness, nan, sometimes_nan, spread

from flow_grpo import rewards, sampling
from flow_grpo.cli.evaluate import evaluate as eval_command
from flow_grpo.cli.options import read_prompt_source
from flow_grpo.cli.score import score as score_command
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, read_grid, save_grid, save_image
from flow_grpo.data.image_sets import ImageRecords
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.data.prompts import PromptSet
from flow_grpo.evaluation import generate, image_metrics, measure, scorecard, significance
from flow_grpo.evaluation.evaluator import save_before_after
from flow_grpo.evaluation.generate import evaluate, generate_images, image_seed
from flow_grpo.evaluation.hacking import DIVERSITY, HIGH_FREQUENCY_POWER
from flow_grpo.evaluation.image_metrics import BASE_DISTANCE
from flow_grpo.evaluation.scorecard import TargetResult, build_scorecard, by_prompt
from flow_grpo.evaluation.targets import ModelTarget, TargetOptions, reference, resolve_targets
from flow_grpo.image_prompt import images_of
from flow_grpo.policy.loading import load_policy
from flow_grpo.run_folder import checkpoint
from flow_grpo.run_folder.weights import load_trained_weights
from flow_grpo.text import FORMULA

SIGNS = ['red text "CAT" on a blue background', 'white text "STRAWBERRY" on a black background']
REWARDS = SAMPLE_REWARDS
KIT = rewards.WeightedSum({"brightness": brightness}, {"brightness": 1.0})
HOSTILE = '=1+1 | <script>alert(1)</script> `x` [a](b) "CAT" \x1b[31m\u202e'


def card_of(targets, rows=None, kit=KIT):
    measured = list(measure.measure(targets, rows, kit, total=False))
    return build_scorecard(measured, {t.name: reference(t, targets).name for t in targets[1:]})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder as training leaves it: config, a LoRA that does something, and that as a checkpoint; a second LoRA beside it."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    policy = tiny_policy()
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    for seed, name in ((1, "other"), (0, "lora")):
        stir(policy, seed)
        policy.lora.save(folder / name)
    checkpoint.save(folder / "checkpoints", 2, {"step": 2, "adapter": policy.adapter_state(), "ema": {}}, keep=1)
    (folder / "config.yaml").write_text(short_run(folder, "model=tiny").to_yaml())
    return folder


@pytest.fixture(scope="module")
def drawn(run):
    """Two seeds of two prompts by the run and by its parts, measured; a LoRA's config has other steps than its run's."""
    words = [run, run / "lora" / "pytorch_lora_weights.safetensors", run / "other", run / "checkpoints" / "step_000002"]
    targets = resolve_targets([str(word) for word in words], TargetOptions())
    fewer = targets[2].args.evaluation.model_copy(update={"steps": 1})
    targets[2] = replace(targets[2], args=targets[2].args.model_copy(update={"evaluation": fewer}))
    return targets, list(
        measure.measure(targets, measure.images_to_generate(PromptSet(SIGNS, [{}, {}]), 2), KIT, total=True)
    )


@pytest.fixture(scope="module")
def sheet(tmp_path_factory) -> Path:
    """What `sample` writes: two seeds of two prompts, as a sheet and alone."""
    folder = tmp_path_factory.mktemp("sheet") / "samples"
    rows = [(prompt, seed) for prompt in SIGNS for seed in (0, 1)]
    images = generate_images(tiny_policy(), [p for p, _ in rows], [s for _, s in rows], 1)
    cells = [ImageInfo(prompt, seed, "tiny") for prompt, seed in rows]
    save_grid(folder / "grid.png", images, cells, 2)
    for i, (image, cell) in enumerate(zip(images, cells, strict=True)):
        save_image(folder / f"{i}.png", image, cell)
    return folder


def test_a_grid_scores_as_its_single_images_do(sheet):
    names = ["ocr", "ocr_exact", "color"]
    kit = rewards.WeightedSum({name: rewards.load(name) for name in names}, dict.fromkeys(names, 0.0))
    grid, folder = measure.measure(
        resolve_targets([str(sheet / "grid.png"), str(sheet)], TargetOptions()), None, kit, total=False
    )
    assert grid.values == folder.values
    assert list(grid.values) == [*names, HIGH_FREQUENCY_POWER, DIVERSITY]
    assert len(set(grid.values["ocr"])) > 1
    for i, prompt in enumerate(grid.rows.prompts):
        alone = measure.score(
            ImageRecords(["0"], [prompt], [0], [{}]), lambda _, i=i: grid.rows.images([i]), kit, batch_size=1
        )
        assert [alone[name][0] for name in names] == [grid.values[name][i] for name in names]


def test_a_model_on_a_grids_prompts_and_seeds_is_the_grid(sheet):
    grid, model = resolve_targets(
        [str(sheet / "grid.png"), "tiny_ocr"], TargetOptions(overrides=["evaluation.steps=1", "dtype=fp32"])
    )
    card = card_of([grid, model], grid.image_set)
    change = card.changes["base"]["brightness"]
    assert abs(change.difference.mean) < 0.5 / 255, "but for the file's eight bits"
    assert card.pairing == {"base": "2 prompts, 4 pairs of one prompt and seed"}


def test_run_lora_and_checkpoint_are_one_and_the_base_is_none_of_them(drawn):
    targets, results = drawn
    assert [t.name for t in targets] == [
        "base",
        "run",
        "run/lora",
        "run/other",
        "run/step_000002",
    ]
    base, own, lora, other, state = results
    assert own.values == lora.values == state.values, "whatever was on the pipeline before, with the steps of the first"
    assert len({str(t.values["brightness"]) for t in (base, own, other)}) == 3
    assert BASE_DISTANCE not in base.values
    assert min(own.values[BASE_DISTANCE]) > 0
    assert all(t.values["reward"] == t.values["brightness"] for t in results)


def test_its_first_images_are_those_of_the_evaluation_in_training(run, drawn):
    policy = tiny_policy()
    policy.load_lora(run / "lora")
    expected = evaluate(policy, PromptSet(SIGNS, [{}, {}]), KIT, base=policy.base_model, steps=3, seed=1234, microbatch=8)
    assert drawn[1][1].values["brightness"][::2] == pytest.approx(expected.values["brightness"].tolist(), abs=1e-6)


def test_a_pair_reward_is_the_win_rate_over_the_base_model_and_a_group_reward_sees_a_prompts_images(run):
    """Of a LoRA and its base model, whose images of one prompt and seed are compared."""
    kit = rewards.WeightedSum({"brighter": brighter, "spread": spread}, {"brighter": 1.0, "spread": 1.0})
    targets = resolve_targets([str(run)], TargetOptions())
    rows = measure.images_to_generate(PromptSet(SIGNS, [{}, {}]), 3)
    base_values, values = (result.values for result in measure.measure(targets, rows, kit, total=True, steps=1))
    policy = tiny_policy()
    base = generate_images(policy, rows.prompts, rows.seeds, 1)
    load_trained_weights(policy, str(run / "lora"))
    trained = generate_images(policy, rows.prompts, rows.seeds, 1)
    chances = brighter(trained, base, rows.prompts)
    assert (chances - 0.5).abs().max() > 0.01
    assert values["brighter"] == pytest.approx(chances.tolist(), abs=1e-4)
    assert base_values["brighter"] == pytest.approx([0.5] * 6)
    for images, found in ((trained, values), (base, base_values)):
        expected = torch.cat([spread(group, [""] * 3) for group in images.split(3)])
        assert found["spread"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert found["reward"] == pytest.approx([a + b for a, b in zip(found["brighter"], found["spread"], strict=True)])


def test_images_alone_have_no_base_model_that_a_pair_reward_could_compare_them_with(sheet):
    kit = rewards.WeightedSum({"brighter": brighter}, {"brighter": 1.0})
    targets = resolve_targets([str(sheet / "grid.png")], TargetOptions())
    with pytest.raises(ValueError, match="brighter compares images of one prompt and seed with the base model's"):
        list(measure.measure(targets, None, kit, total=False))


def test_two_evaluation_seeds_share_no_noise(monkeypatch):
    used = []
    noise = sampling.noise
    monkeypatch.setattr(sampling, "noise", lambda shape, *name: used.append(noise(shape, *name)) or used[-1])
    monkeypatch.setattr(generate, "NUM_DIVERSITY_PROMPTS", 2)
    policy, prompts = tiny_policy(), PromptSet(SIGNS * 2, [{}] * 4)
    for seed in (1234, 1235):
        evaluate(policy, prompts, KIT, base=policy.base_model, steps=1, seed=seed, microbatch=8)
    assert len(used) == 2 * (4 + 2)
    for i, one in enumerate(used):
        assert not any(torch.equal(one, other) for other in used[i + 1 :])
    assert len({image_seed(seed, i, n) for seed in range(1000, 1100) for i in range(4) for n in range(3)}) == 100 * 4 * 3


def test_sample_draws_an_evaluations_image_again_by_the_seed_that_is_kept_of_it(tmp_path):
    policy, prompts = tiny_policy(), PromptSet(SIGNS, [{}, {}])
    evaluation = evaluate(policy, prompts, KIT, base=policy.base_model, steps=2, seed=1234, microbatch=8, num_kept_images=2)
    save_before_after(tmp_path, True, evaluation.images, prompts.prompts, "tiny")
    images, cells = read_grid(tmp_path / "before.png")
    words = [
        "sample",
        cells[1].prompt,
        "--first-seed",
        str(cells[1].seed),
        "--seeds",
        "1",
        "--steps",
        "2",
        "--config",
        "c.yaml",
    ]
    (tmp_path / "c.yaml").write_text(short_run(tmp_path, "model=tiny").to_yaml())
    cli_process.run(*words, cwd=tmp_path)
    again, (cell,) = read_grid(tmp_path / "samples" / "grid.png")
    assert cell.seed == cells[1].seed
    assert (again[0] - images[1]).abs().max() <= 1 / 255 + 1e-6, "but for rounding to the file's eight bits"


@pytest.mark.parametrize("after", [["HOT", "CAT"], ["HOT"], ["HOT", "DOG"]])
def test_before_and_after_stand_side_by_side_only_of_the_same_prompts(tmp_path, after):
    images = dict(enumerate(torch.rand(2, 3, 8, 8)))
    save_before_after(tmp_path, True, images, ["HOT", "DOG"], "tiny")
    save_before_after(tmp_path, False, images, after, "tiny")
    assert (tmp_path / "after.png").exists()
    assert (tmp_path / "before_after.png").exists() == (after == ["HOT", "DOG"])


def test_every_lora_is_compared_with_its_own_base(run, drawn):
    targets = [*drawn[0][:2], ModelTarget("b2", "", FlowGRPOConfig.from_yaml("tiny_ocr", ["width=96"])), drawn[0][3]]
    assert [reference(t, targets).name for t in targets[1:]] == ["base", "base", "base"]
    targets[1] = ModelTarget("other", "", targets[2].args, lora="x")
    assert reference(targets[1], targets).name == "b2"
    assert [t.name for t in resolve_targets(["tiny"], TargetOptions())] == ["base"]


@pytest.fixture
def base(tmp_path) -> Path:
    """A run folder of that name, with a LoRA that is never loaded."""
    (tmp_path / "base" / "lora").mkdir(parents=True)
    (tmp_path / "base" / "lora" / "a.safetensors").write_bytes(b"")
    (tmp_path / "base" / "config.yaml").write_text(short_run(tmp_path, "model=tiny").to_yaml())
    return tmp_path / "base"


def test_a_merged_export_is_called_as_its_run_was_and_a_checkpoint_is_found_from_anywhere(tmp_path, run, monkeypatch):
    for name in ("model_index.json", "flow_grpo.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.yaml").write_text(short_run(tmp_path, "model=tiny", "width=96").to_yaml())
    merged = resolve_targets([str(tmp_path)], TargetOptions())[0].args
    assert (merged.model, merged.width) == (str(tmp_path), 96)
    monkeypatch.chdir(run)
    assert resolve_targets(["checkpoints/step_000002"], TargetOptions())[1].checkpoint == run / "checkpoints" / "step_000002"


def test_names_differ_even_from_those_of_base_models(base):
    targets = resolve_targets([str(base)], TargetOptions())
    assert [(t.name, t.is_base) for t in targets] == [("base", True), ("base (2)", False)]
    wide = FlowGRPOConfig.from_yaml(base / "config.yaml", ["width=96"])
    (base.parent / "wide.yaml").write_text(wide.to_yaml())
    others = resolve_targets([str(base), str(base.parent / "wide.yaml")], TargetOptions())
    assert [t.name for t in others] == ["tiny", "tiny (2)", "base"]
    with pytest.raises(AssertionError, match="two targets of one name"):
        build_scorecard([measured("a", [0.0], ["x"])] * 2, {})


def test_a_mistyped_lora_is_refused_before_its_base_model_is_measured(base):
    with pytest.raises(ValueError, match=r"there is no LoRA at .*/bsae\. Did you mean .*/base\?"):
        resolve_targets(["tiny_ocr"], TargetOptions(), [str(base.parent / "bsae")])
    with pytest.raises(ValueError, match="there is no LoRA at"):
        resolve_targets(["tiny_ocr"], TargetOptions(), [str(base / "lora" / "b.safetensors")])
    from_hub = resolve_targets(["tiny_ocr"], TargetOptions(), ["somebody/signs"])[-1]
    assert (from_hub.name, from_hub.lora) == ("somebody/signs", "somebody/signs"), "looked up when it is loaded"


def test_a_pipeline_is_identified_by_its_call_arguments_in_any_order():
    one, two = (FlowGRPOConfig.for_model("tiny", [f"pipeline_kwargs={{{call}}}"]) for call in ("a: 1, b: 2", "b: 2, a: 1"))
    assert ModelTarget("x", "", one).pipeline == ModelTarget("y", "", two).pipeline


def test_a_lora_is_called_as_its_run_was_unless_a_config_is_given_for_it(base):
    given, target = (base.parent / f"{name}.yaml" for name in ("given", "target"))
    for file, width in ((given, 96), (target, 112)):
        file.write_text(FlowGRPOConfig.from_yaml("tiny_ocr", [f"width={width}"]).to_yaml())
    loose = base.parent / "loose"
    (base / "lora").rename(loose)
    (base / "lora").mkdir()
    (base / "lora" / "a.safetensors").write_bytes(b"")
    words, own = [str(target), str(base / "lora"), str(loose)], FlowGRPOConfig.from_yaml(base / "config.yaml").width
    assert [t.args.width for t in resolve_targets(words, TargetOptions()) if not t.is_base] == [own, 112]
    assert [t.args.width for t in resolve_targets(words, TargetOptions(str(given))) if not t.is_base] == [96, 96]
    with pytest.raises(ValueError, match="names its model"):
        eval_command(lora=[str(loose)])


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("no_such", "there is no no_such: give a run folder"),
        ("nofolder/bold", "there is no folder nofolder/bold, and the model nofolder/bold: not in the cache"),
        ("EMPTY", "is not a run folder, a checkpoint"),
        ("NEW", "has no LoRA yet: give one of its checkpoints"),
        ("LORA", "names its model: give a config of that model by --config"),
    ],
)
def test_a_word_that_stands_for_nothing_gets_a_clear_error(tmp_path, run, word, sentence):
    for name in ("EMPTY", "NEW", "LORA"):
        (tmp_path / name).mkdir()
    (tmp_path / "NEW" / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "LORA" / "a.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=sentence):
        resolve_targets([str(tmp_path / word) if word.isupper() else word], TargetOptions())
    with pytest.raises(ValueError, match="is given twice"):
        resolve_targets(["tiny_ocr", "tiny_ocr"], TargetOptions())


def measured(name, values, prompts, seeds=None, metadata=None):
    rows = ImageRecords(
        [f"{i}.png" for i in range(len(prompts))], prompts, seeds or [None] * len(prompts), metadata or [{}] * len(prompts)
    )
    return TargetResult(name, "pictures", rows, {"m": values})


def test_prompts_count_and_not_images():
    once = measured("a", [0.1, 0.2, 0.6], ["x", "y", "z"])
    often = measured("b", [0.1] * 5 + [0.2] + [0.6] * 2, ["x"] * 5 + ["y"] + ["z"] * 2)
    card = build_scorecard([once, often], {"b": "a"})
    assert card.means["a"]["m"].estimate == pytest.approx(card.means["b"]["m"].estimate)
    assert card.means["b"]["m"].prompts == 3
    assert card.means["b"]["m"].images == 8


def test_pairs_are_of_one_prompt_and_seed_wherever_they_stand():
    keys = [(f"p{i}", seed) for i in range(10) for seed in (0, 1)]
    values = {key: 0.1 * i + 0.03 * key[1] for i, key in enumerate(keys)}
    first = measured("a", [values[k] for k in keys], [p for p, _ in keys], [s for _, s in keys])
    turned = [("p0", 2), *keys[::-1]]  # and one that the first has not
    second = measured("b", [values.get(k, 99.0) + 0.01 for k in turned], [p for p, _ in turned], [s for _, s in turned])
    card = build_scorecard([first, second], {"b": "a"})
    change = card.changes["b"]["m"]
    assert change.difference.mean == pytest.approx(0.01)
    assert math.isnan(change.difference.low), "equal differences have no interval"
    assert (change.prompts, card.pairing["b"]) == (10, "10 prompts, 20 pairs of one prompt and seed")
    assert change.significant
    elsewhere = measured("c", first.values["m"], [p for p, _ in keys], [s + 5 for _, s in keys])
    assert (
        build_scorecard([first, elsewhere], {"c": "a"}).pairing["c"]
        == "10 prompts, compared by their means: no seed is in both"
    )


def test_a_pair_needs_a_number_on_both_sides():
    prompts, seeds = ["x", "x", "y", "y"], [0, 1, 0, 1]
    first = measured("a", [0.0, 1.0, 0.5, 0.7], prompts, seeds)
    second = measured("b", [math.nan, 1.1, 0.6, 0.8], prompts, seeds)
    second.values["other"] = first.values["other"] = [0.0] * 4
    card = build_scorecard([first, second], {"b": "a"})
    assert card.changes["b"]["m"].difference.mean == pytest.approx(0.1), "not that of x's two seeds"
    assert [(name, c.prompts, c.pairs) for name, c in card.changes["b"].items()] == [("m", 2, 3), ("other", 2, 4)]
    assert scorecard.as_json(card, {})["targets"]["b"]["differences"]["m"]["pairs"] == 3


def test_a_difference_of_fewer_prompts_than_its_means_says_so():
    few, many = measured("a", [0.0, 1.0], ["x", "y"]), measured("b", [0.5, 0.5, 0.0], ["x", "y", "z"])
    (note,) = [line for line in scorecard.notes(build_scorecard([few, many], {"b": "a"})) if line.startswith("b against a")]
    assert "the means are of all prompts, the difference is of these" in note
    whole = scorecard.notes(build_scorecard([few, measured("b", [0.5, 0.5], ["x", "y"])], {"b": "a"}))
    assert not any("the means are of all" in line for line in whole)


def test_an_interval_that_reaches_further_to_one_side_is_shown_so(capsys):
    prompts = [f"p{i}" for i in range(8)]
    card = build_scorecard([measured("a", [1.0] * 8, prompts), measured("b" * 40 + "end", [0.0] * 8, prompts)], {})
    scorecard.show(Console(width=80), card)
    output = capsys.readouterr().out
    low = 8 / (8 + stats.norm.ppf(0.975) ** 2)
    assert f"1.000 [{low:.3f}, 1.000]" in output
    assert f"0.000 [0.000, {1 - low:.3f}]" in output
    assert "…bbbbbbend " in output, "names that differ at their ends are told apart"


def test_targets_without_a_common_prompt_are_not_compared():
    card = build_scorecard([measured("a", [0.0] * 6, list("abcdef")), measured("b", [1.0] * 5, list("vwxyz"))], {"b": "a"})
    assert card.pairing["b"] == "not compared: no prompt is in both"
    assert (card.changes["b"], card.num_tests) == ({}, 0)
    assert "b against a: not compared" in scorecard.as_markdown(card)


def test_categories_count_alike_whatever_their_size():
    tags = [{"tag": tag, "include": []} for tag in ("one", "two", "two", "two")]
    card = build_scorecard([measured("a", [1.0, 0.0, 0.0, 0.3], list("wxyz"), metadata=tags)], {})
    assert card.categories["tag"]["two"]["a"]["m"].mean == pytest.approx(0.1)
    overall = card.macro_average("tag", "a", "m")
    assert overall.mean == pytest.approx(0.55)
    assert math.isnan(overall.low), "a category of one prompt has no interval"
    assert list(card.categories) == ["tag"], "a list is no category"


def test_the_mean_of_categories_has_the_interval_of_independent_means():
    """Its variance is the sum of theirs over their number squared. With known variances 1 and 9 of n prompts each: 10 / 4n."""
    one, two = (significance.Estimate(mean, mean - half, mean + half) for mean, half in ((0.2, 0.3), (0.6, 0.4)))
    found = significance.mean_of_independent([one, two])
    assert (found.mean, found.low, found.high) == pytest.approx((0.4, 0.15, 0.65))
    assert significance.mean_of_independent([one]) == one
    many = significance.mean_of_independent([one] * 16)
    assert (many.mean, many.high - many.low) == pytest.approx((one.mean, (one.high - one.low) / 4))
    n, tags = 400, [{"tag": tag} for tag in ("one", "two") for _ in range(400)]
    values = [float(sign) for sign in (1, -1) * (n // 2)] + [5 + 3.0 * sign for sign in (1, -1) * (n // 2)]
    card = build_scorecard([measured("a", values, [str(i) for i in range(2 * n)], metadata=tags)], {})
    overall = card.macro_average("tag", "a", "m")
    assert overall.mean == pytest.approx(2.5)
    assert (overall.high - overall.low) / 2 == pytest.approx(1.96 * math.sqrt((1 + 9) / (4 * n)), rel=0.05)
    row = next(line for line in scorecard.as_markdown(card).splitlines() if scorecard.OVERALL in line)
    assert rf"2.500 \[{overall.low:.3f}, {overall.high:.3f}\]" in row
    content = json.loads(json.dumps(scorecard.as_json(card, {})))["over_categories"]["tag"]["a"]["m"]
    assert content == {"mean": overall.mean, "low": overall.low, "high": overall.high}


def test_the_categories_of_shapes_are_the_means_of_their_images_scores(tmp_path, monkeypatch, capsys):
    """Of the command: each image again by its prompt and seed, the share of what is asked, and means of them by hand."""
    monkeypatch.chdir(tmp_path)
    eval_command(
        ["tiny_shapes", "dtype=fp32"], prompts="shapes", reward=["shapes"], limit=48, seeds=2, steps=4, out=Path("eval")
    )
    output = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "eval" / "eval.csv").read_text())))
    prompts = [row["prompt"] for row in rows]
    args = FlowGRPOConfig.from_yaml("tiny_shapes", ["dtype=fp32"])
    policy = load_policy(args.model, "cpu", "fp32", **args.evaluation_call_kwargs())
    images = generate_images(policy, prompts, [int(row["seed"]) for row in rows], 4, args.microbatch)
    scores = rewards.score("shapes", rewards.load("shapes"), images, prompts)
    torch.testing.assert_close(torch.tensor([float(row["shapes"]) for row in rows]), scores)
    assert scores.std() > 0.1
    names = [row["category"] for row in load_prompts("shapes").head(48).metadata]
    assert [row["category"] for row in rows] == [name for name in names for _ in range(2)]
    by_prompt_mean = scores.view(48, 2).mean(1)
    means = {name: by_prompt_mean[[i for i, other in enumerate(names) if other == name]].mean() for name in names}
    assert len(means) == 6
    results = json.loads((tmp_path / "eval" / "eval.json").read_text())
    found = {name: of["base"]["shapes"] for name, of in results["categories"]["category"].items()}
    assert {name: of["mean"] for name, of in found.items()} == pytest.approx({k: float(v) for k, v in means.items()})
    overall = float(sum(means.values()) / 6)
    table = output[output.index("shapes by category") :]
    (line,) = [line for line in table.splitlines() if line.strip().startswith(scorecard.OVERALL + " ")]
    assert f" {overall:.3f} " in line
    assert any(of["low"] is not None for of in found.values())
    for name, of in found.items():
        (line,) = [line for line in table.splitlines() if line.strip().startswith(name + " ")]
        interval = [] if of["low"] is None else [f"[{of['low']:.3f},", f"{of['high']:.3f}]"]  # equal values have none
        assert line.split()[-1 - len(interval) :] == [f"{of['mean']:.3f}", *interval]


def test_diversity_is_the_mean_over_a_prompts_pairs():
    images = torch.stack([torch.full((3, 4, 4), level) for level in (0.0, 0.3, 0.9, 0.5)])
    distances = image_metrics.diversity(images, ["a", "a", "a", "b"])
    assert distances[:3].mean().item() == pytest.approx((0.3 + 0.9 + 0.6) / 3)
    assert distances[3].isnan()


def test_single_images_get_a_second_one_for_diversity_that_counts_for_nothing_else():
    targets = resolve_targets(["tiny_ocr"], TargetOptions(overrides=["evaluation.steps=1", "dtype=fp32"]))
    rows = measure.images_to_generate(PromptSet(SIGNS, [{}, {}]), 1)
    (result,) = measure.measure(targets, rows, KIT, total=False)
    assert len(result.values["brightness"]) == 2
    assert min(result.values[DIVERSITY]) > 0.01
    policy, seeds = tiny_policy(), [seed for seed in rows.seeds if seed is not None]
    first = generate_images(policy, SIGNS, seeds, 1)
    second = generate_images(policy, SIGNS, [image_seed(seed, 0, 1) for seed in seeds], 1)
    expected = (first - second).square().mean((1, 2, 3)).sqrt().tolist()
    assert result.values[DIVERSITY] == pytest.approx(expected, abs=1e-5)
    assert result.values["brightness"] == pytest.approx(brightness(first, SIGNS).tolist(), abs=1e-5)


def test_chunks_keep_a_prompts_images_together():
    prompts = list("abacbbdd")
    batches = list(measure.prompt_batches(prompts, 3))
    assert sorted(i for rows in batches for i in rows) == list(range(8))
    assert [{prompts[i] for i in rows} for rows in batches] == [{"a"}, {"b"}, {"c", "d"}]


def test_a_limit_is_of_prompts_and_of_images_too(sheet):
    shown = resolve_targets([str(sheet / "grid.png")], TargetOptions(limit=1))[0].image_set
    assert (shown.prompts, shown.seeds) == ([SIGNS[0]] * 2, [0, 1])
    assert torch.equal(shown.pixels, resolve_targets([str(sheet)], TargetOptions())[0].image_set.pixels[:2])


def test_a_limit_counts_different_prompts_although_a_file_repeats_them():
    settings = FlowGRPOConfig.from_yaml("tiny_ocr").evaluation
    asked = measure.rows_to_generate(PromptSet(list("aab"), [{}] * 3), settings, 1, 1)
    assert (asked.prompts, len(set(asked.seeds))) == (["a", "a"], 2)


def test_a_folder_of_prompts_with_images_is_read_as_prompts_and_one_with_seeds_as_results(tmp_path):
    for i, side in enumerate((8, 16)):
        Image.new("RGB", (side, 8), (i, i, i)).save(tmp_path / f"{i}.png")
    rows = [{"file_name": f"{i}.png", "prompt": "make it night", "tag": i} for i in (0, 1)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_prompt_source(str(tmp_path), None)
    assert (read.prompts, read.metadata) == (load_prompts(tmp_path).prompts, [{"tag": 0}, {"tag": 1}])
    assert all(map(images_of, read.prompts))
    (tmp_path / "metadata.jsonl").write_text(json.dumps({**rows[0], "seed": 7}))
    results = read_prompt_source(str(tmp_path), None)
    assert (results.prompts, results.seeds) == (["make it night"], [7])
    assert not any(map(images_of, results.prompts))


def test_a_reward_file_that_is_in_another_folder_is_named_with_its_config(tmp_path, run, monkeypatch):
    target = tmp_path / "begun"
    shutil.copytree(run, target)
    config = short_run(target, "model=tiny", "rewards={mine.py:mine: 1}").to_yaml()
    (target / "config.yaml").write_text(config)
    (target / "metrics.jsonl").write_text('{"step": 1, "loss": 0.0}\n')
    monkeypatch.chdir(tmp_path)
    sentence = f"{target}/config.yaml names the reward mine.py:mine, and there is no file mine.py in {tmp_path}: start"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        eval_command([str(target)], trust=True)


def test_a_place_that_cant_be_written_is_reported_before_anything_is_measured(sheet, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^nothing can be written to .*file/out \(.*--out\.$"):
        eval_command([str(sheet)], reward=[f"{REWARDS}:nan"], out=tmp_path / "file" / "out")
    score_command(sheet, reward=[f"{REWARDS}:brightness"], out=tmp_path / "new" / "deep" / "x.json")
    assert len(json.loads((tmp_path / "new" / "deep" / "x.json").read_text())) == 4


def test_a_setting_may_be_longer_than_a_files_name():
    with pytest.raises(ValueError, match=r"on the command line: .*evaluation"):
        eval_command([f"evaluation.prompt={'x' * 5000}"])


def test_a_score_that_is_no_number_stops_or_is_left_out_and_is_never_a_zero(sheet):
    target = resolve_targets([str(sheet)], TargetOptions())
    with pytest.raises(ValueError, match="reward bad returned nan for the prompt"):
        list(measure.measure(target, None, rewards.WeightedSum({"bad": nan}, {"bad": 0.0}), total=False))
    kit = rewards.WeightedSum({"u": sometimes_nan, "nan": nan}, {"u": 0.0, "nan": 0.0}, drop_on_error=["u", "nan"])
    prompts = [prompt.replace("STRAWBERRY", "BUS") for prompt in target[0].image_set.prompts]
    rows = ImageRecords(target[0].image_set.labels, prompts, target[0].image_set.seeds, target[0].image_set.metadata)
    result = TargetResult("a", "", rows, measure.score(rows, target[0].image_set.images, kit, batch_size=64))
    card = build_scorecard([result], {})
    assert "nan" not in card.metrics
    assert card.means["a"]["u"].images == 3
    assert by_prompt(result, "u")[prompts[3]] == result.values["u"][3]
    assert [row["u"] for row in csv.DictReader(io.StringIO(scorecard.as_csv(card)))].count("") == 1
    assert "NaN" not in json.dumps(scorecard.as_json(card, {}), allow_nan=False)
    assert len(kit.drop_messages) == 2


@pytest.fixture
def hostile(tmp_path):
    """A card whose target, prompt and category are hostile, beside a harmless one."""
    metadata = [{"category": HOSTILE}, {"category": "good"}]
    values = [
        measured(name, [0.1, shift], [HOSTILE, "fine"], [0, 0], metadata) for name, shift in ((HOSTILE, 0.2), ("b", -0.3))
    ]
    return build_scorecard(values, {"b": HOSTILE})


def test_hostile_text_stays_text_on_the_console(hostile):
    console = rich.console.Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    scorecard.show(console, hostile)
    written = console.file.getvalue()
    assert not re.findall(r"\x1b|\u202e", re.sub(r"\x1b\[[01]m", "", written)), "but for bold of our own"
    assert "\\x1b[31m" in written
    assert max(len(line) for line in written.splitlines()) <= 80


def test_hostile_text_stays_text_in_markdown_and_csv(hostile):
    page = scorecard.as_markdown(hostile)
    assert not re.findall(r"<script|\x1b|\u202e|(?<!\\)`|(?<!\\)\]\(", page)
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in page.split("\n\n")]
    for lines in filter(None, blocks):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, lines
    rows = list(csv.reader(io.StringIO(scorecard.as_csv(hostile))))
    assert len(rows) == 5
    assert rows[1][2] == f"'{HOSTILE}"
    assert rows[4][-1] == "-0.3", "numbers stay numbers"
    assert not [cell for row in rows for cell in row[:-1] if cell.startswith(FORMULA)]


def test_genevals_own_prompts_come_with_what_its_reward_needs():
    prompts_read = load_prompts("GenEval")
    tags = [row["tag"] for row in prompts_read.metadata]
    sizes = {"single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100, "color_attr": 100}
    assert {tag: tags.count(tag) for tag in tags} == sizes
    annotated = {33: "a train", 108: "a skateboard and a sink", 208: "three zebras", 316: "a yellow orange"}
    annotated |= {457: "a pink oven and a green motorcycle", 469: "a black kite and a green bear"}
    for place, what in annotated.items():  # as the published human annotations number them
        assert prompts_read.prompts[place] == f"a photo of {what}"
    assert prompts_read.metadata[208]["include"][0]["count"] == 3
    assert prompts_read.metadata[208]["exclude"][0]["count"] == 4
    assert load_prompts("ocr").prompts == load_prompts("prompts/signs_eval.txt").prompts


def test_a_local_file_of_a_published_set_is_read_as_it_is_published(tmp_path):
    parti = tmp_path / "PartiPrompts.tsv"
    parti.write_text(
        "Prompt\tCategory\tChallenge\tNote\n42\tAbstract\tBasic\tSimple numbers\nnull\tAbstract\tBasic\t\n"
        '"Hi" on a wall \tArts\tComplex\t\n'
    )
    prompts_read = load_prompts(str(parti))
    assert prompts_read.prompts == ["42", "null", '"Hi" on a wall ']
    assert [(row["Category"], row["Note"]) for row in prompts_read.metadata] == [
        ("Abstract", "Simple numbers"),
        ("Abstract", None),
        ("Arts", None),
    ]
    bench = tmp_path / "drawbench.csv"
    bench.write_text('Prompts,Category\nA red car.,Colors\n"Two cats, one dog.",Counting\n')
    assert load_prompts(str(bench)).prompts == ["A red car.", "Two cats, one dog."]


def test_sets_that_are_not_shipped_are_asked_for_by_their_hub_ids(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, **options):
        asked.append(name)
        return datasets.Dataset.from_list([{"Prompts": "a dog", "Category": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("DrawBench").metadata == [{"Category": "x"}]
    load_prompts("partiprompts")
    assert asked == ["sayakpaul/drawbench", "nateraw/parti-prompts"]
