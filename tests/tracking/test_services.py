"""What other programs are shown of a run: the very numbers, the pictures; and that the run minds none of it."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image
from rich.console import Console
from support import small_policy as small
from support.embedded import short_run
from support.run_contents import MEASURED
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flow_grpo.config import FlowGRPOConfig, checks
from flow_grpo.run_folder import layout, reader
from flow_grpo.tracking import services
from flow_grpo.tracking.tracker import Tracker, read_metrics
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training import start_checks

SERVICE = """
import json, os
from types import SimpleNamespace

def note(*said):
    with open(os.environ["SAID"], "a") as file:
        file.write(json.dumps(said) + "\\n")

class Run(SimpleNamespace):
    def log(self, values, step=None):
        if step == int(os.environ.get("BREAKS", -1)):
            raise ConnectionError("the network\\nis gone")
        note("log", values, step)
    def finish(self):
        print("chatter")
        note("finish")

def init(project=None, **given):
    if "REFUSES" in os.environ:
        raise ConnectionError("no login")
    print("chatter")
    note("init", project, given)
    return Run()

def log_metrics(values, step=None):
    Run().log(values, step)

def Image(image, caption):
    return ["picture", image.size, caption]

def Text(text):
    return text

class Config(dict):
    def update(self, values, **kwargs):
        note("config", values)

config = Config()
utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=1000))
search_experiments = lambda filter_string: []
create_experiment = lambda name, **kwargs: name
def start_run(run_id, experiment_id, run_name, **kwargs):
    init(experiment_id, id=run_id, name=run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "given by mlflow"))
log_params = config.update
log_image = lambda image, artifact_file: note("log", {artifact_file: ["picture", image.size]}, None)
log_text = lambda text, artifact_file: note("log", {artifact_file: text}, None)
log_dict = lambda values, artifact_file: note("log", {artifact_file: values}, None)
end_run = lambda: Run().finish()
"""
OTHERS = [name for name in checks.TRACKERS if name != "tensorboard"]
METRICS = {"reward": 0.1, "rewards//my/../file.py:fn/mean": 0.2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two steps that was lost after its second one, and gone on with to the third."""
    folder = tmp_path_factory.mktemp("boards") / "run"
    args = short_run(folder, "steps=3", "save_every=1", "evaluation.every=1")
    small.trainer(args.model_copy(update={"steps": 2})).train()
    (folder / "checkpoints" / "step_000002" / "state.pt").write_bytes(b"lost")
    small.trainer(args).train(resume=True)
    return folder


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Makes a stand-in for a service's package; returns what it was told so far."""
    monkeypatch.setenv("SAID", str(tmp_path / "said.jsonl"))

    def install(name: str) -> None:
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text(SERVICE)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, name, raising=False)

    def told(kind: str) -> list:
        return [row[1:] for row in map(json.loads, (tmp_path / "said.jsonl").read_text().splitlines()) if row[0] == kind]

    yield install, told
    for name in OTHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def test_tensorboard_holds_the_very_numbers_once_although_the_run_was_resumed(trained):
    logged = events(trained)
    wanted: dict[str, list] = {}
    for row in read_metrics(trained):
        for name, value in row.items():
            if name != "step":
                wanted.setdefault(services.metric_name(name), []).append((row["step"], float(np.float32(value))))
    assert {len(points) for points in wanted.values()} >= {3, 4}, "training steps, and evaluations from step 0 on"
    config = logged.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    prompts_per_step: 2\n" in config
    assert not [place for place in (trained / "tensorboard").iterdir() if place.is_dir()], "one run is one run"
    seen = {name: [(e.step, e.value) for e in logged.Scalars(name)] for name in logged.Tags()["scalars"]}
    assert seen == wanted


