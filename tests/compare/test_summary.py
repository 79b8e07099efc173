"""The learning curves of a comparison: no config hides another."""

import json
from dataclasses import asdict

import pytest
from matplotlib.figure import Figure

from flow_grpo.compare import BUDGET, CURVE, ComparedRun, CurvePoint, compare, parse_budget, save_plot
from flow_grpo.errors import FlowGRPOError


def equal_runs(folder, names):
    """Runs of two seeds each, all with one curve."""
    runs = [ComparedRun(name, seed, folder / name / f"seed{seed}") for name in names for seed in range(2)]
    for run in runs:
        points = [CurvePoint(i, i, 5.0 * i, 64 * i, 0.1 * i, 900.0, 0, {"ocr": 0.5 + 0.1 * i}) for i in range(3)]
        run.folder.mkdir(parents=True)
        (run.folder / CURVE).write_text("".join(json.dumps(asdict(point)) + "\n" for point in points))
    return runs


@pytest.mark.parametrize(("amount", "evaluations"), [("5 s", 3), (None, 3), (5, 0)])
def test_a_damaged_budget_is_one_sentence(tmp_path, amount, evaluations):
    equal_runs(tmp_path, ["tiny_ocr"])
    (tmp_path / BUDGET).write_text(json.dumps({"amount": amount, "unit": "seconds", "evaluations": evaluations}))
    with pytest.raises(FlowGRPOError, match=r"budget\.json is damaged: give another folder by --out"):
        compare(["tiny_ocr"], 1, parse_budget("5s", 3), tmp_path, overrides=[], metric="ocr", target=None)


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
