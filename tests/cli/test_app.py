"""All verbs: versions, mistakes, imports and help. What a user types, sees and gets."""

import re
import subprocess
import sys

import pytest
from support.cli_process import run
from support.embedded import PROMPTS

from flow_grpo import __version__
from flow_grpo.cli.app import COMMANDS

CAT = PROMPTS[0]

GIVEN = ["--set", "objective={name: sft, dataset: x}", "--set", "sampling={}"]  # images, and no rollouts


def test_the_version_is_the_packages(tmp_path):
    assert run("--version", cwd=tmp_path) == f"flow-grpo {__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "no_such"], "there is no config no_such"),
        (["train", "short.yaml", "stepz=3"], "there is no setting stepz. Did you mean steps?"),
        (["train", "short.yaml", "--steps", "3"], "--steps is a setting and no option: write steps=3."),
        (["train", "--images-per-prompt=8"], "write images_per_prompt=8."),
        (["doctor", "short.yaml", "--optimizer.lr", "1e-4"], "write optimizer.lr=1e-4."),
        (["train", "--learning_rate", "--resume"], "write optimizer.lr=VALUE."),
        (["train", "short.yaml", "steps", "3"], "'steps' is not of the form key.sub=value: write steps=3."),
        (["train", "missing.yaml"], "there is no file missing.yaml. `flow-grpo init missing.yaml` writes a new config."),
        (["doctor", "runs/short"], "runs/short is a folder and no config: give a config in it, runs/short/config.yaml."),
        (["train", "short.yaml"], "already holds a run"),
        (["train", "short.yaml", "model=./nowhere", "output_dir=runs/x"], "there is no model folder ./nowhere"),
        (
            ["train", "short.yaml", "model=./nowhere", "rewards={gone.py:f: 1}", "output_dir=runs/x"],
            "there is no model folder ./nowhere",
        ),
        (["train", "short.yaml", "microbatch=3", "output_dir=runs/x"], "microbatch=3 does not divide"),
        (["train", "short.yaml", "prompts=missing.txt", "output_dir=runs/x"], "there is no file missing.txt"),
        (["train", "short.yaml", "rewards={orc: 1}", "output_dir=runs/x"], "Did you mean ocr?"),
        (["train", "short.yaml", "device=warp", "output_dir=runs/x"], "device=warp can't be used here"),
        (["train", "short.yaml", "output_dir=short.yaml"], "short.yaml"),
        (["sample", CAT, "--lora", "./missing"], "there is no LoRA at"),
        (
            ["sample", CAT, "--lora", "runs/shorrt"],
            "there is no LoRA at runs/shorrt. Did you mean runs/short? Give a folder",
        ),
        (["score", "missing.png"], "there is no image or folder"),
        (["score", "a.png", "b.png"], "one image or folder can be given, and b.png is another one: put the images into"),
        (["rewards", "test", "ocr", "--images", "a.png", "b.png"], "one image or folder can be given, and b.png is another"),
        (["score", "short.yaml"], "short.yaml is not an image: give a PNG, JPEG, WEBP, BMP, GIF, TIFF or AVIF file."),
        (["eval", "runs"], "not a run folder"),
        (["compare", "short.yaml", "--stop"], "--stop ends a run at its target, and none is given: add --target VALUE."),
        (["compare", "short.yaml", "--budget", "soon"], "--budget soon is no budget of each run"),
        (
            ["compare", "short.yaml", "--budget", "images=9", *GIVEN],
            "ends with a stage on given images, which generates none: give a budget in seconds",
        ),
        (["serve", "clip={batch_size: 1}", "clip={batch_size: 2}"], "the reward clip is given twice: give each once."),
        (["sample", "red", "text", "CAT"], "put quotes around a prompt of several words, as in 'red text CAT'"),
        (["sample", "red", "text", "a CAT"], "3 prompts were given, some of one word"),
        (["sample", "a cat", " "], "an empty prompt was given"),
        (["sample", CAT, "--guidance", "nan"], "guidance is nan, but it should be a finite number"),
        (["sample", CAT, "--guidance", "-inf"], "guidance is -inf, but it should be a finite number"),
        (["sample", CAT, "--model", "no/such/folder", "--out", "/proc/x"], "nothing can be written to /proc/x"),
        (["sample", CAT, "--model", "u/a--b"], "there is no model folder u/a--b; give a diffusers folder, a hub id"),
        (["sample", CAT, "--lora", "u/.a"], "there is no LoRA at u/.a."),
        (
            ["train", "short.yaml", "prompts=u/a--b", "output_dir=new"],
            "'u/a--b' is not a prompt file, an address or a data set",
        ),
        (["sample", CAT, "--model", "nowhere", "--out", "new/images"], "there is no model folder nowhere"),
        (["score", "missing.png", "--out", "new/scores.json"], "there is no image or folder"),
        (["doctor", "nothing.yaml", "--json", "new/checks.json"], "there is no file nothing.yaml"),
        (["doctor", "short.yaml", "--json", "/proc/x/y.json"], "nothing can be written to /proc/x"),
        (["doctor", "--step-variance", "--json", "x.json"], "leave out --model and --json, which are for checks."),
        (["doctor", "--step-variance", "--model", "tiny"], "leave out --model and --json, which are for checks."),
        (["doctor", "short.yaml", "--out", "x.png"], "--out is the PNG file of --step-variance: give both"),
        (["doctor", "--model", "tiny", "--out", "x.png"], "--out is the PNG file of --step-variance: give both"),
        (["doctor", "short.yaml", "--step-variance", "--out", "/proc/x/y.png"], "nothing can be written to /proc/x"),
        (["doctor", "short.yaml", "--step-variance", "--noise-levels", "nan"], "'nan' is not a noise level"),
        (["compare", "short.yaml", "--out", "/proc/x"], "nothing can be written to /proc/x"),
        (["compare", "short.yaml", "--target", "nan"], "--target nan is not a number that a metric reaches"),
        (["compare", "short.yaml", "short.yaml"], "one config is given twice"),
        (["compare", "short.yaml", "./short.yaml"], "two of the configs have one file name"),
        (["compare", "short.yaml", "--set", "evaluation.prompts=null"], "names no held-out prompts"),
        (["doctor", "short.yaml", "--step-variance", "--transitions", "cp"], "cp is not a stochastic transition"),
        (["doctor", "tiny_ocr", "--step-variance"], "samples the ODE, which has no stochastic steps"),
        (["doctor", "short.yaml", "--step-variance", "--noise-levels", "much"], "'much' is not a noise level"),
    ],
)
def test_a_mistake_gets_one_sentence_and_leaves_no_folder(trained, words, sentence):
    before = set(trained.rglob("*"))
    output = run(*words, cwd=trained, code=2)
    assert set(trained.rglob("*")) == before
    assert sentence in " ".join(output.split())
    phase = re.compile(r"(?!error)\w.*: \d+ s( .*)?")  # printed on a slow machine
    assert len([line for line in output.strip().splitlines() if not phase.fullmatch(line)]) == 1


