"""Code that comes with the weights of others is not run, whatever their files say, and nobody is asked whether it may."""

import ast
import json
import logging
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from flow_grpo import rewards
from flow_grpo.errors import is_retryable
from flow_grpo.rewards.clip import CONFIG, FOLDER
from flow_grpo.rewards.downloads import NotDownloaded, downloads, hub_file, offline_mode

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()

class Theirs(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch) -> Path:
    """A folder in open_clip's format whose tokenizer brings code, and whose config allows it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    folder = tmp_path / "theirs"
    shutil.copytree(FOLDER, folder)
    content = json.loads((folder / CONFIG).read_text())
    content["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "theirs", "tokenizer_kwargs": {"trust_remote_code": True}}
    (folder / CONFIG).write_text(json.dumps(content))
    told = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "code.Theirs"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "code.py").write_text(CODE.format(marker=str(tmp_path / "it_ran")))
    return folder


@pytest.mark.parametrize("name", ["clip", "fidelity", "least_distance"])
def test_the_tokenizer_of_an_open_clip_folder_runs_no_code(theirs, name):
    with pytest.raises(ValueError, match=f"{name}: open_clip can't load local-dir:.*custom code"):
        rewards.load(name, model=f"local-dir:{theirs}")
    assert not (theirs.parent / "it_ran").exists()


def test_a_preference_head_runs_no_code_of_the_model_that_it_names(theirs):
    head = theirs.parent / "head"
    head.mkdir()
    save_file({"weight": torch.zeros(256)}, head / "head.safetensors")
    fitted = {"weight_decay": 1.0, "seed": 0, "votes": 1, "held_out_votes": 0, "accuracy": 1.0, "held_out_accuracy": None}
    (head / "head.json").write_text(json.dumps({"model": f"local-dir:{theirs}", "pretrained": None, **fitted}))
    with pytest.raises(ValueError, match="preference_head: open_clip can't load local-dir:"):
        rewards.load("preference_head", weights=str(head))
    assert not (theirs.parent / "it_ran").exists()


def test_a_library_that_passes_no_answer_on_is_refused_and_asks_nobody(theirs):
    """As diffusers loads the tokenizer of a pipeline."""
    from transformers import AutoTokenizer

    with pytest.raises(ValueError, match=r"custom code|trust_remote_code"), downloads(theirs):
        AutoTokenizer.from_pretrained(theirs)
    assert not (theirs.parent / "it_ran").exists()


def test_every_auto_class_is_told_to_run_no_code():
    """`AutoTokenizer.from_pretrained` and its like, of transformers, in all files of the package."""
    calls = [
        (file.name, ast.unparse(node))
        for folder in ("flow_grpo", "rewards")
        for file in (Path(rewards.__file__).parents[2] / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func))
    ]
    assert len(calls) >= 4
    assert [call for call in calls if "trust_remote_code=False" not in call[1]] == []


def test_two_threads_that_load_leave_logging_and_downloads_as_they_were():
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def first():
        with downloads(Path.cwd()):
            first_is_in.set()
            second_is_in.wait(0.5)
        first_is_out.set()

    def second():
        first_is_in.wait()
        with downloads(Path.cwd()):
            second_is_in.set()
            first_is_out.wait()

    before = logging.root.manager.disable, constants.HF_HUB_OFFLINE
    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (logging.root.manager.disable, constants.HF_HUB_OFFLINE) == before


def test_a_file_that_offline_mode_keeps_away_is_not_blamed_on_the_hub():
    with (
        pytest.raises(NotDownloaded, match=r"^x of nobody/nothing: not in the cache, and HF_HUB_OFFLINE is set\.$") as error,
        offline_mode(),
    ):
        hub_file("nobody/nothing", "x")
    assert not is_retryable(error.value)  # a launcher that restarts the command would do so for ever
