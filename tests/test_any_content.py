"""Whatever a file holds, reading it gives its content or one sentence, and nothing that could be read is lost."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.fake_run import synthetic_run

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import parse_yaml
from flow_grpo.data import image_sets
from flow_grpo.data.grid import ImageInfo, read_grid, save_grid
from flow_grpo.evaluation import hacking
from flow_grpo.export import model_card
from flow_grpo.report import page
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.run_folder.layout import METRICS, TORN
from flow_grpo.run_folder.metrics_file import read_metrics, rewind
from flow_grpo.run_folder.reader import RunReader, read_all

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
ANYTHING = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=9), one, max_size=3)
)
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def one_sentence(error: ValueError) -> None:
    said = str(error)
    assert said.strip()
    assert len(said.splitlines()) == 1, said


@st.composite
def spoiled(draw, content: bytes) -> bytes:
    """The content cut off, with other bytes in one place, or another content."""
    place = draw(st.integers(0, len(content)))
    other = draw(st.binary(max_size=12))
    return draw(st.sampled_from([content[:place], content[:place] + other + content[place + len(other) :], other]))


# -- a run folder -----------------------------------------------------------------------------------------------------------


def lines_of(rows):
    return [json.dumps(row).encode() for row in rows]


ROW = st.dictionaries(st.sampled_from(["loss", "reward", "eval/reward"]), st.floats(allow_nan=False), max_size=3)
STEPS = st.lists(st.tuples(st.integers(0, 5), ROW), max_size=6)
FOREIGN = st.binary(max_size=20).filter(lambda line: b"\n" not in line and line.strip()).map(lambda line: b"\xff" + line)


@FEW
@given(rows=STEPS, foreign=st.lists(FOREIGN, max_size=3), step=st.integers(0, 5), data=st.data())
def test_torn_lines_of_metrics_hide_no_row_and_are_kept_apart(tmp_path, rows, foreign, step, data):
    wanted = [{"step": at, **row} for at, row in rows]
    lines = data.draw(st.permutations([(True, line) for line in lines_of(wanted)] + [(False, line) for line in foreign]))
    written = [json.loads(line) for whole, line in lines if whole]
    torn = data.draw(st.sampled_from([b"", b'{"step": 3, "lo', b'{"step": 3, "loss": NaNN}', b"[1, 2]", b'{"step": true}']))
    (tmp_path / TORN).unlink(missing_ok=True)
    (tmp_path / METRICS).write_bytes(b"\n".join([*[line for _, line in lines], torn]))
    infinite = [{key: math.copysign(math.inf, v) if abs(v) > 1e100 else v for key, v in row.items()} for row in written]
    assert read_metrics(tmp_path) == infinite
    said = rewind(tmp_path, step)
    assert (said is not None) == bool(foreign or torn)
    assert read_metrics(tmp_path) == [row for row in infinite if row["step"] <= step]
    kept = (tmp_path / TORN).read_bytes().split(b"\n") if said else []
    assert all(line in kept for line in [*foreign, *([torn] if torn else [])])
    assert rewind(tmp_path, step) is None, "all is in its place now"


@FEW
@given(content=ANYTHING)
def test_no_json_in_the_metrics_stops_their_reading(tmp_path, content):
    (tmp_path / METRICS).write_text(
        json.dumps(content) + "\n" + json.dumps({"step": content, "reward": content}) + '\n{"step": 1}\n'
    )
    assert {"step": 1} in read_metrics(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints, and their files' content."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        checkpoint.save(folder, step, {"step": step, "weights": torch.arange(4.0) + step}, keep=2)
    return folder, {file: file.read_bytes() for file in layout.step_folder(folder, 2).iterdir()}


@FEW
@given(data=st.data())
def test_a_spoiled_checkpoint_is_passed_over_for_the_one_before(saved, data):
    folder, files = saved
    file = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(spoiled(files[file]) | ANYTHING.map(lambda value: json.dumps(value).encode()))
    try:
        file.write_bytes(content)
        state, warnings = checkpoint.latest(folder)
    finally:
        file.write_bytes(files[file])
    step = 2 - len(warnings)
    assert state is not None
    assert state["step"] == step
    assert torch.equal(state["weights"], torch.arange(4.0) + step), "what is read is what was saved"
    if step == 1:
        assert content != files[file]
        assert "step_000002 is damaged" in warnings[0]
        assert len(warnings[0].splitlines()) == 1


@st.composite
def with_another_value(draw, content: bytes) -> bytes:
    """The JSON with one value, anywhere in it, replaced or deleted."""
    root = {"": json.loads(content)}
    holder, key = root, ""
    while holder[key] and isinstance(holder[key], dict | list) and draw(st.booleans() | st.just(key == "")):
        holder = holder[key]
        key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
    if key != "" and draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = draw(ANYTHING | st.sampled_from([10**400, 10**30, "\ud800", [[]], {"a": {}}]))
    return json.dumps(root[""]).encode()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A run with three evaluations, of one further size, and the files that its report and its card read."""
    folder = synthetic_run(tmp_path_factory.mktemp("shown") / "run", steps=2, every=1)
    for file in folder.glob("pictures/*/evaluation.json"):
        content = json.loads(file.read_text())
        images = {name: content[name] for name in ("high_frequency_power", "diversity")}
        content["values"] |= {f"{name}@8x8": values for name, values in content["values"].items()}
        file.write_text(json.dumps({**content, "sizes": {"8x8": images}, "sources": [None] * len(content["prompts"])}))
    names = ("config.yaml", "machine.json", "pictures/*/evaluation.json", "pictures/*/groups.json")
    return folder, {file: file.read_bytes() for name in names for file in folder.glob(name)}


