"""`rewards list | info | test`: what people see of a reward before they train on it."""

import re
import time

import pytest
import torch
from PIL import Image
from support.cli_process import run
from support.paths import ROOT, SAMPLE_REWARDS

from dev.tiny import pretrain, world
from flow_grpo import rewards
from flow_grpo.data.grid import ImageInfo, read_grid, save_grid
from flow_grpo.doctor.reward_probe import ORIGINAL, measure, perturbed
from flow_grpo.rewards.calls import RewardInputs

PROMPTS = [f'red text "{word}" on a {color} background' for word in ("CAT", "HORSE") for color in ("blue", "white")]


@pytest.fixture(scope="module")
def signs() -> RewardInputs:
    return RewardInputs(
        pretrain.images_of([world.parse(prompt) for prompt in PROMPTS]) / 2 + 0.5, PROMPTS, {"place": [0, 1, 2, 3]}
    )


def test_every_reward_is_listed_with_what_it_measures():
    output = run("rewards", "list", cwd=ROOT)
    for name in rewards.REGISTRY:
        line = re.search(rf"^{name} +(\S.*)$", output, re.MULTILINE)
        assert line, output
        assert len(line[1]) > 20


def test_info_has_the_docstring_and_the_options():
    output = run("rewards", "info", "judge", cwd=ROOT)
    for part in ("VQAScore (arXiv 2404.01291)", "Gamed by", "Apache-2.0", "concurrency", "16", "required", "{prompt}"):
        assert part in output, output
    own = run("rewards", "info", f"{SAMPLE_REWARDS}:scaled", cwd=ROOT)
    assert "factor" in own
    assert "1.0" in own


def test_info_on_what_is_no_reward_is_a_clear_error(tmp_path):
    (tmp_path / "mine.py").write_text("import functools\nnumber = 5\nodd = functools.partial(dict.fromkeys)\n")
    assert "reward mine.py:number is not callable but int" in run("rewards", "info", "mine.py:number", cwd=tmp_path, code=2)
    run("rewards", "info", "mine.py:odd", cwd=tmp_path)


def test_every_docstring_says_what_a_user_must_know():
    for name in rewards.REGISTRY:
        if name in ("ocr_exact", "remote"):  # these point to another reward
            continue
        said = rewards.locate("reward", name, rewards.REGISTRY).__doc__
        for word in ("Range", "Gamed", "eight"):
            assert word in said or (word == "eight" and "o weights" in said), f"{name}: {word}"


def test_perturbed_inputs_are_blurred_noisy_or_have_another_prompt_with_its_metadata(signs):
    wrong_inputs = perturbed(signs)
    edges = {how: p.images.diff(dim=-1).abs().mean().item() for how, p in {ORIGINAL: signs, **wrong_inputs}.items()}
    assert edges["blurred"] < edges[ORIGINAL] < edges["noisy"]
    wrong = wrong_inputs["wrong prompt"]
    assert all(a != b for a, b in zip(wrong.prompts, PROMPTS, strict=True))
    assert [PROMPTS.index(p) for p in wrong.prompts] == wrong.metadata["place"], "the metadata goes with the prompt"
    assert "wrong prompt" not in perturbed(RewardInputs(signs.images[:2], ["a", "a"], {}))


def test_a_reward_is_measured_for_chance_company_and_perturbed_inputs(signs):
    calls = []

    def brightness(images, prompts):
        calls.append(len(prompts))
        return images.mean((1, 2, 3)) + (0.5 if len(prompts) == 1 else 0)

    stats = measure("mine", brightness, signs, perturbed(signs))
    assert torch.equal(stats.values[ORIGINAL], signs.images.mean((1, 2, 3)))
    assert torch.equal(stats.original, stats.again)
    assert set(stats.values) == {ORIGINAL, "blurred", "noisy", "wrong prompt"}
    assert stats.depends_on_group

    def random(images, prompts):
        return torch.rand(len(prompts))

    stats = measure("mine", random, signs, {})
    assert not torch.equal(stats.original, stats.again)


def test_a_batch_is_timed_on_images_that_the_reward_has_not_seen(signs):
    """A reward that keeps its values of an image would else take no time at all."""
    known, seconds = {}, 0.05

    def keeps(images, prompts):
        key = images.numpy().tobytes()
        if key not in known:
            time.sleep(seconds)
            known[key] = images.mean((1, 2, 3))
        return known[key]

    assert measure("mine", keeps, signs, perturbed(signs)).seconds >= seconds / len(PROMPTS)


def test_the_verb_on_a_grid_and_on_a_folder_with_metadata(signs, tmp_path):
    cells = [ImageInfo(prompt, seed, "[red]tiny") for seed, prompt in enumerate(PROMPTS)]
    save_grid(tmp_path / "grid.png", signs.images, cells, columns=2)
    color = "color={palette: {teal: [0, 128, 128]}}"  # which is 1 for all of them, so that it teaches nothing
    output = run("rewards", "test", color, "--images", "grid.png", cwd=tmp_path, code=2)
    for part in (
        "original",
        "blurred",
        "noisy",
        "wrong prompt",
        "█",
        " ms per image",
        "color: reads the prompt",
        "ERROR: all are equal",
    ):
        assert part in output, output
    assert "warning" not in output
    assert Image.open(tmp_path / "reward_color.png").size > (100, 100)

    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(2):
        Image.new("RGB", (8, 8), (100 * i, 0, 0)).save(folder / f"{i}.png")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": 3}\n{"prompt": "[b]", "answer": 4}\n')
    own = f"{SAMPLE_REWARDS}:uses_metadata"
    ranks = own.replace("uses_metadata", "rank")
    output = run(
        "rewards", "test", ranks, "--images", "folder", "--prompts", "prompts.jsonl", "--out", "x.png", cwd=tmp_path, code=2
    )
    assert "rank: depends on other images" in output
    output = run("rewards", "test", own, "--images", "folder", "--prompts", "prompts.jsonl", "--out", "x.png", cwd=tmp_path)
    assert "with a wrong" in output, "the metadata is another one with a wrong prompt"
    assert re.search(r"original\W+3\.5000\W+0\.5000\W+3\.0000\W+4\.0000", output), output
    assert read_grid(tmp_path / "x.png")[1][0].prompt == "[b]", "the higher score comes first"


def test_a_reward_that_is_not_finite_ends_with_an_error_and_one_prompt_has_no_wrong_ones(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    words = ["--images", "a.png", "--prompt", "a fox", "--out", "x.png"]
    output = run("rewards", "test", f"{SAMPLE_REWARDS}:nan", *words, cwd=tmp_path, code=2)
    assert "are not finite" in output or "nan" in output
    assert "all images are of one prompt: wrong prompts were not tried" in output
    assert "no prompt has two images" in output
