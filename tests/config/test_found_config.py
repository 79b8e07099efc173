"""A config.yaml that lies beside weights may come from anybody: what it names does not run, is not asked and is not written to."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from support.cli_process import run
from support.embedded import stir, tiny_policy
from support.fake_run import synthetic_run
from support.reward_servers import Stub

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy import hub
from flow_grpo.policy.loading import load_policy
from flow_grpo.run_folder import checkpoint, layout

EVIL = """
from pathlib import Path

Path({marker!r}).touch()

def reward(images, prompts):
    return images.mean((1, 2, 3))

def objective(seen, advantage):
    return advantage

def advantage(reward, group):
    return reward
"""
CAT = 'red text "CAT" on a blue background'


class Listening(Stub):
    """A server that notes who came."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def answer(self, path: str, body: bytes) -> tuple[int, dict | str]:
        self.asked.append(path)
        return 200, {"rewards": ["color"], "versions": {}, "values": [1.0]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A run folder with all that a verb reads of one: metrics, pictures, a LoRA, a checkpoint."""
    folder = synthetic_run(tmp_path_factory.mktemp("found") / "run", steps=2, every=1, reward="color")
    policy = tiny_policy()
    policy.add_lora(4, 8, ["to_q"], seed=0)
    stir(policy)
    policy.lora.save(folder / "lora")
    checkpoint.save(folder / "checkpoints", 2, {"adapter": policy.adapter_state(), "ema": {}}, keep=1)
    return folder


@pytest.fixture
def run_with(weights, tmp_path):
    """That folder with a config that differs from a plain one by these settings; beside it evil.py and evil.sh, which leave a mark."""
    shutil.copytree(weights, tmp_path / "run")
    marker = tmp_path / "it_ran"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))
    (tmp_path / "evil.sh").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (tmp_path / "evil.sh").chmod(0o755)

    def made(**settings) -> Path:
        plain = FlowGRPOConfig.from_yaml(
            "tiny_grpo", ["trackers=[]", "microbatch=4", "lora={rank: 4, alpha: 8, targets: [to_q]}"]
        )
        values = plain.model_dump(mode="json")
        values |= {"rewards": {"color": 1.0}, "dtype": "fp32"}
        values["evaluation"] |= {"rewards": {}, "max_prompts": 2, "steps": 1}
        for key, value in settings.items():
            values[key] = (
                {**values[key], **value} if isinstance(value, dict) and key not in ("rewards", "objective") else value
            )
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(values))
        return tmp_path

    made.marker = marker
    return made


def kinds(folder: Path) -> list[str]:
    """All targets beside which eval finds the config of the folder's run."""
    shared, model = folder / "shared", folder / "model"
    for place in (shared, model):
        place.mkdir()
        shutil.copy(folder / "run" / "config.yaml", place)
        (place / layout.EXPORT_MANIFEST).write_text("{}")
    shutil.copy(folder / "run" / "lora" / hub.WEIGHTS, shared)
    shutil.copytree(hub.BUNDLED_MODELS["tiny"], model, dirs_exist_ok=True)
    return ["run", "run/checkpoints/step_000002", "run/lora", f"run/lora/{hub.WEIGHTS}", "shared", "model"]


NAMED = [
    ({"rewards": {"evil.py:reward": 1.0}}, "names the reward evil.py:reward: add --trust if you wrote it, or give others by --reward"),
    ({"rewards": {"evil:reward": 1.0}}, "the reward evil:reward"),
    ({"evaluation": {"rewards": {"evil.py:reward": 0.0}}}, "the reward evil.py:reward"),
    ({"rewards": {"evil.py:reward": {"isolate": True}}}, "the reward evil.py:reward"),
    ({"rewards": {"color": {"isolate": "./evil.sh"}}}, "the program ./evil.sh for the reward color"),
    ({"rewards": {"color": {"remote": "URL"}}}, "the server URL for the reward color"),
    ({"rewards": {"remote": {"options": {"urls": "URL", "reward": "color"}}}}, "the reward remote"),
    ({"rewards": {"judge": {"options": {"url": "URL", "model": "m"}}}}, "the reward judge"),
    ({"rewards": {"human": {"options": {"votes": "it_ran"}}}}, "the reward human"),
    ({"rewards": {"clip": {"options": {"pretrained": "URL"}}}}, "'URL' in the options of the reward clip"),
    ({"rewards": {"clip": {"options": {"model": "local-dir:theirs"}}}}, "'local-dir:theirs' in the options of the reward clip"),
    ({"rewards": {"ocr": {"options": {"a": [{"b": ["./x"]}]}}}}, "'./x' in the options of the reward ocr"),
    ({"rewards": {"fidelity": {"options": {"model": "hf-hub:they/theirs"}}}}, "'hf-hub:they/theirs' in the options of"),
    ({"rewards": {"preference_head": {"options": {"weights": "run"}}}}, "'run' in the options of the reward preference_head"),
    ({"evaluation": {"prompts": "https://127.0.0.1:1/prompts.txt"}}, "the prompts https://127.0.0.1:1/prompts.txt"),
    ({"memory": {"embedding_cache_dir": "it_ran"}}, "the folder it_ran to keep embeddings in"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), NAMED)
def test_eval_refuses_what_a_found_config_names(run_with, settings, sentence):
    server = Listening()
    text = json.dumps(settings).replace("URL", server.url)
    folder = run_with(**json.loads(text))
    output = " ".join(run("eval", "run", cwd=folder, code=2).split())
    assert "error: run/config.yaml is next to the weights, so that anybody may have written it, and names " in output
    assert sentence.replace("URL", server.url) in output
    assert "--trust" in output
    assert not run_with.marker.exists()
    assert server.asked == []
    server.close()


def test_whatever_of_a_run_or_an_export_eval_is_given(run_with):
    folder = run_with(rewards={"evil.py:reward": 1.0})
    for target in kinds(folder):
        assert "names the reward evil.py:reward" in run("eval", target, cwd=folder, code=2), target
    words = ["eval", "tiny_grpo", "--lora", "shared", "--limit", "1", "--steps", "1", "--reward", "color"]
    run(*words, cwd=folder)  # the first target's config is the user's own, and says what is measured
    assert not run_with.marker.exists()


@pytest.mark.parametrize("words", [("tiny_grpo", "run"), ("tiny_grpo", "--lora", "run")])
def test_the_config_of_a_second_target_is_checked_too(run_with, words):
    folder = run_with(memory={"embedding_cache_dir": "it_ran"})
    assert "the folder it_ran to keep embeddings in" in run("eval", *words, "--reward", "color", cwd=folder, code=2)
    assert not run_with.marker.exists()


@pytest.mark.parametrize("words", [("tiny_grpo", "run"), ("tiny_grpo", "--lora", "run")])
def test_the_rewards_of_a_second_target_are_checked_too(run_with, words):
    folder = run_with(rewards={"evil.py:reward": 1.0})
    assert "names the reward evil.py:reward" in run("eval", *words, cwd=folder, code=2)
    assert not run_with.marker.exists()


def test_code_named_on_the_command_line_or_trusted_is_run(run_with):
    """What is named on the command line is trusted, and --trust is for all that the found config names."""
    folder = run_with(rewards={"evil.py:reward": 1.0, "color": 1.0})
    assert "names the reward evil.py:reward" in run("eval", "run", "rewards.evil.py:reward=2", cwd=folder, code=2)
    run("eval", "run", "--reward", "color", cwd=folder)
    run("eval", "run", "rewards={color: 1}", cwd=folder)
    assert not run_with.marker.exists()
    assert {"reward_2", "reward"} <= measured(run("eval", "run", "--trust", cwd=folder), folder)
    assert run_with.marker.exists()
    run_with.marker.unlink()
    named = ["run/config.yaml", "--lora", "run/lora", "--reward", "evil.py:reward", "--limit", "1"]
    assert "reward_2" in measured(run("eval", *named, "--out", "run", cwd=folder), folder)
    assert run_with.marker.exists()


def measured(output: str, folder: Path) -> set[str]:
    assert "numbers: run/eval.json" in output
    return set(json.loads((folder / "run" / "eval.json").read_text())["targets"]["base"]["measures"])


def test_sample_export_report_and_compare_run_nothing_of_a_found_config(run_with):
    folder = run_with(
        rewards={"evil.py:reward": 1.0, "color": {"isolate": "./evil.sh"}},
        objective={"name": "evil.py:objective", "advantage": "evil.py:advantage"},
        trackers={"wandb": {}},
        output_dir=str(run_with.marker),
    )
    run("sample", CAT, "--lora", "run/lora", "--seeds", "1", "--steps", "1", cwd=folder)
    run("export", "run", "--out", "shared", cwd=folder)
    run("sample", CAT, "--lora", "shared", "--seeds", "1", "--steps", "1", cwd=folder)
    run("report", "run", cwd=folder)
    (folder / "other" / "tiny_grpo" / "seed0").mkdir(parents=True)
    shutil.copy(folder / "run" / "config.yaml", folder / "other" / "tiny_grpo" / "seed0")
    (folder / "other" / "tiny_grpo" / "seed0" / "curve.jsonl").write_text(
        '{"evaluation": 0, "step": 0, "seconds": 0, "images": 0, "kl": 0, "memory_mb": 0, "extra_parameters": 0, "values": {"reward": 0}}\n'
    )
    assert "started with other settings" in run("compare", "tiny_grpo", "--out", "other", cwd=folder, code=2)
    assert not run_with.marker.exists()


def test_sample_does_not_write_where_a_found_config_says(run_with):
    folder = run_with(memory={"embedding_cache_dir": "it_ran"})
    words = ["sample", CAT, "--lora", "run/lora", "--seeds", "1", "--steps", "1"]
    assert "the folder it_ran to keep embeddings in: add --trust" in run(*words, cwd=folder, code=2)
    assert not run_with.marker.exists()
    run(*words, "--trust", cwd=folder)
    assert run_with.marker.exists()


def test_a_run_that_is_resumed_is_the_config_that_the_user_names(run_with):
    folder = run_with(rewards={"evil.py:reward": 1.0})
    words = ["train", "tiny_grpo", "output_dir=run", "trackers=[]", "evaluation.prompts=null", "--resume"]
    output = run(*words, cwd=folder, code=2)
    assert output.count("error:") == 1
    assert not run_with.marker.exists()


def test_images_bring_prompts_and_no_rewards(run_with):
    folder = run_with(rewards={"evil.py:reward": 1.0})
    pictures = folder / "pictures"
    pictures.mkdir()
    shutil.copy(next((folder / "run").rglob("*.webp")), pictures / "a.webp")
    row = {"file_name": "a.webp", "prompt": CAT, "rewards": "evil.py:reward", "reward": "evil.py:reward"}
    (pictures / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copy(folder / "run" / "config.yaml", folder)
    run("score", "pictures", "--reward", "color", cwd=folder)
    run("eval", "pictures", "--reward", "color", cwd=folder)
    assert "give --reward" in run("eval", "pictures", cwd=folder, code=2)
    assert not run_with.marker.exists()


@pytest.mark.parametrize(
    ("words", "entry", "sentence"),
    [
        (("doctor", "--model", "model"), ("scheduler", "evil"), "the model model contains Python code"),
        (("sample", CAT, "--model", "model"), ("scheduler", "diffusers"), "the model model contains Python code"),
        (("train", "model=model", "--dry-run"), ("_class_name", "evil"), "which is no pipeline of diffusers"),
    ],
)
def test_the_code_of_a_model_folder_is_not_run(run_with, words, entry, sentence):
    folder = run_with()
    shutil.copytree(hub.BUNDLED_MODELS["tiny"], folder / "model")
    component, library = entry
    index = json.loads((folder / "model" / hub.INDEX).read_text())
    index[component] = [library, "FlowMatchEulerDiscreteScheduler"]
    (folder / "model" / hub.INDEX).write_text(json.dumps(index))
    place = folder / "model" / ("" if component == "_class_name" else component) / f"{library}.py"
    shutil.copy(folder / "evil.py", place)
    assert sentence in run(*words, cwd=folder, code=2)
    assert not run_with.marker.exists()


class Mark:
    """What a pickle does that is read as pickles are."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_pickles_of_others_are_not_unpickled(tmp_path):
    marker, lora = tmp_path / "it_ran", tmp_path / "lora"
    folder = checkpoint.save(tmp_path / "checkpoints", 1, {"adapter": Mark(marker)}, keep=1)
    with pytest.raises(ValueError, match="torch can't read it, UnpicklingError"):
        checkpoint.read(folder.parent, 1)
    lora.mkdir()
    torch.save({"x": Mark(marker)}, lora / "pytorch_lora_weights.bin")
    policy = tiny_policy()
    with pytest.raises(ValueError, match="could not be loaded"):
        policy.load_lora(lora)
    shutil.copytree(hub.BUNDLED_MODELS["tiny"], tmp_path / "model")
    weights = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save({"x": Mark(marker)}, weights.with_suffix(".bin"))
    with pytest.raises(ValueError, match="could not be loaded"):
        load_policy(str(tmp_path / "model"), "cpu", "fp32")
    assert not marker.exists()
