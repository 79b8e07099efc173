"""The learning curves of a comparison: no config hides another."""

import json
from dataclasses import asdict

import pytest
from matplotlib.figure import Figure

from flow_grpo.compare import CURVE, ComparedRun, CurvePoint, parse_budget, save_plot
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