def test_tensorboard_has_each_evaluations_image_of_the_same_prompt_pixel_by_pixel(trained):
    logged = events(trained)
    assert "pictures/0" in logged.Tags()["images"]
    pictures = logged.Images("pictures/0")
    assert [picture.step for picture in pictures] == [0, 1, 2, 3]
    for picture in pictures:
        kept = trained / "pictures" / f"step_{picture.step:06d}" / layout.prompt_image(0)
        ours, theirs = Image.open(kept).convert("RGB"), Image.open(io.BytesIO(picture.encoded_image_string))
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    text = logged.Tensors("prompts/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == reader.read_all(trained, layout.EVALUATION)[0]["prompts"][0]


def test_a_service_that_fails_in_mid_run_changes_no_number_and_warns_once(tmp_path, service, monkeypatch, capsys):
    install, told = service
    install("wandb")
    monkeypatch.setenv("BREAKS", "1")
    for name, trackers in {"with": "[tensorboard, wandb]", "without": "[]"}.items():
        small.trainer(short_run(tmp_path / name, f"trackers={trackers}")).train()
    one, other = (
        [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_metrics(tmp_path / name)]
        for name in ("with", "without")
    )
    assert one == other
    said = capsys.readouterr().out
    sentence = "warning: the tracker wandb failed and is off from here on (ConnectionError: the network is gone)."
    assert said.count(sentence) == said.count("the network") == 1
    assert "chatter" not in said
    assert {step for _, step in told("log")} == {0}
    assert [e.step for e in events(tmp_path / "with").Scalars("loss")] == [1, 2], "the other one goes on"
    assert not (tmp_path / "without" / "tensorboard").exists()


@pytest.mark.parametrize("name", OTHERS)
def test_each_service_gets_settings_numbers_images_and_warnings_and_the_same_run_again(name, tmp_path, service, capsys):
    install, told = service
    install(name)
    PartialState._reset_state()  # as in a process that has met no other tracker
    args = FlowGRPOConfig.from_yaml("tiny_ocr", [f"trackers={{{name}: {{project: signs}}}}"])
    picture = tmp_path / "picture.webp"
    Image.new("RGB", (8, 4)).save(picture)
    for step in (None, 1):
        with Tracker(tmp_path, 2, Console(file=io.StringIO())) as tracker:
            tracker.attach(services.open_services(tmp_path, args, tracker.info, step))
            tracker.log(2, METRICS)
            tracker.log_evaluation(2, {"ocr": 0.5}, {}, [("a cat", picture), ("a\ndog", picture)])
            tracker.warn(2, "sharpness has fallen")
            tracker.warn(2, "clip has too")
    (project, first), (_, again) = told("init")
    assert project == "signs"
    if name == "mlflow":
        assert (first["id"], again["id"]) == (None, "given by mlflow")
    else:
        assert first == again
        assert first["resume"] == "allow"
        assert len(first["id"] if "id" in first else first["name"].rpartition("-")[2]) == 8
    assert len(told("config")) == 1, "not again when it goes on"
    assert told("config")[0][0]["sampling.steps"] == args.sampling.steps
    values = [(key, value, step) for logged, step in told("log") for key, value in logged.items()]
    assert values.count(("rewards/file.py_fn/mean", 0.2, 2)) == 2
    assert values.count(("eval/ocr", 0.5, 2)) == 2
    warned = [value for key, value, _ in values if key.startswith("warning")]
    assert warned == ["sharpness has fallen", "sharpness has fallen\nclip has too"] * 2, "nothing of a step is written over"
    assert sum(isinstance(value, list) and value[:2] == ["picture", [8, 4]] for _, value, _ in values) == 4
    assert sum("a\\ndog" in json.dumps(value) for _, value, _ in values) == 2, "each with its prompt"
    assert len(told("finish")) == 2
    assert "chatter" not in capsys.readouterr().out


def test_a_service_that_does_not_start_stops_a_new_run_and_not_one_that_goes_on(tmp_path, service, monkeypatch):
    install, _ = service
    install("wandb")
    monkeypatch.setenv("REFUSES", "1")
    args = FlowGRPOConfig.from_yaml("tiny_ocr", ["trackers=wandb"])
    with pytest.raises(ValueError, match=r"tracker wandb could not be started: ConnectionError: no login\. Fix that"):
        services.open_services(tmp_path, args, print)
    said: list[str] = []
    assert services.open_services(tmp_path, args, said.append, 5) == []
    assert said == [
        "warning: the tracker wandb could not be started: ConnectionError: no login; the run goes on without it."
    ]


def test_names_are_accelerates_and_others_are_a_sentence(monkeypatch):
    assert set(checks.TRACKERS) <= LOGGER_TYPE_TO_CLASS.keys()
    with pytest.raises(ValueError, match=r"there is no tracker tensorbord\. Did you mean tensorboard\?"):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["trackers=[tensorbord]"])
    assert FlowGRPOConfig.from_yaml("tiny_ocr", ["trackers=[wandb, mlflow]"]).trackers == {"wandb": {}, "mlflow": {}}
    assert FlowGRPOConfig.from_yaml("tiny_ocr", ["trackers=[]"]).trackers == {}
    monkeypatch.setattr(start_checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package swanlab, which is not installed: pip install swanlab"):
        FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml("tiny_ocr", ["trackers=[swanlab]"]))
