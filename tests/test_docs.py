"""README and docs: their commands parse, their code runs, their configs are valid, their links exist."""

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support.cli_process import run
from support.embedded import short_model, short_run
from support.families import TINY
from support.image_families import IMAGE_TINY
from support.paths import ROOT

from flow_grpo import rewards
from flow_grpo.advantages import ADVANTAGES
from flow_grpo.cli.app import COMMANDS
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective_by_name import OBJECTIVES
from flow_grpo.policy import step_meter
from flow_grpo.policy.hub import resolve_model
from flow_grpo.rewards import REGISTRY
from flow_grpo.rewards.scopes import frames_of
from flow_grpo.sampling import SOLVERS
from flow_grpo.sde import TRANSITIONS
from flow_grpo.training.setup import reason_not_to_call

README, METHODS = ROOT / "README.md", ROOT / "docs/methods.md"
LOG = ROOT / "dev/LOG.md"  # its commands are of their day, so it is not among the pages
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = {"schema.json"}  # when the site is built


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(pages: list[Path] = PAGES) -> list[str]:
    """The flow-grpo commands in the pages' code blocks, each once."""
    texts = [block.replace("\\\n", " ") for page in pages for block in blocks(page, "bash")]
    lines = [line.split("  #")[0].strip() for text in texts for line in text.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return list(dict.fromkeys(part for part in parts if part.startswith("flow-grpo")))


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=lambda page: page.stem)
def test_every_link_to_a_file_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert set(missing) <= GENERATED


def test_log_entries_are_newest_first_and_links_between_them_hit():
    headings = re.findall(r"^## (.*)", LOG.read_text(), re.MULTILINE)
    form = re.compile(r"\d{4}-\d\d-\d\d: .+\? .+")  # date, question, answer
    assert [heading for heading in headings if not form.fullmatch(heading)] == []
    days = [heading[:10] for heading in headings]
    assert days == sorted(days, reverse=True)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]  # as on GitHub
    assert len(set(anchors)) == len(anchors)
    links = {page: re.findall(r"\]\((?:\.\./dev/LOG\.md)?#(\d{4}[^)]*)\)", page.read_text()) for page in [*PAGES, LOG]}
    assert {(page.name, link) for page in links for link in links[page] if link not in anchors} == set()


def test_a_formula_at_the_beginning_of_a_line_stays_in_its_paragraph(monkeypatch):
    markdown = pytest.importorskip("markdown", reason="the extra 'docs' is not installed")
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generated_pages

    page = markdown.markdown(generated_pages.with_formulas("Noise is at\n$\\sigma = 1$. The image is at\n$\\sigma = 0$."))
    assert page.count("<p>") == 1
    assert page.count("<math") == 2


def test_the_table_of_pipelines_has_those_that_are_tested():
    page = (ROOT / "docs/models.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| `\w+Pipeline`", line)]
    named = {name for row in rows for name in re.findall(r"`(\w+Pipeline)`", row)}
    builders = [tiny.build for tiny in (*TINY.values(), *IMAGE_TINY.values())]
    tested = {typing.get_type_hints(build)["return"] for build in builders} - {Any}
    assert named == {kind.__name__ for kind in tested} | {"QwenImageEditPipeline"}  # which one builder makes as a default


