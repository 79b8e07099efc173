"""The command line through its real entry point: what a user types, sees and gets."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import short_run

from flow_grpo.grid import read_grid

ROOT = Path(__file__).parent.parent
REWARD = Path(__file__).parent / "sample_rewards.py"
CAT = 'red text "CAT" on a blue background'


def run(*words: str, cwd: Path, code: int = 0) -> str:
    """Runs flow-grpo and returns everything it wrote."""
    done = subprocess.run([sys.executable, "-m", "flow_grpo", *words], cwd=cwd, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output, output
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder in which a short run was trained."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "short.yaml").write_text(short_run(folder / "runs" / "short").dump())
    output = run("train", "short.yaml", cwd=folder)
    for foreign in ("warning", "Warning", "deprecat", "INFO", "Loading", "it/s"):
        assert foreign not in output, output
    return folder


def test_train_says_what_it_did_and_where_it_is(trained):
    output = run("train", "short.yaml", "output=runs/again", cwd=trained)
    for part in (
        "step 0  held out:",
        "step 2/2",
        "before",
        "after",
        "lora/pytorch_lora_weights.safetensors",
        "before_after.png",
    ):
        assert part in output.replace("\n", ""), output


def test_dry_run_checks_everything_and_trains_nothing(trained):
    output = run("train", "short.yaml", "output=runs/dry", "optimizer.lr=0.25", "--dry-run", cwd=trained)
    assert "lr: 0.25" in output
    assert "nothing was trained" in output
    assert not (trained / "runs" / "dry" / "metrics.jsonl").exists()


def test_sample_score_and_eval_agree_cell_by_cell(trained):
    lora = "runs/short/lora"
    run(
        "sample",
        CAT,
        'white text "HORSE" on a black background',
        "--seeds",
        "2",
        "--steps",
        "3",
        "--lora",
        lora,
        cwd=trained,
    )
    images, cells = read_grid(trained / "samples" / "grid.png")
    assert images.shape == (4, 3, 32, 80)
    assert [cell.seed for cell in cells] == [0, 1, 0, 1]
    assert [cell.prompt for cell in cells][:2] == [CAT, CAT]
    assert lora in cells[0].model
    reward = f"{REWARD}:brightness"
    for source, out in (("samples/grid.png", "grid.json"), ("samples", "folder.json")):
        output = run("score", source, "--reward", reward, "--reward", "color", "--out", out, cwd=trained)
        assert "mean" in output
    by_grid, by_folder = (json.loads((trained / name).read_text()) for name in ("grid.json", "folder.json"))
    assert [row[reward] for row in by_grid] == [row[reward] for row in by_folder]
    assert [row[reward] for row in by_grid] == pytest.approx(images.mean((1, 2, 3)).tolist())
    assert [row["prompt"] for row in by_grid] == [cell.prompt for cell in cells]


def test_eval_of_a_run_measures_with_and_without_its_lora(trained):
    output = run("eval", "runs/short", cwd=trained)
    assert "base" in output
    assert "LoRA" in output
    found = json.loads((trained / "runs" / "short" / "eval.json").read_text())
    logged = [json.loads(line) for line in (trained / "runs" / "short" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in logged if "eval/reward" in row]
    assert found["base"]["reward"] == pytest.approx(held_out[0]["eval/reward"], abs=1e-5)
    assert found["LoRA"]["reward"] == pytest.approx(held_out[-1]["eval/reward"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "no_such"], "there is no config no_such"),
        (["train", "short.yaml", "stepz=3"], "there is no setting stepz. Did you mean steps?"),
        (["train", "short.yaml"], "already holds a run"),
        (["train", "short.yaml", "model=./nowhere", "output=runs/x"], "there is no model folder ./nowhere"),
        (["train", "short.yaml", "microbatch=3", "output=runs/x"], "microbatch=3 does not divide"),
        (["train", "short.yaml", "prompts=missing.txt", "output=runs/x"], "there is no prompt file missing.txt"),
        (["train", "short.yaml", "rewards={orc: 1}", "output=runs/x"], "Did you mean ocr?"),
        (["train", "short.yaml", "device=warp", "output=runs/x"], "device=warp can't be used here"),
        (["train", "short.yaml", "output=short.yaml"], "short.yaml"),
        (["sample", CAT, "--lora", "./missing"], "there is no LoRA at"),
        (["score", "missing.png"], "there is no picture or folder"),
        (["score", "short.yaml"], "could not be read"),
        (["eval", "runs"], "not a run folder"),
    ],
)
def test_a_mistake_gets_one_sentence(trained, words, sentence):
    started = time.monotonic()
    output = run(*words, cwd=trained, code=2)
    assert sentence in " ".join(output.split())
    assert len(output.strip().splitlines()) == 1
    assert time.monotonic() - started < 30


def test_help_names_every_verb_with_a_sentence(trained):
    output = run("--help", cwd=trained)
    for verb in ("train", "sample", "eval", "score"):
        assert re.search(rf"{verb}\s+\w+", output)
        assert "flow-grpo" in run(verb, "--help", cwd=trained)


def commands() -> list[str]:
    """The flow-grpo commands of the README's code blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("flow-grpo")]


def test_the_readme_has_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "pip install -e . && flow-grpo train\n" in text
    assert "pip install -e '.[test]' && pytest\n" in text


def test_the_readmes_python_runs(tmp_path):
    """The five-line reward and the trainer's example, as they stand there."""
    reward, trainer = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "my_reward.py").write_text(reward)
    (tmp_path / "example.py").write_text(trainer)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/fox/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"rewards/redness/mean", "rewards/jpeg_size/mean"} <= rows[0].keys()
    assert (tmp_path / "runs/fox/lora/pytorch_lora_weights.safetensors").exists()
    assert "model: tiny" in (tmp_path / "runs/fox/config.yaml").read_text()


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_parses_and_its_configs_are_valid(command):
    """Those that would download or train for minutes are only read; their settings go through the real config."""
    from flow_grpo.config import FlowGRPOConfig

    _, verb, *words = shlex.split(command)
    assert verb in ("train", "sample", "eval", "score")
    if verb == "train":
        plain = [word for word in words if not word.startswith("--")]
        config = plain.pop(0) if plain and "=" not in plain[0] else "tiny_ocr"
        FlowGRPOConfig.read(config, plain)
    listed = subprocess.run([sys.executable, "-m", "flow_grpo", verb, "--help"], capture_output=True, text=True, check=True)
    for word in words:
        if word.startswith("--"):
            assert word in listed.stdout
