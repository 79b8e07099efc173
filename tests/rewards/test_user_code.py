"""Code that a user wrote can neither end a run as a success nor change it without a word, and its errors say where they are."""

import json
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from support import small_policy as small
from support.cli_process import begin, run
from support.embedded import short_run
from support.run_contents import MEASURED

from flow_grpo import rewards
from flow_grpo.rewards import user_code
from flow_grpo.rewards.serving import server
from flow_grpo.rewards.serving.client import encode
from flow_grpo.rewards.serving.subprocess import Isolated
from flow_grpo.rewards.user_code import UserCodeError
from flow_grpo.training.custom_functions import load_custom_function

IMAGES, PROMPTS = torch.zeros(2, 3, 4, 4), ["a fox", "a cat"]
EXITS = """
import sys

def at_call(images, prompts):
    sys.exit(0)

class AtBuild:
    def __init__(self):
        raise SystemExit

    def __call__(self, images, prompts):
        return [0.0] * len(prompts)
"""
AT_IMPORT = "import sys\n\nsys.exit()\n\ndef reward(images, prompts):\n    return [0.0] * len(prompts)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with files of rewards that end the process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exits.py").write_text(EXITS)
    (tmp_path / "at_import.py").write_text(AT_IMPORT)
    (tmp_path / "short.yaml").write_text(short_run(tmp_path / "run").to_yaml())
    return tmp_path


def written(folder: Path, text: str, name: str = "mine") -> str:
    """The path of a reward file that the test has all of its own."""
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


# -- it can't end the run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("at_import.py:reward", "the reward file at_import.py could not be run: SystemExit: no message (at_import.py:3: `sys.exit()`)"),
        ("exits.py:AtBuild", "reward exits.py:AtBuild could not be built: SystemExit: no message (exits.py:9 in "),
        ("exits.py:at_call", "reward at_call raised SystemExit on 8 images, the first for the prompt "),
    ],
)  # fmt: skip
def test_a_reward_that_exits_stops_a_run_with_an_error(folder, reward, sentence):
    output = run("train", "short.yaml", f"rewards={{{reward}: 1}}", "evaluation.prompts=null", cwd=folder, code=2)
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert sentence in said[0]
    if "at_" in reward and "import" not in reward:
        assert (folder / "run" / "checkpoints" / "step_000000").is_dir(), "the run can be resumed with a better reward"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("train", "short.yaml", "rewards={at_import.py:reward: 1}", "--dry-run"), 2),
        (("plan", "short.yaml", "rewards={exits.py:at_call: 1}"), 2),
        (("doctor", "short.yaml", "rewards={exits.py:at_call: 1}", "evaluation.prompts=null"), 2),
        (("doctor", "short.yaml", "rewards={exits.py:AtBuild: 1}"), 2),
        (("rewards", "info", "at_import.py:reward"), 2),
        (("rewards", "test", "exits.py:at_call", "--images", "images", "--prompts", "prompts.txt"), 2),
        (("score", "images", "--prompts", "prompts.txt", "--reward", "exits.py:at_call"), 2),
        (("eval", "images", "--prompts", "prompts.txt", "--reward", "exits.py:AtBuild"), 2),
        (("serve", "exits.py:AtBuild", "--port", "0"), 2),
    ],
)
def test_no_verb_ends_as_a_success_when_a_reward_exits(folder, words, code):
    (folder / "images").mkdir()
    for i in range(2):
        Image.new("RGB", (8, 8)).save(folder / "images" / f"{i}.png")
    (folder / "prompts.txt").write_text("a fox\na cat\n")
    assert "SystemExit" in run(*words, cwd=folder, code=code)


def test_a_warning_of_a_reward_is_shown_once_and_those_of_libraries_are_not(folder):
    (folder / "images").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "images" / "0.png")
    library = "warnings.warn_explicit('of a library', UserWarning, 'library.py', 1, module='library')"
    body = f"    warnings.warn('going away')\n    {library}\n    return images.mean((1, 2, 3))\n"
    (folder / "warns.py").write_text(f"import warnings\ndef warns(images, prompts):\n{body}")
    output = run("score", "images", "--prompt", "a fox", "--reward", "warns.py:warns", cwd=folder)
    assert output.count("UserWarning: going away") == 1
    assert "of a library" not in output


