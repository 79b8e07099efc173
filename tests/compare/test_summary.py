"""The files of a comparison, and its learning curves: no config hides another."""

import json
import shutil
from dataclasses import asdict

import pytest
from matplotlib.figure import Figure
from support.embedded import short_run

from flow_grpo.compare import CURVE, Budget, ComparedRun, CurvePoint, compare, parse_budget, save_plot
from flow_grpo.errors import FlowGRPOError


def equal_runs(folder, names):
    """Runs of two seeds each, all with one curve."""
    runs = [ComparedRun(name, seed, folder / name / f"seed{seed}") for name in names for seed in range(2)]
    for run in runs:
        points = [CurvePoint(i, i, 5.0 * i, 64 * i, 0.1 * i, 900.0, 0, {"ocr": 0.5 + 0.1 * i}) for i in range(3)]
        run.folder.mkdir(parents=True)
        (run.folder / CURVE).write_text("".join(json.dumps(asdict(point)) + "\n" for point in points))
    return runs


@pytest.mark.parametrize("text", ["", "120", "0s", "-5m", "infs", "images=", "images=0", "images=5s", "2h"])
def test_what_is_no_budget_is_one_sentence(text):
    with pytest.raises(
        FlowGRPOError,
        match=rf"^--budget {text} is no budget of each run: give seconds, minutes or images, as 120s, 20m or images=5000\.$",
    ):
        parse_budget(text, 3)


def test_a_budget_is_of_seconds_minutes_or_images():
    assert [parse_budget(text, 3).amount for text in ("90.5s", "2m", "images=64")] == [90.5, 120.0, 64.0]


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", "{}", '{"evaluation": 1', '{"step": "x"}', "[" * 5000, '{"values": {"reward": "high"}}']
)
def test_a_damaged_line_of_a_curve_is_named(tmp_path, line):
    run = equal_runs(tmp_path, ["grpo"])[0]
    first = json.loads((run.folder / CURVE).read_text().splitlines()[0])
    changed = json.dumps({**first, **json.loads(line)}) if line.startswith('{"') and line.endswith("}") else line
    with (run.folder / CURVE).open("a") as stream:
        stream.write(f"{changed}\n")
    with pytest.raises(
        FlowGRPOError, match=rf"^line 4 of {run.folder / CURVE} is damaged \(.*\): restore it, or give another"
    ):
        run.points()


def test_a_budget_that_was_changed_by_hand_is_named(tmp_path):
    args = short_run(tmp_path / "run")
    (tmp_path / "short.yaml").write_text(args.to_yaml())
    config = str(tmp_path / "short.yaml")
    folder = tmp_path / "short" / "seed0"
    folder.mkdir(parents=True)
    equal = equal_runs(tmp_path / "equal", ["grpo"])[0]
    shutil.copy(equal.folder / CURVE, folder / CURVE)
    for text in ("", "[1]", '{"amount": 0, "unit": "images", "evaluations": 1}', '{"unit": "years"}'):
        (tmp_path / "budget.json").write_text(text)
        with pytest.raises(FlowGRPOError, match=rf"^{tmp_path / 'budget.json'} is damaged \(.*\): restore it"):
            compare([config], 1, Budget(8, "images", 1), tmp_path, overrides=[], metric="ocr")


def test_equal_curves_of_compared_runs_are_all_visible(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: (drawn.append(figure), save(figure, *args, **more)))
    for names in (["awm", "grpo"], ["awm", "grpo", "nft", "dpo"]):
        save_plot(equal_runs(tmp_path / str(len(names)), names), "ocr", 0.9, tmp_path / "compare.png")
        for axes in drawn[-1].axes:
            means = [line for line in axes.lines if line.get_label() in names]
            assert [line.get_label() for line in means] == names
            assert len({tuple(line.get_ydata()) for line in means}) == 1, "the curves are equal"
            assert len({line.get_linestyle() for line in means}) == len({line.get_color() for line in means}) == len(names)
            widths = [line.get_linewidth() for line in means]
            assert all(under - over > 0.9 for under, over in zip(widths, widths[1:], strict=False)), (
                "the later ones are on top"
            )
    assert (tmp_path / "compare.png").is_file()