def test_the_table_of_rewards_has_all_of_them():
    table = (ROOT / "docs/rewards.md").read_text().partition("| name | what it measures |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(REGISTRY)


def test_the_page_of_methods_names_every_objective_advantage_transition_and_solver():
    page = (ROOT / "docs/methods.md").read_text()
    names = [*OBJECTIVES, *ADVANTAGES, *TRANSITIONS, *SOLVERS]
    assert not [name for name in names if f"`{name}`" not in page]


def test_the_page_of_commands_has_a_row_for_each():
    page = (ROOT / "docs/commands.md").read_text()
    assert not [name for name in COMMANDS if not re.search(rf"^\|.*`flow-grpo {name}\b", page, re.MULTILINE)]


def test_memory_and_seconds_of_the_readme_are_those_of_the_computed_table():
    computed = {}
    for line in (ROOT / "docs/performance.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 11 and re.fullmatch(r"`\w+`", cells[0]):
            computed[cells[0]] = (cells[6], cells[10], cells[5])  # without a memory option
    rows = re.findall(r"^\| .* \| (`\w+`) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 8
    assert {config: tuple(numbers) for config, *numbers in rows} == {row[0]: computed[row[0]] for row in rows}


def test_the_readme_is_short_and_has_the_two_commands():
    text = README.read_text()
    assert len(text.split()) <= 1000
    assert "pip install -e . && flow-grpo train\n" in text
    assert "pip install -e '.[test]' && pytest -n 4 --dist loadfile\n" in text


def test_the_readmes_python_runs(tmp_path):
    """The five-line reward and the trainer's example, as they stand there."""
    reward, trainer = blocks(README, "python")
    (tmp_path / "my_reward.py").write_text(reward)
    (tmp_path / "example.py").write_text(trainer)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [json.loads(line) for line in (tmp_path / "runs/fox/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"rewards/bold/mean", "rewards/jpeg_size/mean"} <= rows[0].keys()
    assert (tmp_path / "runs/fox/lora/pytorch_lora_weights.safetensors").exists()
    assert "model: tiny" in (tmp_path / "runs/fox/config.yaml").read_text()


SHORT = {
    "train": [
        "steps=1",
        "prompts_per_step=2",
        "evaluation.max_prompts=2",
        "evaluation.steps=3",
        "images_per_prompt=4",
        "trackers=[]",
    ],
    "eval": ["--limit", "2"],
}  # added to the README's commands
LARGE = ("flow-grpo train sd35_medium_ocr", "flow-grpo train flux_dev_ocr")  # need weights that a test does not have


def test_the_readmes_commands_run_as_they_stand(tmp_path):
    """In their order, in one folder, but for those that train published models."""
    (tmp_path / "my_reward.py").write_text(blocks(README, "python")[0])
    shutil.copytree(resolve_model("tiny"), tmp_path / "my-sd3-folder")
    first = [command for command in commands([README]) if not command.startswith(LARGE)]
    assert {shlex.split(command)[1] for command in first} >= {"train", "plan", "doctor", "sample", "score", "eval"}
    for command in first:
        verb, *words = shlex.split(command)[1:]
        run(verb, *words, *SHORT.get(verb, []), cwd=tmp_path)
    runs = {path.parent.name for path in tmp_path.glob("runs/*/report.html")}
    assert runs == {"tiny_ocr", "bold", "tiny_shapes", "tiny_edit"}
    evaluated = "".join(path.read_text() for path in tmp_path.rglob("eval.json"))
    assert not [name for name in ("tiny_ocr", "bold") if name not in evaluated]


# What the docs' commands need that a test does not have.
ELSEWHERE = {
    "published weights": ("flux_", "sd35_", "qwen_", "flux2_klein_edit", "wan21_", "FLUX.1-Kontext", "z_image"),
    "other machines": ("http://10.0.0.2", "/envs/red", "--push"),
    "hours": ("flow-grpo compare compare/",),
}

DOES_NOT_FIT = "flow-grpo plan flux_dev_ocr --gpu 'RTX 4090'"  # so that plan ends with status 2


def runs_here(command: str) -> bool:
    is_elsewhere = any(word in command for words in ELSEWHERE.values() for word in words)
    return command.startswith("flow-grpo plan") or not is_elsewhere


def write_inputs_of_the_docs(folder: Path) -> None:
    """What the commands of the docs read: rewards, prompts, images, and the runs of the README."""
    (folder / "my_reward.py").write_text(blocks(README, "python")[0])
    (folder / "my_objective.py").write_text(blocks(METHODS, "python")[0])
    (folder / "words.txt").write_text('red text "CAT" on a blue background\n' * 4)
    (folder / "edits.jsonl").write_text(json.dumps({"prompt": "make it night", "image": "street.png"}) + "\n")
    (folder / "results").mkdir()
    for file in ("street.png", "results/night.png"):
        Image.new("RGB", (80, 32), "navy").save(folder / file)
    for command in (
        *(c for c in commands() if c.startswith("flow-grpo train tiny") and c in README.read_text()),
        "flow-grpo train tiny_ocr",
        "flow-grpo sample 'red text \"CAT\" on a blue background' --seeds 4",
    ):
        verb, *words = shlex.split(command)[1:]
        run(verb, *words, *SHORT.get(verb, []), cwd=folder)
    shutil.copytree(folder / "samples", folder / "other")
    with Image.open(folder / "samples/grid.png") as grid:
        Image.fromarray(np.asarray(grid)).save(folder / "foreign.png")


@pytest.mark.slow
def test_the_commands_of_the_docs_run(tmp_path):
    """In the order of the pages, in the README's folder. Runs are short, so their checkpoints are of step 1."""
    write_inputs_of_the_docs(tmp_path)
    others = [one for one in commands() if one not in README.read_text() and runs_here(one)]
    assert {shlex.split(one)[1] for one in others} == {*COMMANDS, "rewards"} - {"init", "report", "serve", "compare"}
    for command in others:
        verb, *words = shlex.split(command.replace("step_000020", "step_000001").partition(" > ")[0])[1:]
        run(verb, *words, *SHORT.get(verb, []), cwd=tmp_path, code=2 if command == DOES_NOT_FIT else 0)


@pytest.mark.slow
def test_the_python_of_the_page_of_shapes_runs():
    (code,) = blocks(ROOT / "docs/shapes.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["image"].size == names["edited"].size == (64, 64)


def test_the_rewards_of_the_pages_of_edits_and_videos_run():
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs/edits.md", "python")[0], names)
    images = torch.rand(2, 3, 8, 8)
    assert names["keep_the_left_half"](images, ["a", "b"], images).tolist() == [0, 0]
    exec(blocks(ROOT / "docs/videos.md", "python")[-1], names)
    assert names["no_flicker"](images[:, None].expand(2, 5, 3, 8, 8), ["a", "b"]).tolist() == [0, 0]


def test_the_trainer_of_the_page_of_python_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(*blocks(ROOT / "docs/python.md", "python"), names)
    assert "rewards/count_red/mean" in names["trainer"].training_step()


def test_the_gradients_of_the_page_of_rewards_have_the_shapes_that_stand_there():
    names: dict[str, Any] = {"images": torch.rand(2, 3, 32, 80), "prompts": ["a", "b"]}
    exec("".join(blocks(ROOT / "docs/rewards.md", "python")[1:]), names)
    assert names["gradient"].shape == (2, 3, 32, 80)
    assert names["value"].shape == names["fall"].shape == (2,)


def test_the_attributes_of_the_page_of_rewards_are_those_that_are_read(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(next(block for block in blocks(ROOT / "docs/rewards.md", "python") if "costly" in block))
    assert not rewards.reads_prompts(f"{file}:darkness")
    paid = rewards.load(f"{file}:PaidJudge")
    assert frames_of(paid) == 1
    assert reason_not_to_call("PaidJudge", paid) == "its attribute `costly` is set"


def test_an_objective_of_ones_own_trains(tmp_path):
    """The example in fewer than 20 lines, by the very settings of the command under it."""
    (objective,) = blocks(METHODS, "python")
    assert len(objective.splitlines()) < 20
    (tmp_path / "my_objective.py").write_text(objective)
    words = next(shlex.split(c) for c in commands() if "my_objective.py" in c)
    short = short_run(tmp_path / "run")
    (tmp_path / "short.yaml").write_text(short.to_yaml())
    run("train", "short.yaml", words[3], "steps=1", cwd=tmp_path)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert row["ratio/first_update_max_deviation"] == 0
    assert row["grad_rms"] > 0
    assert FlowGRPOConfig.from_yaml("tiny_grpo", [words[3]]).objective.options == {"sharpness": 2}


METRIC = re.compile(r'f?"((?:[a-z_0-9]+/)+[a-zA-Z_0-9{}.]+)"')
LOGGED_BY = [
    "advantages.py",
    "config/anchor_config.py",
    "objectives.py",
    "trainer.py",
    *(f"{folder}/*.py" for folder in ("training", "evaluation", "policy", "tracking")),
]


NOT_METRICS = {"pictures", "prompts", "flow_grpo"}  # folders


def documented(name: str) -> bool:
    """Whether the glossary has that metric; a word in capitals there stands for any name, and so does NAME."""
    rows = [line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith("| `")]
    entries = [entry for row in rows for entry in re.findall(r"`([^`]+)`", row.split("|")[1])]
    return any(re.fullmatch(re.sub(r"(?<![A-Z])[A-Z]+(?![A-Za-z])", r"[\\w@]+", entry), name) for entry in entries)


def test_every_metric_that_the_code_names_is_in_the_glossary():
    sources = [file for pattern in LOGGED_BY for file in (ROOT / "flow_grpo").glob(pattern)]
    named = {re.sub(r"\{[^}]*\}", "NAME", name) for file in sources for name in METRIC.findall(file.read_text())}
    named = named - {"time/NAME"} | {f"time/{phase}" for phase in step_meter.PHASES}
    metrics = {name for name in named if name.split("/")[0] not in NOT_METRICS}
    assert len(metrics) > 40
    assert not {name for name in metrics if not documented(name)}


def test_the_metrics_of_a_run_are_in_the_glossary(tmp_path):
    evaluation = ["evaluation.max_prompts=2", "evaluation.num_images=1", "evaluation.steps=3"]
    small = [f"model={short_model()}", "steps=1", "prompts_per_step=2", "images_per_prompt=2", *evaluation]
    run("train", "tiny_grpo", *small, cwd=tmp_path)
    (file,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    names = {name for line in file.read_text().splitlines() for name in json.loads(line)}
    assert len(names) > 30
    assert not {name for name in names if not documented(name)}


def test_the_stages_are_valid():
    (block,) = (block for block in blocks(METHODS, "yaml") if "stages:" in block)
    args = FlowGRPOConfig.from_yaml("tiny_grpo", [f"stages={json.dumps(yaml.safe_load(block)['stages'])}"])
    assert [(begin, part.objective.name) for begin, part in args.resolved_stages()] == [(0, "sft"), (20, "grpo")]


def test_the_objectives_of_the_methods_page_are_valid(tmp_path):
    sections = [block for block in blocks(METHODS, "yaml") if block.lstrip().startswith("objective:")]
    assert sections
    for block in sections:
        settings = {
            "sampling": {"steps": 10},
            "rewards": {"ocr": 1, "clip": 0},
            **yaml.safe_load(block),
        }
        (tmp_path / "page.yaml").write_text(yaml.safe_dump(settings))
        assert FlowGRPOConfig.from_yaml(tmp_path / "page.yaml").objective.name == settings["objective"]["name"]


@functools.cache
def help_text(*verb: str) -> str:
    words = [sys.executable, "-m", "flow_grpo", *verb, "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("command", commands())
def test_every_command_parses_and_its_configs_are_valid(command):
    """Those that would download or train for minutes are only read; their settings go through the real config."""
    _, verb, *words = shlex.split(command)
    assert verb in ("train", "sample", "eval", "score", "compare", "doctor", "export", "plan", "rewards", "schema")
    if verb == "train":
        values = [place + 1 for place, word in enumerate(words) if word == "--num-processes"]
        plain = [word for place, word in enumerate(words) if not word.startswith("--") and place not in values]
        config = plain.pop(0) if plain and "=" not in plain[0] else "tiny_ocr"
        FlowGRPOConfig.from_yaml(config, plain)
    listed = help_text(verb, words[0]) if verb == "rewards" else help_text(verb)
    for word in words:
        if word.startswith("--"):
            assert word in listed


def test_the_readme_counts_the_rewards():
    assert re.search(rf"^{len(rewards.REGISTRY)} rewards are included", README.read_text(), re.MULTILINE)
