"""The notebooks run from their first cell to their last, with a smaller budget, and show what they promise."""

import nbformat
import pytest
from nbclient import NotebookClient
from support.paths import ROOT

SMALL = "STEPS, HELD_OUT, FOLDER = 1, 4, 'runs/small'"
IMAGES = {"teach_it_to_spell": 4, "your_own_reward": 2}  # cells with an image below them


@pytest.mark.slow
@pytest.mark.parametrize("name", ["teach_it_to_spell", "your_own_reward"])
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "they are kept without outputs"
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = SMALL
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(shown) == IMAGES[name]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "step   1" in printed
    assert "Warning" not in printed
