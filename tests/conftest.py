"""Settings of pytest and hypothesis for all tests, and the fixture of the embedded model."""

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.embedded import stir, tiny_policy

from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.policy import Policy
from flow_grpo.report import page
from flow_grpo.tracking import tracker
from rewards import user_code

quiet_libraries()
# A job that a shell starts in the background ignores Ctrl-C, and so would every command that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores, and the processes that they start share theirs
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")  # as fast as the machine is, and the same examples each time


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_changed_settings() -> None:
    """What a reward of an earlier test changed is forgotten: a process remembers it by the reward's name."""
    user_code.changed.clear()


@pytest.fixture
def policy() -> Policy:
    """The embedded model with a LoRA that already does something."""
    policy = tiny_policy()
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    stir(policy)
    return policy


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the report and the curves, which take most of a short run's time and have tests of their own."""
    monkeypatch.setattr(page, "write", lambda folders, out: out)
    monkeypatch.setattr(tracker, "plot_curves", lambda folder: None)
