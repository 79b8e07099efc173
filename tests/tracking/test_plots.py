"""The curves of a run, reward.png: a title, no reward that cannot be, whole steps."""

import json

from matplotlib.figure import Figure

from flow_grpo.tracking.tracker import plot_curves


def figure_of(folder, rows, monkeypatch):
    """The figure that is saved for a run with these metrics."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: (drawn.append(figure), save(figure, *args, **more)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_curves(folder).stat().st_size > 0
    return drawn[0]


def training(steps):
    return [{"step": step, "reward": 0.9, "reward_std": 0.3, "loss": 0.1} for step in range(1, steps + 1)]


def heights(axes):
    """The heights of all that is drawn in data coordinates, lines and filled areas."""
    lines = [y for line in axes.lines for y in line.get_ydata()]
    return lines + [y for area in axes.collections for path in area.get_paths() for y in path.vertices[:, 1]]


def test_the_curves_have_a_title_and_no_band_above_the_largest_reward(tmp_path, monkeypatch):
    evaluations = [{"step": step, "eval/reward": 0.8, "eval/ocr": 0.8} for step in (0, 3)]
    above, below = figure_of(tmp_path, training(3) + evaluations, monkeypatch).axes
    title = above.get_title(loc="left")
    assert tmp_path.name in title
    assert "reward" in title
    assert {round(y, 6) for y in heights(above)} == {0.8, 0.9}
    assert {round(y, 6) for y in heights(below)} == {0.3}, "the std has an axis of its own"
    assert below.get_ylabel().startswith("std")
    assert {text.get_text() for text in above.get_legend().get_texts()} == {"reward in training", "held out: ocr"}


def test_a_measure_from_0_to_1_has_another_axis_than_a_reward_up_to_20(tmp_path, monkeypatch):
    steps = [{"step": step, "reward": 17.0 + step, "reward_std": 1.0} for step in (1, 2)]
    evaluations = [{"step": 2, "eval/bold": 18.0, "eval/ocr": 0.9, "eval/clip": float("nan"), "eval/area": 1.5}]
    first, second, below = figure_of(tmp_path, steps + evaluations, monkeypatch).axes
    curves = [
        {text.get_text().removeprefix("held out: ") for text in axes.get_legend().get_texts()} for axes in (first, second)
    ]
    assert curves == [{"reward in training", "bold"}, {"ocr", "clip", "area"}]
    assert heights(below) == [1.0, 1.0]


def test_the_sum_of_several_rewards_is_drawn_and_a_single_step_is_seen(tmp_path, monkeypatch):
    evaluations = [{"step": step, "eval/reward": 1.7, "eval/ocr": 0.8, "eval/clip": 0.9} for step in (0, 1)]
    above, _ = figure_of(tmp_path, training(1) + evaluations, monkeypatch).axes
    labels = [text.get_text() for text in above.get_legend().get_texts()]
    assert labels == ["reward in training", "held out: reward", "held out: ocr", "held out: clip"]
    assert above.lines[0].get_marker() == "o"


def test_the_curves_have_whole_steps_on_their_axis(tmp_path, monkeypatch):
    for steps in (2, 3, 40):
        figure = figure_of(tmp_path, training(steps), monkeypatch)
        ticks = figure.axes[1].get_xticks()
        assert len(ticks) >= 2
        assert all(float(tick).is_integer() for tick in ticks), ticks
        monkeypatch.undo()


def test_a_run_without_rewards_has_no_curves(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.1}) + "\n")
    assert plot_curves(tmp_path) is None
