"""What a resumed run may change: settings by one table, and files by their content."""

import json
import re
import shutil

import pytest
from support import small_policy as small
from support.embedded import short_run
from support.paths import ROOT

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective_by_name import OBJECTIVES
from flow_grpo.config.settings import RunSettings
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.opening import RESUMABLE, changes
from flow_grpo.training.inputs import BLOCK, WHOLE_FILE, digests_of_inputs, digests_of_model, file_digest

REWARD = "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
WORDS = "one\ntwo\nthree\nfour\n"


@pytest.fixture
def began(tmp_path, monkeypatch, no_report):
    """A run of one step on files of its own, and a function that resumes it with other settings; it returns what is printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(WORDS)
    (tmp_path / "mine.py").write_text(REWARD)
    small.trainer(args_of("steps=1")).train()
    return tmp_path


def args_of(*overrides, reward="mine.py:redness"):
    common = [
        f"rewards={json.dumps({reward: 1})}",
        "prompts=words.txt",
        "evaluation={prompts: null}",
        "trackers=[]",
        "lora.rank=2",
    ]
    return short_run("run", *common, *overrides)


def resume(*overrides, **more):
    small.trainer(args_of("steps=2", *overrides, **more)).train(resume=True)


@pytest.mark.parametrize(
    "override", ["seed=5", "lora.rank=8", "objective.clip_high=0.5", "optimizer.lr=1", "rewards.redness.weight=2"]
)
def test_a_setting_that_changes_the_numbers_is_refused_by_its_name(began, override):
    if override.startswith("rewards"):
        override = 'rewards={"mine.py:redness": 2}'
        name = "rewards.redness.weight"
    else:
        name = override.partition("=")[0]
    with pytest.raises(ValueError, match=rf"run was begun with {re.escape(name)}=\S+, not \S+: resume it with the same"):
        resume(override)


def test_harmless_settings_may_change_and_are_said_in_a_line(began, capsys):
    settings = {
        "microbatch": "4",
        "memory.gradient_checkpointing": "true",
        "memory.embedding_cache_dir": str(began / "cache"),
        "save_every": "1",
        "evaluation.every": "3",
        "dtype": "fp32",
    }
    resume(*(f"{name}={value}" for name, value in settings.items()))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "resumed with other settings" in line)
    assert "microbatch=4 (it was 8)" in line
    assert "output_dir" not in line
    assert "seed" not in line


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [("words.txt", WORDS.upper(), "prompts"), ("mine.py", REWARD + "\n", "rewards.redness")],
)
def test_a_file_with_another_content_is_refused_until_it_is_back_or_accepted(began, file, content, name):
    former = (began / file).read_text()
    (began / file).write_text(content)
    with pytest.raises(ValueError, match=f"the content of {name} has changed since run was begun"):
        resume()
    (began / file).write_text(former)
    resume()
    (began / file).write_text(content)
    (began / "run" / layout.INPUTS).unlink()
    small.trainer(args_of("steps=3")).train(resume=True)
    (began / file).write_text(former)
    with pytest.raises(ValueError, match="the content of"):
        resume("steps=4")


def test_moved_files_of_the_same_content_are_the_same_run(began, capsys):
    (began / "other").mkdir()
    for file in ("words.txt", "mine.py"):
        shutil.move(began / file, began / "other" / file)
    resume("prompts=other/words.txt", reward="other/mine.py:redness")
    assert "prompts=other/words.txt (it was words.txt)" in capsys.readouterr().out


def test_a_function_given_in_python_is_compared_by_its_source(began):
    def one(images, prompts):
        return images.mean((1, 2, 3))

    def another(images, prompts):
        return images.amax((1, 2, 3))

    one.__name__ = another.__name__ = "brightness"
    args = short_run("functions", "evaluation={prompts: null}", "trackers=[]", "steps=1")
    small.trainer(args, reward_funcs=[one]).train()
    args.steps = 2
    with pytest.raises(ValueError, match=r"the content of rewards\.brightness"):
        small.trainer(args, reward_funcs=[another]).train(resume=True)
    small.trainer(args, reward_funcs=[one]).train(resume=True)


def test_prompts_given_in_python_are_compared_by_content(began):
    args = args_of("output_dir=lists", "steps=1")
    small.trainer(args, train_dataset=["a", "b", "c"]).train()
    args.steps = 2
    with pytest.raises(ValueError, match="the content of prompts has changed"):
        small.trainer(args, train_dataset=["a", "b", "d"]).train(resume=True)
    small.trainer(args, train_dataset=["a", "b", "c"]).train(resume=True)


def test_a_run_of_0_4_without_digests_resumes_and_says_what_is_not_seen(began, capsys):
    (began / "run" / layout.INPUTS).unlink()
    (began / "mine.py").write_text(REWARD + "\n")
    resume()
    assert "run has no readable inputs.json: changes of its prompts" in capsys.readouterr().out
    assert json.loads((began / "run" / layout.INPUTS).read_text())["digests"]["prompts"]


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        (layout.CONFIG, "run has no config.yaml: changes of its settings since it was begun are not seen."),
        (layout.METRICS, "run/metrics.jsonl has no row of 1 of the 1 steps so far: curves and tables lack them."),
    ],
)
def test_a_run_that_lost_a_file_is_resumed_with_a_warning(began, capsys, file, sentence):
    (began / "run" / file).unlink()
    resume()
    assert f"warning: {sentence}" in capsys.readouterr().out


def test_a_path_resumes_from_that_checkpoint_and_one_elsewhere_is_refused(began):
    resume("save_every=1")
    trainer = small.trainer(args_of("steps=3", "save_every=1"))
    begun_at = []
    trainer.callbacks.callbacks.append(type("At", (), {"on_train_begin": lambda *a, **k: begun_at.append(trainer.step)})())
    trainer.train(resume=began / "run" / "checkpoints" / "step_000001")
    assert begun_at == [1]
    small.trainer(args_of("steps=3")).train(resume="run")
    for path in ("elsewhere", "run/checkpoints/step_000077", "run/lora"):
        with pytest.raises(ValueError, match=f"resume={path} is neither the run folder run nor one of its checkpoints"):
            small.trainer(args_of("steps=3")).train(resume=path)


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_name_in_the_table_is_a_setting():
    for name in (name for names in RESUMABLE.values() for name in names):
        section, first = RunSettings, name.split(".")[0]
        assert first in section.model_fields, name
        if first == "objective":
            assert any(name.split(".")[1] in kind.model_fields for kind in OBJECTIVES.values()), name
            continue
        for part in name.split(".") if "*" not in name else []:
            field = section.model_fields[part]
            section = field.annotation if hasattr(field.annotation, "model_fields") else section


@pytest.mark.parametrize(
    ("then", "now", "resumable"),
    [
        (
            {"rewards": {"ocr": {"remote": "http://a:1"}}},
            {"rewards": {"ocr": {"remote": ["http://b:1", "http://c:1"]}}},
            True,
        ),
        ({"rewards": {"ocr": {}}}, {"rewards": {"ocr": {"options": {"attempts": 9}}}}, True),
        ({"rewards": {"ocr": {}}}, {"rewards": {"ocr": {"options": {"several_lines": True}}}}, False),
        ({"rewards": {"ocr": {}}}, {"rewards": {"ocr": {}, "clip": {}}}, False),
        ({}, {"trackers": ["wandb"]}, True),
        ({}, {"evaluation": {"steps": 7}}, False),
        ({}, {"evaluation": {"rewards": ["clip"]}}, True),
        ({"prompts": "a.txt"}, {"prompts": "b.txt"}, False),
        ({"stages": [{"steps": 1}, {"steps": 1}]}, {"stages": [{"steps": 1}, {"steps": 9}]}, True),
        ({"stages": [{"steps": 1}, {"steps": 1}]}, {"stages": [{"steps": 2}, {"steps": 1}]}, False),
        ({"stages": [{"steps": 1}]}, {"stages": [{"steps": 1, "microbatch": 2}]}, True),
        ({"stages": [{"steps": 1}]}, {"stages": [{"steps": 1, "updates": 2}]}, False),
    ],
)
def test_what_may_change(then, now, resumable):
    found = changes(FlowGRPOConfig(**then), FlowGRPOConfig(**now), {}, {})
    assert found
    assert all(change.resumable for change in found) is resumable


def test_equal_configs_have_no_changes():
    args = FlowGRPOConfig.from_yaml("tiny_ocr")
    assert not changes(args, FlowGRPOConfig.from_yaml("tiny_ocr"), {"model": "1"}, {"model": "1"})


def test_the_docs_list_the_settings_of_the_table():
    section = (ROOT / "docs" / "run_folder.md").read_text().partition("## What may change")[2]
    listed = set(re.findall(r"`([a-z_*.]+)`", section.partition("Of a run with stages")[0]))
    assert listed == {name for names in RESUMABLE.values() for name in names}


# -- digests ---------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_large_file_sees_other_weights_of_the_same_size(tmp_path):
    size = WHOLE_FILE + BLOCK
    digests = []
    for byte in (0, 1):
        file = tmp_path / str(byte)
        file.write_bytes(bytes([byte]) * size)
        digests.append(file_digest(file))
    assert digests[0] != digests[1]
    with (tmp_path / "0").open("rb+") as stream:
        stream.seek(size - 1)
        stream.write(b"x")
    assert file_digest(tmp_path / "0") not in digests


def test_a_lora_and_a_file_in_a_reward_s_options_are_inputs(tmp_path):
    (tmp_path / "head.bin").write_bytes(b"1")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"1")
    args = FlowGRPOConfig(
        lora={"init_from": str(tmp_path / "lora")},
        rewards={"preference_head": {"options": {"weights": str(tmp_path / "head.bin"), "name": "a text"}}},
    )

    def digests():
        return digests_of_inputs(args, small.PROMPTS, None)

    before = digests()
    assert set(before) == {"prompts", "lora.init_from", "rewards.preference_head.options.weights"}
    (tmp_path / "head.bin").write_bytes(b"2")
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"2")
    assert {name for name, digest in digests().items() if digest != before[name]} == {
        "lora.init_from",
        "rewards.preference_head.options.weights",
    }


def test_the_parts_of_a_model_are_its_content(tmp_path):
    (tmp_path / "model" / "vae").mkdir(parents=True)
    (tmp_path / "model" / "vae" / "model.safetensors").write_bytes(b"1")

    def digest(folder):
        return digests_of_model(str(folder), small.torch.float32)["model"]

    before = digest(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("a note")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    assert digest(tmp_path / "copy") == before
    (tmp_path / "copy" / "vae" / "model.safetensors").write_bytes(b"2")
    assert digest(tmp_path / "copy") != before


def test_auto_starts_a_run_and_goes_on_with_it_as_a_restarting_launcher_does(began, monkeypatch, capsys):
    for resume in ("auto", None):
        capsys.readouterr()
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3" if resume is None else "0")
        small.trainer(args_of("steps=2")).train(resume=resume)
        assert "resumed at step " in capsys.readouterr().out
    small.trainer(args_of("steps=1", "output_dir=anew")).train(resume="auto")
    assert "resumed" not in capsys.readouterr().out
