"""The report as a file: what it says, that it holds everything itself, and that no text of a run can do anything in it."""

import base64
import hashlib
import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from PIL import Image
from support.embedded import short_run
from support.fake_run import PROMPTS, synthetic_run, training_row
from support.paths import SAMPLE_REWARDS

from flow_grpo.export import model_card
from flow_grpo.report import page as charts
from flow_grpo.report import page as report
from flow_grpo.report import summary
from flow_grpo.run_folder.metrics_file import NO_SIGNAL
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import plain
from flow_grpo.trainer import FlowGRPOTrainer

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'>{{ 7*7 }}\x1b[31mred\x1b[0m\u202eback\ud800"


class Page(HTMLParser):
    """The elements of a page with their attributes, the text of its scripts, and all its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements, self.scripts, self.text, self.inside = [], [], "", ""
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text += data

    def handle_endtag(self, tag):
        self.inside = ""

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def page(tmp_path: Path, *runs: Path) -> Page:
    return Page(report.write(list(runs), tmp_path / "report.html"))


def test_the_first_sentence_says_what_was_trained_and_what_came_of_it(tmp_path):
    risen = synthetic_run(tmp_path / "risen")
    assert (
        summary.headline(RunReader(risen))
        == "tiny was trained on ocr for 40 steps: on 20 held-out prompts it rose by 0.100, from 0.595 to 0.695."
    )
    assert "fell by 0.200, from 0.595 to 0.395" in summary.headline(RunReader(synthetic_run(tmp_path / "fallen", rise=-0.2)))
    assert "it stayed at 0.595" in summary.headline(RunReader(synthetic_run(tmp_path / "held", rise=0.0)))
    (row,) = summary.untrained_metrics(RunReader(risen))
    assert (row["name"], row["verb"], row["last"]) == ("clip", "held", pytest.approx(0.9))


def test_the_first_sentence_says_that_a_trained_reward_collapsed_while_another_rose(tmp_path):
    """Their sum stays the same."""
    folder = synthetic_run(tmp_path / "run")
    for file in sorted(folder.glob("pictures/*/evaluation.json")):
        content, step = json.loads(file.read_text()), int(file.parent.name.removeprefix("step_"))
        ocr = content["values"]["ocr"]
        content["trained"] = ["ocr", "jpeg_size"]
        content["values"]["ocr"] = [value * (0.02 if step else 1) for value in ocr]
        content["values"]["jpeg_size"] = [0.01 * i + step / 40 for i in range(len(ocr))]
        content["values"]["reward"] = [0.5 + 0.01 * i for i in range(len(ocr))]
        file.write_text(json.dumps(content))
    headline = summary.headline(RunReader(folder))
    assert headline.endswith("Possible reward hacking: ocr fell by 97% after step 0 while jpeg_size rose.")
    assert headline in page(tmp_path, folder).text


def test_a_run_that_can_go_on_is_reported_so_far_and_one_that_has_ended_is_not(tmp_path):
    folder = synthetic_run(tmp_path / "run", last=20)
    running = summary.headline(RunReader(folder))
    assert (
        running
        == "tiny was trained on ocr for 20 of 40 steps so far: on 20 held-out prompts it rose by 0.050, from 0.595 to 0.645."
    )
    assert running in page(tmp_path, folder).text
    (folder / "lora").mkdir()  # the weights that a finished run leaves
    ended = summary.headline(RunReader(folder))
    assert (
        ended
        == "tiny was trained on ocr for 20 of 40 planned steps: on 20 held-out prompts it rose by 0.050, from 0.595 to 0.645."
    )


def test_an_earlier_step_of_a_finished_run_is_not_reported_as_so_far(tmp_path):
    """As the card of an exported checkpoint has it."""
    folder = synthetic_run(tmp_path / "run")
    (folder / "lora").mkdir()
    assert "for 40 steps: on" in summary.headline(RunReader(folder))
    assert "for 10 of 40 planned steps: on" in summary.headline(RunReader(folder).up_to_step(10))


def test_a_change_within_its_standard_error_is_no_change(tmp_path):
    folder = synthetic_run(tmp_path / "run", rise=0.01)
    assert summary.change(RunReader(folder), "ocr")["verb"] == "rose", "every prompt alike"
    file = folder / "pictures" / "step_000040" / "evaluation.json"
    content = json.loads(file.read_text())
    content["values"]["ocr"] = [v + (0.5 if i % 2 else -0.5) for i, v in enumerate(content["values"]["ocr"])]
    file.write_text(json.dumps(content))
    told = summary.change(RunReader(folder), "ocr")
    assert told["verb"] == "held", "the same mean, of prompts that went up and down by 0.5"
    assert summary.headline(RunReader(folder)).endswith("it stayed the same within the error, 0.595 before and 0.605 after.")
    assert told["error"] == pytest.approx(0.5 / 19**0.5, rel=1e-6)


def test_a_change_smaller_than_the_digits_shown_is_none(tmp_path):
    reader = RunReader(synthetic_run(tmp_path / "run", rise=2.6e-5))
    assert summary.headline(reader).endswith("it stayed at 0.595.")


def test_a_run_in_which_no_step_had_signal_is_reported_to_have_learned_nothing(tmp_path):
    """Not one that alone has groups without signal, or sums of rewards that are equal while single ones are compared."""
    folder = synthetic_run(tmp_path / "run", rise=0.0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    silent = [row | {"frac_reward_zero_std": 1.0, "reward": 0.595, "kl": 0.0} if "loss" in row else row for row in rows]
    warning = {"step": 1, "warning": "all images of each prompt got the same reward", "fallen": NO_SIGNAL}
    for steps, warned, nothing in ((silent, True, True), (silent, False, False), (rows, True, False)):
        lines = [*steps, *([warning] if warned else [])]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        assert ("but nothing was learned" in summary.headline(RunReader(folder))) == nothing
        assert ("It has not warned" in page(tmp_path, folder).text) != warned
    still = [
        {**row, "monitor/high_frequency_power": 0.05, "monitor/diversity": 0.2} if "eval/reward" in row else row
        for row in silent
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in still))
    said = page(tmp_path, folder).text
    assert "There is no curve to draw: each metric has one value." in said
    assert "No training step" not in said


def test_each_chart_names_its_axis_and_each_part_of_the_time_its_share(tmp_path):
    html = page(tmp_path, synthetic_run(tmp_path / "run"))
    assert html.text.count("training step") >= [a.get("class") for _, a in html.elements].count("plot") > 2
    for share in summary.cost(RunReader(tmp_path / "run"))["shares"]:
        assert f"{share['name']} {share['share']:.0f} %" in html.text
    assert "other" in [share["name"] for share in summary.cost(RunReader(tmp_path / "run"))["shares"]]


def test_the_page_asks_nothing_of_the_network_and_lets_only_its_own_script_run(tmp_path):
    html = page(tmp_path, synthetic_run(tmp_path / "run", warning="clip has fallen"))
    for tag, attributes in html.elements:
        assert tag not in ("link", "iframe", "object", "embed", "form", "base")
        for name in ("src", "href", "srcset", "action", "data"):
            assert (attributes.get(name) or "data:").startswith(("data:image/", "data:", "#")), (tag, attributes)
    assert "url(" not in html.source
    assert "@import" not in html.source
    policy = next(a["content"] for tag, a in html.elements if a.get("http-equiv") == "Content-Security-Policy")
    _, script = html.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_no_text_of_a_run_becomes_a_part_of_the_page(tmp_path):
    prompts = [HOSTILE, *PROMPTS]
    folder = synthetic_run(tmp_path / "<b>run", prompts=prompts, reward=f"x.py:{HOSTILE[:20]}", warning=HOSTILE)
    clean = page(tmp_path / "clean", synthetic_run(tmp_path / "run", warning="a word"))
    html = page(tmp_path, folder)
    tags = [tag for tag, _ in html.elements]
    assert tags.count("script") == 2
    assert tags.count("img") == [tag for tag, _ in clean.elements].count("img")
    assert not [name for _, attributes in html.elements for name in attributes if name.startswith("on")]
    assert {c for c in html.source if ord(c) < 32} == {"\n"}
    assert "\u202e" not in html.source
    shown = plain(HOSTILE)
    assert "alert(1)</script>" in shown
    assert "\ufffd[31mred" in shown
    assert "{{ 7*7 }}" in shown
    assert shown in html.data["runs"][0]["prompts"]
    assert shown in html.text
    assert "49" not in shown


def test_the_data_of_the_script_are_json_whatever_the_metrics_hold(tmp_path):
    folder = synthetic_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        row = training_row(41, float("nan")) | {"kl": float("inf")}
        file.write(json.dumps(row) + "\n" + '{"step": 42, "rew')
    file = folder / "pictures" / "step_000040" / "groups.json"
    content = json.loads(file.read_text())
    content["groups"][0]["rewards"]["clip"][0] = float("nan")
    file.write_text(json.dumps(content))
    items = page(tmp_path, folder).data["runs"][0]["groups"][-1]["groups"][0]["items"]
    assert items[0]["rewards"]["clip"] is None
    assert items[1]["rewards"]["clip"] == 0.5


def test_the_film_has_its_first_and_last_image_and_no_more_than_a_page_bears(tmp_path):
    folder = synthetic_run(tmp_path / "run", steps=60, every=1)
    run = page(tmp_path, folder).data["runs"][0]
    steps = [frame["step"] for frame in run["frames"]]
    assert (steps[0], steps[-1], len(steps)) == (0, 60, report.MAX_FRAMES)
    assert steps == sorted(set(steps))
    assert len(run["groups"]) == report.MAX_GROUP_STEPS
    assert all(len(frame["pictures"]) == len(run["prompts"]) == 8 for frame in run["frames"])


def test_best_and_worst_prompts_are_those_of_the_last_evaluation(tmp_path):
    best, worst = report.best_and_worst(RunReader(synthetic_run(tmp_path / "run")))
    assert (best["title"], worst["title"]) == ("Best", "Worst")
    assert [row["prompt"] for row in best["rows"]] == PROMPTS[:-5:-1]
    assert [row["prompt"] for row in worst["rows"]] == PROMPTS[:4]
    assert worst["rows"][0]["then"] == pytest.approx(0.5)
    assert worst["rows"][0]["now"] == pytest.approx(0.6)
    assert best["rows"][0]["picture"].startswith("data:image/webp;base64,")


@pytest.mark.parametrize(("rewarded", "title"), [(1, "Best"), (0, None)])
def test_a_report_of_one_prompt_or_of_none_with_a_reward_has_its_evaluation(tmp_path, rewarded, title):
    folder = synthetic_run(tmp_path / "run")
    for file in folder.glob("pictures/*/evaluation.json"):
        content = json.loads(file.read_text())
        content["values"]["reward"][rewarded:] = [math.nan] * (len(content["prompts"]) - rewarded)
        file.write_text(json.dumps({**content, "extremes": list(range(rewarded))}))
    parts = report.best_and_worst(RunReader(folder))
    assert [part["title"] for part in parts] == [title] * rewarded
    assert [row["prompt"] for part in parts for row in part["rows"]] == PROMPTS[:rewarded]
    said = page(tmp_path, folder).text
    assert "No evaluation has been recorded." not in said
    assert ("No held-out prompt has a reward." in said) == (rewarded == 0)


def test_the_report_says_what_the_monitor_watches_and_what_fell_without_a_warning(tmp_path):
    folder = synthetic_run(tmp_path / "run")
    said = page(tmp_path, folder).text
    assert "diversity by more than 75%" in said
    assert "It has not warned." in said
    assert "diversity of the images fell" not in said
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "monitor/diversity" in row:
            row["monitor/diversity"] = 0.2 - 0.0031 * row["step"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "The diversity of the images fell by 62%; the monitor warns from 75% on." in page(tmp_path, folder).text
    warned = synthetic_run(tmp_path / "warned", warning="clip has fallen")
    assert "has not warned" not in page(tmp_path, warned).text


def test_the_report_names_a_measure_the_same_way_everywhere(tmp_path):
    said = page(tmp_path, synthetic_run(tmp_path / "run")).text.lower()
    assert "high-frequency power" in said
    assert "sharpness" not in said


def test_a_ratio_of_exactly_1_is_reported_to_deviate_by_0(tmp_path):
    assert "largest deviation of the ratio from 1: 0" in page(tmp_path, synthetic_run(tmp_path / "run")).text


def test_steps_are_whole_numbers_on_the_axis():
    for last in (1, 2, 3, 7, 40):
        chart = charts.draw("x", [charts.Line("up", [(float(x), float(x)) for x in range(last + 1)])])
        assert all(tick["text"].isdigit() for tick in chart["x"]), chart["x"]
        assert chart["x"][0]["text"] == "0"


def test_the_settings_are_those_that_differ_from_the_default(tmp_path):
    one, other = synthetic_run(tmp_path / "one"), synthetic_run(tmp_path / "other", steps=20)
    rows = {row["name"]: row for row in summary.settings([RunReader(one), RunReader(other)])}
    assert rows["steps"] == {"name": "steps", "cells": ["40", "20"], "default": "100", "differ": True}
    assert rows["objective.name"]["cells"] == ["awm", "awm"]
    assert not rows["objective.name"]["differ"]
    assert "seed" not in rows
    assert [name for name in rows if name.startswith("evaluation.rewards.clip")] == ["evaluation.rewards.clip.weight"]


def test_settings_are_shown_as_yaml_writes_them(tmp_path):
    run = synthetic_run(tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "memory": {"gradient_checkpointing": True}}))
    rows = {row["name"]: row for row in summary.settings([RunReader(run)])}
    assert (rows["memory.gradient_checkpointing"]["cells"], rows["memory.gradient_checkpointing"]["default"]) == (
        ["true"],
        "false",
    )
    assert "memory.compile" not in rows, "on a CPU, auto decides nothing"


def test_the_settings_of_an_own_objective_on_final_images_are_shown(tmp_path):
    run = synthetic_run(tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["objective"] = {"name": "my_objective.py:f", "family": "forward_process", "num_noise_levels": 2}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = {row["name"]: row for row in summary.settings([RunReader(run)])}
    assert rows["objective.num_noise_levels"]["cells"] == ["2"]
    assert rows["objective.num_noise_levels"]["default"] == "1"


def test_several_runs_share_the_curves_and_stand_side_by_side(tmp_path):
    one, other = synthetic_run(tmp_path / "a" / "run"), synthetic_run(tmp_path / "b" / "run", rise=0.3)
    stories = [RunReader(one), RunReader(other)]
    assert report.run_names(stories) == ["a/run", "b/run"]
    html = page(tmp_path, one, other)
    assert "Two runs, side by side" in html.text
    curves, signals, _ = charts.run_charts(stories, ["a/run", "b/run"])
    for chart in (*curves, *signals):
        assert {line["run"] for line in chart["lines"]} == {0, 1}, chart["title"]
    cells = {row["name"]: [cell["text"] for cell in row["cells"]] for row in summary.comparison(stories)}
    assert cells["ocr"] == ["0.595 → 0.695", "0.595 → 0.895"]
    assert cells["training images"] == ["1,280", "1,280"]


def test_each_prompt_set_has_a_chart_of_its_reward_in_training_and_held_out(tmp_path):
    run = synthetic_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"reward/signs": 0.3 + row["step"] / 100} if "loss" in row else {}
        row |= {"eval/reward/signs": 0.4 + row["step"] / 100} if "eval/reward" in row else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores, _, _ = charts.run_charts([RunReader(run)], ["run"])
    assert [chart["title"] for chart in scores][:2] == ["Reward", "Reward of signs"]
    assert [line["kind"] for line in scores[1]["lines"]] == ["faint", "soft", "dots"]
    assert scores[1]["label"].endswith("held out from 0.400 to 0.800")
    assert "Reward of signs" in page(tmp_path, run).text


def test_cost_is_the_sum_of_the_steps(tmp_path):
    told = summary.cost(RunReader(synthetic_run(tmp_path / "run")))
    assert told["facts"]["time"] == "1 min 25 s", "40 steps of 2 seconds and 5 evaluations of 1"
    assert told["facts"]["training images"] == "1,280"
    assert told["facts"]["images a second"] == "16.0"
    assert sum(part["share"] for part in told["shares"]) == pytest.approx(100)
    assert not {"MFU", "TFLOP/s", "peak memory"} & set(told["facts"])


def test_cost_tells_operations_their_share_of_the_peak_memory_and_the_parts_of_updates(tmp_path):
    run = synthetic_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "loss" in row:
            row |= {"speed/tflop": 3.0, "speed/mfu": 0.1 if row["step"] % 2 else 0.3, "memory/peak_gb": row["step"] / 10}
            row |= {"time/forward": 0.2, "time/backward": 0.25, "time/optimizer": 0.05}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = summary.cost(RunReader(run))
    facts = {name: told["facts"][name] for name in ("TFLOP a step", "TFLOP/s", "MFU", "peak memory")}
    assert facts == {
        "TFLOP a step": "3.000",
        "TFLOP/s": "1.500",
        "MFU": "20 % of this device's measured speed",
        "peak memory": "4.000 GB",
    }
    names = {part["name"] for part in told["shares"]}
    assert {"losses", "backward passes"} < names
    assert sum(part["share"] for part in told["shares"]) == pytest.approx(100)


def test_a_run_without_images_or_evaluations_has_a_report_too(tmp_path):
    bare = synthetic_run(tmp_path / "bare", pictures=False)
    html = page(tmp_path, bare)
    assert "rose by 0.100, from 0.595 to 0.695" in html.text
    assert html.data["runs"][0]["frames"] == []
    rows = [training_row(step, 0.1 * step) for step in range(1, 4)]
    (bare / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = page(tmp_path, bare).text
    assert "for 3 of 40 steps so far: without held-out prompts, only the mean reward in training is known" in said
    assert "0.100 in the first step, 0.300 in the last step" in said
    lost = [{"step": 0, "eval/reward": 0.2}, *rows]  # before its second evaluation
    (bare / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lost))
    assert "with a single evaluation, only the mean reward in training is known" in page(tmp_path, bare).text
    (bare / "metrics.jsonl").write_text("")
    assert "No training step or evaluation has been logged yet" in page(tmp_path, bare).text


def test_a_report_with_more_images_than_prompts_of_a_film_says_nowhere_that_there_are_none(tmp_path):
    html = page(tmp_path, synthetic_run(tmp_path / "run"))
    assert len(PROMPTS) > report.MAX_PROMPTS == len(html.data["runs"][0]["prompts"])
    assert "kept no pictures" not in html.text
    assert "There are no images" not in html.text, "nor to a reader without the script"
    assert "No groups were kept" not in html.text
    bare = page(tmp_path, synthetic_run(tmp_path / "bare", pictures=False))
    assert "There are no images from before and after training" in bare.text
    assert "No groups were kept" in bare.text
    both = page(tmp_path, tmp_path / "run", tmp_path / "bare")
    hidden = {a["id"]: "hidden" in a for _, a in both.elements if a.get("id") in ("no-pictures", "no-groups")}
    assert hidden == {"no-pictures": True, "no-groups": True}, "the script shows them for the second run"


def test_an_image_that_is_none_or_too_large_is_left_out(tmp_path, monkeypatch):
    run = synthetic_run(tmp_path / "run")
    first, second = sorted((run / "pictures").glob("step_*/prompt_0001.webp"))[:2]
    Image.new("RGB", (400, 400)).save(first)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    second.write_bytes(b"RIFF no picture")
    assert report.data_uri(first) is report.data_uri(second) is None
    assert "data:image/webp" in page(tmp_path, run).source
    prompts = [one["prompt"] for one in model_card.gallery(tmp_path, RunReader(run))]
    assert prompts == PROMPTS[:1], "the card shows those before it"


def test_a_folder_without_a_run_is_refused_in_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no metrics\.jsonl"):
        report.write([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_real_run_writes_its_report_at_each_evaluation(tmp_path):
    args = short_run(tmp_path / "run", "steps=4", "evaluation.every=2", "evaluation.max_prompts=4")
    FlowGRPOTrainer(args=args.model_copy(update={"steps": 2})).train()
    early = Page(tmp_path / "run" / "report.html").data["runs"][0]
    assert [frame["step"] for frame in early["frames"]] == [0, 2]
    FlowGRPOTrainer(args=args).train(resume=True)
    html = Page(tmp_path / "run" / "report.html")
    run = html.data["runs"][0]
    assert [frame["step"] for frame in run["frames"]] == [0, 2, 4]
    assert [step["step"] for step in run["groups"]] == [1, 2, 4]
    assert run["size"] == [80, 32]
    assert len(run["groups"][0]["groups"]) == 2
    for group in run["groups"][0]["groups"]:
        assert len(group["items"]) == 4
        assert sum(item["advantage"] for item in group["items"]) == pytest.approx(0, abs=1e-3)
        assert all(item["picture"].startswith("data:image/webp") for item in group["items"])
    assert "brightness" in html.text
    assert str(SAMPLE_REWARDS.parent) not in summary.headline(RunReader(tmp_path / "run"))


def test_ticks_are_round_numbers_that_span_the_axis():
    draw = random.Random(0)
    for _ in range(500):
        low = draw.uniform(-1, 1) * 10 ** draw.randint(-4, 4)
        high = low + abs(draw.gauss(0, 1)) * 10 ** draw.randint(-4, 4) + 1e-9 * abs(low) + 1e-12
        ticks = charts.ticks(low, high, 4)
        assert 2 <= len(ticks) <= 6
        assert len({text for _, text in ticks}) == len(ticks), ticks
        slack = 1e-6 * (high - low)
        assert all(low - slack <= value <= high + slack for value, _ in ticks)


def test_a_line_keeps_its_ends_and_its_order_however_long_it_is():
    points = [(float(i), float((i * 7919) % 101)) for i in range(5000)]
    kept = charts.downsample(points)
    assert len(kept) == charts.MAX_POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    chart = charts.draw("x", [charts.Line("up", [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)])])
    heights = [float(pair.split()[1]) for pair in chart["lines"][0]["path"][1:].split("L")]
    assert heights[1] < heights[2] < heights[0], "an SVG counts from the top"
    assert charts.draw("x", [charts.Line("flat", [(0.0, 1.0), (1.0, 1.0)])]) is None
