"""Settings of 0.4 that are gone: what 0.4 wrote by default loads, another value is one sentence that says what to do."""

from pathlib import Path

import pytest

from flow_grpo.config.retired import RETIRED, documented
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError

OTHER = {"objective.rollout_policy_decay": 0.3, "objective.anchors.*.gate": "advantage", "sampling.branches": [2, 4]}


def settings(path: str, value) -> dict:
    """`value` at the path, over the least that makes a config of it."""
    values: dict = {"objective": {"name": "grpo"}, "prompts": "signs"}
    if "anchors" in path:
        values["objective"]["anchors"] = [{"to": "base", "weight": 1.0, path.rpartition(".")[2]: value}]
        return values
    section = values
    *parents, last = path.replace("*", "jpeg_size").split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value
    return values


@pytest.mark.parametrize("retired", [one for one in RETIRED if not one.values], ids=lambda one: one.path)
def test_the_default_of_a_retired_setting_is_dropped(retired):
    written_by_04 = settings(retired.path, retired.default)
    assert FlowGRPOConfig.model_validate(written_by_04) is not None
    stage = {"steps": 2, **{key: value for key, value in written_by_04.items() if key in ("objective", "sampling")}}
    assert len(FlowGRPOConfig(prompts="signs", stages=[stage]).resolved_stages()) == 1


@pytest.mark.parametrize("retired", RETIRED, ids=lambda one: one.path)
def test_a_retired_value_is_refused_with_what_to_do_instead(retired):
    for value in retired.values or (OTHER.get(retired.path, 0.77),):
        with pytest.raises(FlowGRPOError) as error:
            FlowGRPOConfig(**settings(retired.path, value))
        assert "is no longer supported: " in str(error.value)
        assert str(error.value).endswith(f"{retired.instead}.")
        assert retired.values or any(words in str(error.value) for words in ("remove it", "leave it out, and "))


def test_the_changelog_has_a_row_for_each_retired_setting():
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    table = [f"| `{setting}` | {instead} |" for setting, instead in documented()]
    assert "\n".join(table) in changelog


def test_a_retired_objective_is_refused_by_one_word_too():
    with pytest.raises(FlowGRPOError, match="epg is no longer supported: choose pepg"):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["objective=epg"])