def read_and_show(folder, out):
    """The report and the gallery of a model card, and the monitor's history as a resumed run reads it."""
    evaluations = read_all(folder, layout.EVALUATION)
    history = hacking.read_history(evaluations)
    for count in range(1, len(history) + 1):
        hacking.warnings(history[:count])
        hacking.metrics(history[:count])
    try:
        page.write([folder], out / "report.html")
        model_card.gallery(out, RunReader(folder))
    except ValueError as error:
        one_sentence(error)


@FEW
@given(data=st.data())
def test_any_content_of_a_runs_pictures_is_shown_or_passed_over(shown, tmp_path, data):
    folder, files = shown
    file = data.draw(st.sampled_from([file for file in files if file.suffix == ".json"]))
    content = files[file]
    try:
        file.write_bytes(data.draw(with_another_value(content) | spoiled(content) | st.just(b"[" * 20_000)))
        read_and_show(folder, tmp_path)
    finally:
        file.write_bytes(content)


def test_what_a_run_writes_of_its_pictures_is_not_passed_over(shown):
    run = RunReader(shown[0])
    assert [e["step"] for e in run.evaluations] == [0, 1, 2]
    assert [g["step"] for g in run.groups] == [1, 2]
    assert run.machine["device"] == "A CPU"
    assert not any("@" in name for record in hacking.read_history(run.evaluations) for name in record.watched), (
        "sizes of 0.4"
    )


ODD = (["a"], "x", 3, None, {"a": ["b"]})
ODD_CONFIGS = ["3: 4", "[]", "x", *(json.dumps({name: one}) for name in ("steps", "rewards", "model") for one in ODD)]


@pytest.mark.parametrize("content", ODD_CONFIGS)
def test_a_run_whose_config_was_edited_is_reported(shown, tmp_path, content):
    folder, files = shown
    config = folder / "config.yaml"
    try:
        config.write_text(content)
        for file in (one for one in files if one.name == "evaluation.json"):
            file.unlink()  # whose names of rewards would be used
        page.write([folder], tmp_path / "report.html")
    finally:
        for file, before in files.items():
            file.write_bytes(before)
    assert "was trained on" in (tmp_path / "report.html").read_text()


# -- grids and manifests ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    file = tmp_path_factory.mktemp("grid") / "grid.png"
    cells = [ImageInfo("a", 0, "m"), ImageInfo("b", 1, "m")]
    save_grid(file, torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), cells, columns=2)
    return file, file.read_bytes(), read_grid(file)


@FEW
@given(data=st.data())
def test_a_spoiled_grid_is_refused_in_a_clear_error_or_read_as_a_grid(grid, data):
    file, content, (images, _) = grid
    file.write_bytes(data.draw(spoiled(content)))
    try:
        pixels, cells = read_grid(file)
    except ValueError as error:
        one_sentence(error)
    else:
        assert pixels.shape[1:] == images.shape[1:]
        assert len(pixels) == len(cells)


@FEW
@given(
    rows=st.lists(
        ANYTHING | st.fixed_dictionaries({"file_name": ANYTHING | st.just("a.png"), "prompt": ANYTHING}), max_size=3
    )
)
def test_any_manifest_is_refused_in_a_clear_error_or_gives_a_prompt_to_each_image(tmp_path, grid, rows):
    (tmp_path / "a.png").write_bytes(grid[1])
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        image_set = image_sets.read(tmp_path)
    except ValueError as error:
        one_sentence(error)
    else:
        assert all(isinstance(prompt, str) and prompt for prompt in image_set.prompts)
        assert len(image_set) == len(image_set.pixels)


# -- configs ----------------------------------------------------------------------------------------------------------------


def settings_of(content, above=""):
    own = [above] if above else []
    inner = content.items() if isinstance(content, dict) else ()
    return own + [path for key, value in inner for path in settings_of(value, f"{above}.{key}".strip("."))]


SETTINGS = settings_of(FlowGRPOConfig().model_dump())


@settings(max_examples=300)
@given(setting=st.sampled_from(SETTINGS), value=ANYTHING)
def test_any_value_of_a_setting_is_taken_or_refused_in_a_clear_error_that_names_it(setting, value):
    try:
        args = FlowGRPOConfig.from_yaml("tiny_ocr", [f"{setting}={json.dumps(value)}"])
    except ValueError as refused:
        error = refused
    else:
        again = FlowGRPOConfig.model_validate(parse_yaml(args.to_yaml(), "the dump"))
        assert again.to_yaml() == args.to_yaml(), "what is taken is written and read back"
        return
    one_sentence(error)
    assert setting.split(".")[0].rstrip("s") in str(error)


@FEW
@given(text=st.text(max_size=80) | ANYTHING.map(json.dumps))
@example(text='{"\\r"}')
@example(text='{"\\e[2J": 1}')
def test_any_text_of_a_config_is_taken_or_refused_in_a_clear_error(tmp_path, text):
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    try:
        FlowGRPOConfig.from_yaml(str(tmp_path / "own.yaml"))
    except ValueError as error:
        one_sentence(error)