def test_other_ways_to_end_a_process_are_errors_too(folder):
    """An exception that is none of Exception's, and Ctrl-C's own where it can't come from Ctrl-C, in a thread."""
    mad = "class Mad(BaseException): pass\ndef mad(images, prompts): raise Mad('really')\n"
    file = written(folder, f"{mad}def key(images, prompts): raise KeyboardInterrupt\n")
    with pytest.raises(ValueError, match=r"reward mad raised Mad on 2 images.*: really \(mine.py:2 in mad"):
        rewards.score("mad", rewards.load(f"{file}:mad"), IMAGES, PROMPTS)
    key, seen = rewards.load(f"{file}:key"), []

    def in_a_thread():
        try:
            rewards.score("key", key, IMAGES, PROMPTS)
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert isinstance(seen[0], UserCodeError)
    with pytest.raises(KeyboardInterrupt):  # as Ctrl-C raises it in the main thread
        rewards.score("key", key, IMAGES, PROMPTS)


def test_an_isolated_reward_that_exits_says_where_and_one_that_native_code_ends_stops_the_run_too(folder):
    text = """
import ctypes, sys

def reward(images, prompts):
    if "native" in prompts:
        ctypes.CDLL(None)._exit(0)
    if "fail" in prompts:
        sys.exit(0)
    return images.mean((1, 2, 3))
"""
    file = f"{written(folder, text)}:reward"
    isolated = Isolated(file)
    assert rewards.score("mine", isolated, IMAGES, PROMPTS).tolist() == [0, 0]
    with pytest.raises(
        ValueError, match=r": reward [^:]*mine.py:reward raised SystemExit on 2 images.*: 0 \(mine.py:8 in reward: `sys"
    ):
        rewards.score("mine", isolated, IMAGES, ["fail", "a cat"])
    with pytest.raises(ValueError, match=r"reward mine raised an error .*(its process ended|no server is left)"):
        rewards.score("mine", isolated, IMAGES, ["native", "a cat"])


def test_a_served_reward_that_exits_leaves_its_server_alive(folder):
    loaded = {"exits": rewards.load("exits.py:at_call"), "fine": lambda images, prompts: [1.0] * len(prompts)}
    client = TestClient(server.application(loaded, None, server.Limits()), base_url="http://localhost")

    def ask(name: str):
        return client.post("/score", **encode(IMAGES, {"reward": name, "prompts": PROMPTS, "metadata": {}}, "float"))

    refused = ask("exits")
    assert refused.status_code == 422
    assert "SystemExit on 2 images" in refused.json()["detail"]
    assert "exits.py:5 in at_call" in refused.json()["detail"]
    assert ask("fine").json() == {"values": [1.0, 1.0]}


# -- its errors say where they are ------------------------------------------------------------------------------------


def test_a_reward_without_memory_is_named_in_an_error_of_both_kinds(folder):
    """One for whoever can do with less memory, and one with a sentence for everyone else."""
    file = written(folder, "import torch\n\ndef large(images, prompts):\n    raise torch.OutOfMemoryError('of 80 GB')\n")
    with pytest.raises(
        UserCodeError, match=r"reward large raised OutOfMemoryError on 2 images.*: of 80 GB \(mine.py:4"
    ) as caught:
        rewards.score("large", rewards.load(f"{file}:large"), IMAGES, PROMPTS)
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_an_error_names_file_line_function_and_source(folder):
    text = """
import torch

def inner(metadata):
    x = metadata["oops"]
    return x

def redness(images, prompts, **metadata):
    return inner(metadata)

class Red:
    def __call__(self, images, prompts):
        return torch.cat([images[0], images])
"""
    file = written(folder, text)
    with pytest.raises(UserCodeError) as caught:
        rewards.score("redness", rewards.load(f"{file}:redness"), IMAGES, PROMPTS)
    assert str(caught.value) == (
        "reward redness raised KeyError on 2 images, the first for the prompt 'a fox': 'oops' "
        '(mine.py:5 in inner: `x = metadata["oops"]`)'
    )
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UserCodeError, match=r"\(mine.py:13 in (Red\.)?__call__: `return torch.cat\("):  # not torch's own
        rewards.score("red", rewards.load(f"{file}:Red"), IMAGES, PROMPTS)


