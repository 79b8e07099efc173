"""`--profile`: what it writes, and that it changes nothing."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import small_policy as small
from support.embedded import short_run
from support.run_contents import numbers, weights
from torch.autograd import DeviceType

from flow_grpo.tracking.profiler import TrainingProfiler, busy_seconds, page

TIMES = st.integers(0, 60)


@pytest.mark.usefixtures("no_report")
def test_a_profiled_run_has_the_numbers_of_one_without(tmp_path):
    for name, callbacks in (("plain", []), ("profiled", [profiler := TrainingProfiler(2)])):
        args = short_run(tmp_path / name, "steps=4", "evaluation.prompts=null")
        small.trainer(args, callbacks=callbacks).train()
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "profiled")
    plain, profiled = weights(tmp_path / "plain"), weights(tmp_path / "profiled")
    assert all(torch.equal(plain[key], profiled[key]) for key in plain)

    folder = tmp_path / "profiled" / "profile"
    assert profiler.written == folder / "summary.md"
    assert sorted(file.name for file in folder.iterdir()) == ["summary.md", "trace.json.gz"]
    text = profiler.written.read_text()
    assert text.startswith("# Profile of 2 training steps from step 2 on\n")
    for name in ("| rollout |", "| decode |", "| reward |", "| update |", "| optimizer |", " aten::"):
        assert name in text
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("rollout") == names.count("update") == 2
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_a_run_with_fewer_steps_is_profiled_to_its_end(tmp_path):
    profiler = TrainingProfiler(5)
    small.trainer(short_run(tmp_path, "steps=2", "evaluation.prompts=null"), callbacks=[profiler]).train()
    page = profiler.written
    assert page.read_text().startswith("# Profile of 1 training step from step 2 on\n")
    again = TrainingProfiler(1)
    small.trainer(short_run(tmp_path, "steps=3", "evaluation.prompts=null"), callbacks=[again]).train(resume=True)
    assert again.written is None, "a single step is not profiled"
    assert page.read_text().startswith("# Profile of 1 training step from step 2 on\n")


@given(intervals=st.lists(st.tuples(TIMES, TIMES).map(sorted)))
def test_busy_time_is_the_time_that_any_interval_covers(intervals):
    covered = {moment for start, end in intervals for moment in range(start, end)}
    assert busy_seconds(intervals) == pytest.approx(len(covered) / 1e6)


def event(name: str, start: float, end: float, device=DeviceType.CPU, annotation: bool = False):
    """An event of a profile, in microseconds."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)


def test_ranges_that_a_gpu_repeats_are_neither_phases_nor_kernels():
    events = [
        event("ProfilerStep*", 0, 4e6, annotation=True),
        event("ProfilerStep*", 0, 4e6, DeviceType.CUDA, annotation=True),
        event("rollout", 0, 2e6, annotation=True),
        event("rollout", 1e6, 3e6, DeviceType.CUDA, annotation=True),
        event("aten::mm", 0, 1e6),
        event("gemm", 1e6, 2e6, DeviceType.CUDA),
    ]
    averages = SimpleNamespace(table=lambda sort_by, row_limit: f"by {sort_by}")
    text = page(SimpleNamespace(events=lambda: events, key_averages=lambda: averages), first=1)
    assert "| rollout | 2.00 | 50% |" in text
    assert "75% of the time no kernel runs on the GPU" in text
    assert "by self_device_time_total" in text
