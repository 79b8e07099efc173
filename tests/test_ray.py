"""The example for Ray Train on two raylets of this machine: a killed worker is replaced, and the metrics are those of one process."""

import os
import subprocess
import sys

import pytest
from support.paths import ROOT
from support.process_runs import config, run_alone, same

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
DIES = """
import os, signal
from pathlib import Path

calls = 0


def brightness(images, prompts):
    global calls
    calls += 1
    file = Path(__file__).with_name("has_died")
    if os.environ.get("RANK") == "1" and calls == 3 and not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(image.mean()) for image in images]
"""


@pytest.mark.slow
def test_ray_train_replaces_a_killed_worker_to_the_same_metrics(tmp_path):
    from ray.cluster_utils import Cluster

    for name, text in (("alone", DIES.replace("calls == 3", "False")), ("killed", DIES)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    files = [config(tmp_path / name, f"rewards={{{tmp_path / name}/mine.py:brightness: 1}}") for name in ("alone", "killed")]
    run_alone(files[0])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        env = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), str(files[1]), "--workers", "2"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    finally:
        cluster.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed" / "has_died").exists()
    same(tmp_path / "alone", tmp_path / "killed")
