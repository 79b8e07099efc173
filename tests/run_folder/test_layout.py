"""The names of a run folder are in one place, and folders of steps are found again whatever lies next to them."""

import ast
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as s
from support.paths import ROOT

from flow_grpo.run_folder import layout

OWN = {
    layout.METRICS,
    layout.TORN,
    layout.MACHINE,
    layout.TRACKERS,
    layout.STATE,
    layout.MANIFEST,
    layout.EVALUATION,
    layout.GROUPS,
}
OWN |= {layout.BEFORE, layout.AFTER, layout.BEFORE_AFTER, layout.CURVES, layout.REPORT, layout.LOCK, layout.OWNER}
OWN |= {layout.EXPORT_MANIFEST, layout.CHECKPOINTS}


@given(s.sets(s.integers(0, 10**8), max_size=5))
def test_folders_of_steps_come_in_order_and_other_names_are_passed_over(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("steps")
    for step in steps:
        layout.step_folder(folder, step).mkdir()
        assert layout.step_of(layout.step_folder(folder, step)) == step
    for other in ("step_", "step_²", "step_-1", "step_x", ".step_000001", "000001"):
        (folder / other).mkdir()
        assert layout.step_of(folder / other) is None
    (folder / "step_999999999").write_text("a file")
    assert layout.step_folders(folder) == [(step, layout.step_folder(folder, step)) for step in sorted(steps)]


def test_no_other_module_spells_a_name_of_the_run_folder():
    for file in sorted((ROOT / "flow_grpo").rglob("*.py")):
        if file != Path(layout.__file__):
            spelt = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)} & OWN
            assert not spelt, f"{file} spells {spelt}"