@pytest.mark.parametrize("words", [["sample", CAT], ["eval", "tiny_ocr"]])
def test_more_seeds_than_memory_holds_are_refused_at_once(trained, words):
    output = run(*words, "--seeds", "99999999999", cwd=trained, code=2)
    assert re.search(r"--seeds.*\b1000", " ".join(output.split())), "the most that it may be"


def test_an_option_that_is_no_setting_is_refused_as_before(trained):
    assert "No such option" in run("train", "short.yaml", "--stepz", "3", cwd=trained, code=2)
    assert "No such option" in run("sample", CAT, "--microbatch", "3", cwd=trained, code=2)


def test_importing_the_command_line_loads_nothing_that_help_does_not_need():
    heavy = "torch diffusers transformers accelerate numpy pydantic yaml matplotlib rewards"
    code = f"import sys, flow_grpo.cli; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_help_names_every_verb_with_a_sentence(trained):
    output = run("--help", cwd=trained)
    for verb in COMMANDS:
        assert re.search(rf"{verb}\s+\w+", output)
        assert "flow-grpo" in run(verb, "--help", cwd=trained)


def test_the_list_of_rewards_has_whole_sentences():
    from flow_grpo import rewards
    from flow_grpo.cli.rewards import _first_sentence

    assert [name for name in rewards.REGISTRY if len(_first_sentence(rewards.docstring(name)).split()) < 5] == []
