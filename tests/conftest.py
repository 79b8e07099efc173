"""Settings of pytest and hypothesis for all tests, and the fixture of the embedded model."""

import gc
import os
import pwd
import signal
from collections.abc import Iterator
from pathlib import Path

gc.disable()  # until all tests are collected: half of the time was looking through modules, which stay

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.embedded import check_other_models, stir, tiny_policy
from support.traces import known_operations, known_trace

from flow_grpo.plan import estimate
from flow_grpo.policy import loading
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.step_meter import StepMeter
from flow_grpo.report import page
from flow_grpo.rewards import user_code
from flow_grpo.tracking import tracker

quiet_libraries()
# A job that a shell starts in the background ignores Ctrl-C, and so would every command that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores, and the processes that they start share theirs
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")  # as fast as the machine is, and the same examples each time


# The files that take longest begin first: else a worker is left alone with one at the end.
LONGEST = (
    "test_docs.py",
    "policy/test_families.py",
    "test_trainer.py",
    "rewards/test_serving.py",
    "test_train.py",
    "distributed/test_processes.py",
    "plan/test_plan.py",
    "cli/test_app.py",
    "training/test_objectives_end_to_end.py",
    "policy/test_image_families.py",
    "training/test_reward_gradients.py",
    "cli/test_compare.py",
    "training/test_edits.py",
    "export/test_export.py",
    "test_other_device.py",
    "policy/test_policy.py",
    "test_python_api.py",
    "report/test_report.py",
    "cli/test_train.py",
    "report/test_browser.py",
    "run_folder/test_run_folder.py",
    "doctor/test_dry_run.py",
    "doctor/test_run.py",
    "test_examples.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist take files in the order of collection, not by their number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of LONGEST first."""
    position = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: position.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look through them again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def known_once() -> Iterator[None]:
    """The operations of equal models are counted once and their files checked once: a third of a short run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepMeter, "_measure", known_operations)
        patch.setattr(loading, "check_weight_files", check_other_models)
        yield


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
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder and without a name, as `docker run --user 12345` has."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the report and the curves, which take most of a short run's time and have tests of their own."""
    monkeypatch.setattr(page, "write_report", lambda run: run)
    monkeypatch.setattr(tracker, "plot_curves", lambda folder: None)


@pytest.fixture(scope="module")
def known_traces() -> Iterator[None]:
    """Plans and dry runs reuse the trace of an equal model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "ModelTrace", known_trace)
        yield