def test_a_reward_file_may_be_a_link_to_any_name(folder):
    (folder / "shared_v2").write_text("def bright(images, prompts):\n    return images.mean((1, 2, 3))\n")
    (folder / "linked.py").symlink_to("shared_v2")
    assert rewards.load(f"{folder / 'linked.py'}:bright")(IMAGES, PROMPTS).shape == (len(PROMPTS),)
    (folder / "image.webp").write_bytes(bytes(range(256)))
    (folder / "picture.py").symlink_to("image.webp")
    with pytest.raises(ValueError, match="could not be run"):
        rewards.load(f"{folder / 'picture.py'}:bright")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import torch\nx = 1 +\n", "SyntaxError: invalid syntax (mine.py, line 2) (mine.py:2: `x = 1 +`)"),
        ("import torch\n\nimport no_such_thing\n", "No module named 'no_such_thing' (mine.py:3: `import no_such_thing`)"),
    ],
)
def test_a_file_that_can_not_be_imported_says_where(folder, text, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rewards.load(f"{written(folder, text)}:reward")


def test_an_error_of_a_reward_of_ours_shows_no_line_of_its_code():
    with pytest.raises(ValueError, match=r"has nothing to read[^(]*$"):
        rewards.score("ocr", rewards.load("ocr"), torch.zeros(1, 3, 32, 64), ["a fox"])


@pytest.mark.parametrize("kind", ["objective", "advantage"])
def test_objectives_and_advantages_say_where_they_failed(folder, kind):
    file = written(folder, "def mine(one, other):\n    raise SystemExit(3)\n", f"my_{kind}")
    function = load_custom_function(kind, f"{file}:mine")
    with pytest.raises(ValueError, match=rf"{kind} .*:mine raised SystemExit: 3 \(my_{kind}.py:2 in mine: `raise"):
        function(None, None)


def test_the_whole_traceback_is_there_for_those_who_ask(folder, monkeypatch, capfd):
    file = written(folder, "def bad(images, prompts):\n    return prompts[9]\n")
    reward = rewards.load(f"{file}:bad")
    for wanted in ("", "1"):
        monkeypatch.setenv(user_code.TRACEBACK, wanted)
        with pytest.raises(ValueError, match="IndexError"):
            rewards.score("bad", reward, IMAGES, PROMPTS)
        assert ("Traceback (most recent call last)" in capfd.readouterr().err) == bool(wanted)


def test_the_command_line_shows_tracebacks_wherever_it_is_asked(folder):
    (folder / "images").mkdir()
    for words in (("--traceback", "score", "nowhere.png"), ("score", "nowhere.png", "--traceback")):
        command = begin(*words, cwd=folder)
        command.process.join(180)
        assert command.process.exitcode == 2
        assert "Traceback (most recent call last)" in command.output
        assert command.output.splitlines()[-1].startswith("error: there is no image or folder nowhere.png")
    assert "--traceback" in run("--help", cwd=folder)


# -- it can't change the run without a word ---------------------------------------------------------------------------

CHANGES = {
    "torch's default dtype": "torch.set_default_dtype(torch.float64)",
    "torch's default device": "torch.set_default_device('meta')",
    "torch's number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "torch.use_deterministic_algorithms": "torch.use_deterministic_algorithms(True)",
    "torch's float32 matmul precision": "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cudnn.benchmark": "torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic": "torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic",
    "the working directory": "os.chdir('..')",
}


def settings() -> dict:
    return {what: get() for what, (get, _) in user_code.SETTINGS.items()}


@pytest.mark.parametrize("when", ["import", "build", "call"])
@pytest.mark.parametrize("what", [*CHANGES, "torch's grad mode"])
def test_a_setting_of_the_process_is_set_back_and_named_once(folder, capfd, what, when):
    change = CHANGES.get(what, "torch.set_grad_enabled(False)")
    lines = {moment: change if moment == when else "pass" for moment in ("import", "build", "call")}
    file = written(
        folder,
        f"import os, torch\n{lines['import']}\nclass Mine:\n    def __init__(self):\n        {lines['build']}\n"
        f"    def __call__(self, images, prompts):\n        {lines['call']}\n        return [1.0] * len(prompts)\n",
        f"m{abs(hash((what, when)))}",
    )
    before, name = settings(), Path(file).stem
    reward = rewards.load(f"{file}:Mine")
    for _ in range(2):
        assert rewards.score(name, reward, IMAGES, PROMPTS).tolist() == [1, 1]
    assert settings() == before
    said = [line for line in capfd.readouterr().err.splitlines() if "for the whole process" in line]
    if what == "torch's grad mode" and when == "call":  # rewards run without gradients anyway
        assert said == []
    else:
        assert len(said) == 1
        assert f"changed {what} from" in said[0]
        assert name in said[0]


def test_settings_are_set_back_when_the_reward_fails_too(folder):
    file = written(
        folder, "import torch\ndef bad(images, prompts):\n    torch.set_default_dtype(torch.float64)\n    1 / 0\n"
    )
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        rewards.score("bad_dtype", rewards.load(f"{file}:bad"), IMAGES, PROMPTS)
    assert torch.get_default_dtype() == torch.float32


def numbers() -> tuple:
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_a_seed_that_a_reward_sets_is_its_own(folder):
    """Neither the run nor another reward meets it; drawn without a seed, its numbers differ from call to call."""
    text = """
import random
import numpy as np
import torch

torch.manual_seed(0); np.random.seed(0); random.seed(0)

def drawn(prompts):
    return [torch.rand(1).item() + np.random.rand() + random.random() for _ in prompts]

def seeds(images, prompts):
    torch.manual_seed(1); np.random.seed(1); random.seed(1)
    return drawn(prompts)

def chance(images, prompts):
    return drawn(prompts)
"""
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = [numbers() for _ in range(3)]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    file = written(folder, text)
    draws = [numbers()]
    seeds, chance = rewards.load(f"{file}:seeds"), rewards.load(f"{file}:chance")
    draws.append(numbers())
    values = [rewards.score(name, one, IMAGES, PROMPTS).tolist() for name, one in (("chance", chance), ("seeds", seeds)) * 2]
    draws.append(numbers())
    assert draws == expected
    assert values[1] == values[3], "it seeds itself at each call"
    every = [*values[0], *values[2], *values[1]]
    assert len(set(every)) == len(every), "the other one's chance goes on"


def test_a_reward_that_changes_everything_leaves_a_run_as_it_is(folder, capfd):
    """The same numbers, to the last bit, with a reward that does nothing but return what the other one does."""
    mean = "    return images.mean((1, 2, 3))\n"
    mad = "".join(f"    {line}\n" for line in CHANGES.values() if "meta" not in line and "threads" not in line)
    written(folder, f"def brightness(images, prompts):\n{mean}", "sane")
    head = "import os, torch\ntorch.set_grad_enabled(False)\n\ndef brightness(images, prompts):\n    torch.manual_seed(0)\n"
    written(folder, f"{head}{mad}{mean}", "mad")
    rows = {}
    for name in ("sane", "mad"):
        sizes = ["steps=1", "images_per_prompt=2", "microbatch=4", "trackers=[]", "evaluation.prompts=null"]
        small.trainer(short_run(folder / name, f"rewards={{{name}.py:brightness: 1}}", *sizes)).train()
        assert ("changed torch's default dtype" in capfd.readouterr().err) == (name == "mad")
        rows[name] = [
            {key: value for key, value in json.loads(line).items() if not key.startswith(MEASURED)}
            for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
    assert rows["sane"] == rows["mad"]
    assert rows["mad"][0]["grad_norm"] > 0
