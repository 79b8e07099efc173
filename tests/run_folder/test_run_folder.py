"""The run folder: one process at a time writes it, nothing in it is ever half written, and nothing that lies in it ends a run."""

import errno
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from support import small_policy as small
from support.cli_process import begin, run
from support.embedded import short_run, stir, tiny_policy
from support.fake_run import synthetic_run
from support.run_contents import MEASURED

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.evaluation.evaluator import Evaluator
from flow_grpo.files import WriteError, append_line, atomic_folder, write_atomic
from flow_grpo.policy.hub import WEIGHTS
from flow_grpo.report import page
from flow_grpo.run_folder import checkpoint, layout
from flow_grpo.run_folder.layout import METRICS, TORN
from flow_grpo.run_folder.metrics_file import read_metrics, rewind
from flow_grpo.run_folder.opening import locked
from flow_grpo.run_folder.weights import load_trained_weights
from flow_grpo.tracking import services
from flow_grpo.tracking.tracker import Tracker, plot_curves
from flow_grpo.trainer import FlowGRPOTrainer

NO_ROWS = {
    "cut off": b'{"step": 2, "rew',
    "a list": b"[1, 2]",
    "a number": b"3",
    "without a step": b'{"reward": 0.5}',
    "a step in words": b'{"step": "two", "reward": 0.5}',
    "no step": b'{"step": NaN, "reward": 0.5}',
    "half a step": b'{"step": 1.5, "reward": 0.5}',
    "a step before the first": b'{"step": -1}',
    "an endless step": b'{"step": 1' + b"0" * 400 + b"}",
    "too many digits": b'{"step": ' + b"1" * 5000 + b"}",
    "not UTF-8": b'{"step": 2, "warning": "\xff\xfe"}',
    "zeros of a lost block": b"\0" * 64,
    "too deep": b"[" * 100_000,
}


@contextmanager
def full_disk(size: int = 0) -> Iterator[None]:
    """Within it, the system lets no file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def numbers(folder: Path) -> list[dict]:
    """The metrics without the seconds, which no run repeats."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trainer(folder).train()
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def trainer(folder: Path, *overrides: str) -> FlowGRPOTrainer:
    return small.trainer(short_run(folder, "save_every=1", "trackers=[]", *overrides))


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_with_its_owner_and_free_when_that_is_killed(tmp_path):
    args = short_run(tmp_path / "run", "steps=400", "save_every=1", "evaluation.prompts=null", "trackers=[]")
    (tmp_path / "run.yaml").write_text(args.to_yaml())
    owner = begin("train", "run.yaml", cwd=tmp_path)
    owner.wait_for(lambda: len(read_metrics(tmp_path / "run")) >= 2)
    for resume in (False, True):
        with pytest.raises(ValueError, match=f"is in use by process {owner.process.pid} on {socket.gethostname()}, since "):
            FlowGRPOTrainer(args=args).train(resume)
    assert "is in use by process" in run("train", "run.yaml", cwd=tmp_path, code=75)
    page.write([tmp_path / "run"], tmp_path / "report.html")  # reading needs no lock
    assert owner.process.is_alive()
    owner.process.kill()
    owner.process.join()
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1)), "nobody else has written"
    newest = checkpoint.steps(tmp_path / "run" / "checkpoints")[0]
    again = FlowGRPOTrainer(args=args.model_copy(update={"steps": newest}))
    again.train(resume=True)
    assert again.step == newest


def test_the_lock_is_given_back_after_an_error_and_is_not_taken_twice_in_one_process(tmp_path):
    def twice():
        with locked(tmp_path, print), locked(tmp_path, print):
            pass

    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on "):
        twice()
    with locked(tmp_path, print):
        pass


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch):
    def refuse(self):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))  # as NFS without a lock server

    monkeypatch.setattr(FileLock, "acquire", refuse)
    said = []
    with locked(tmp_path, said.append):
        (tmp_path / "file").write_text("written")
    assert len(said) == 1
    assert "has no locks" in said[0]


def test_two_comparisons_do_not_share_a_folder(tmp_path):
    with locked(tmp_path / "out", print):
        assert "is in use by process" in run("compare", "tiny_grpo", "--out", "out", cwd=tmp_path, code=75)


# -- metrics.jsonl ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NO_ROWS)
def test_a_line_that_is_no_row_is_put_aside_and_ends_nothing(tmp_path, kind):
    rows = [b'{"step": 1, "reward": 0.5}', b'{"step": 2, "reward": NaN, "new": null}', b'{"step": 3, "warning": "!"}']
    bad = NO_ROWS[kind]
    for place in range(4):
        folder = tmp_path / str(place)
        folder.mkdir()
        lines = [*rows[:place], bad, *rows[place:]]
        (folder / METRICS).write_bytes(b"\n".join(lines))
        assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3]
        said = rewind(folder, 2)
        assert said.startswith(f"{folder / METRICS} had 1 line that is no row of metrics, ")
        assert (folder / METRICS).read_bytes().splitlines() == rows[:2], "as they were written"
        assert (folder / TORN).read_bytes() == bad + b"\n"
        assert rewind(folder, 2) is None


def test_values_that_are_no_numbers_are_left_out_of_a_row_and_endless_ones_are_infinite(tmp_path):
    row = {"step": 1, "reward": "high", "loss": None, "kl": [1], "lr": 1e300, "n": -(10**400), "warning": 3, "x": 2}
    (tmp_path / METRICS).write_text(json.dumps(row))
    assert read_metrics(tmp_path) == [{"step": 1, "lr": float("inf"), "n": -float("inf"), "x": 2}]


def test_metrics_that_can_not_be_rewritten_stay_as_they_were(tmp_path):
    content = "".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(50))
    (tmp_path / METRICS).write_text(content)
    with full_disk(100), pytest.raises(WriteError, match=rf"{METRICS} could not be written: file too large\."):
        rewind(tmp_path, 40)
    assert (tmp_path / METRICS).read_text() == content
    assert names(tmp_path) == [METRICS]


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_run_with_a_torn_line_is_not_begun_anew_and_is_resumed_with_all_other_rows(copied, capsys, place):
    lines = (copied / METRICS).read_bytes().splitlines(keepends=True)
    torn = lines[place][:20] + (b"" if place == -1 else b"\n")
    lines[place] = torn
    (copied / METRICS).write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="already holds a run"):
        trainer(copied).train()
    kept = numbers(copied)
    assert len(kept) == len(lines) - 1
    trainer(copied).train(resume=True)
    assert [row for row in numbers(copied) if row in kept] == kept
    assert f"1 line that is no row of metrics, cut off or written by something else: moved to {copied / TORN}" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (copied / TORN).read_bytes() == torn.strip() + b"\n"


def test_a_folder_whose_first_line_alone_is_torn_holds_a_run(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 1, "rew')
    with pytest.raises(ValueError, match="already holds a run"):
        trainer(tmp_path).train()


def test_reports_and_curves_are_drawn_of_whatever_rows_there_are(tmp_path):
    draw, folder = random.Random(0), synthetic_run(tmp_path / "run", steps=20, every=5)
    rows = (folder / METRICS).read_text().splitlines()
    odd = [None, "x", True, [], {}, float("nan"), float("inf"), 1e308, -1e308, 10**400, -1, 0]
    for number in range(20):
        changed = [json.loads(row) for row in rows]
        for _ in range(draw.choice([1, 5, 50])):
            row = draw.choice(changed)
            row[draw.choice(list(row) or ["step"])] = draw.choice(odd)
        for row in draw.sample(changed, 3):
            row.pop(draw.choice(list(row)))
        draw.shuffle(changed)
        (folder / METRICS).write_text("\n".join(map(json.dumps, changed[: draw.randint(0, len(changed))])))
        page.write([folder], tmp_path / "report.html")
        if number % 5 == 0:
            plot_curves(folder)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def sealed(folder: Path, step: int, content: bytes) -> None:
    """A checkpoint with that content, whose checksum is right."""
    place = layout.step_folder(folder, step)
    place.mkdir(parents=True)
    (place / layout.STATE).write_bytes(content)
    (place / layout.MANIFEST).write_text(json.dumps({"step": step, "sha256": hashlib.sha256(content).hexdigest()}))


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_what_is_no_checkpoint_of_its_step_is_passed_over(tmp_path):
    checkpoint.save(tmp_path, 1, {"step": 1}, keep=20)
    for step, content in enumerate((b"", b"\x80\x05garbage", saved([1, 2]), saved({"step": 1}), saved(torch.ones(2))), 2):
        sealed(tmp_path, step, content)
    for step, seal in enumerate(("[1]", '"text"', "{}", "[" * 100_000, "{", '{"sha256": null}'), 7):
        checkpoint.save(tmp_path, step, {"step": step}, keep=20)
        (layout.step_folder(tmp_path, step) / layout.MANIFEST).write_text(seal)
    (tmp_path / "step_000020").mkdir()
    (tmp_path / "step_000021").write_text("a file")
    (tmp_path / "step_²").mkdir()
    state, warnings = checkpoint.latest(tmp_path)
    assert state == {"step": 1}
    assert len(warnings) == 12
    assert all(" is damaged (" in warning for warning in warnings)
    with pytest.raises(ValueError, match="has no whole checkpoint of step 7: its checksum is wrong"):
        checkpoint.read(tmp_path, 7)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for step in (999_999, 1_000_000, 5):
        checkpoint.save(tmp_path, step, {"step": step}, keep=3)
    assert checkpoint.latest(tmp_path)[0] == {"step": 1_000_000}
    checkpoint.delete_after(tmp_path, 999_999)
    assert checkpoint.steps(tmp_path) == [999_999, 5]


def test_files_named_as_steps_block_no_resume(copied):
    (copied / "checkpoints" / "step_999999").write_text("mine")
    (copied / "pictures" / "step_999999").write_text("mine")
    before = numbers(copied)
    trainer(copied).train(resume=True)
    assert numbers(copied) == before
    assert (copied / "checkpoints" / "step_999999").read_text() == "mine"


@pytest.mark.parametrize("other", ["lora.rank=8", "lora.targets=[to_k]", "ema_decay=0"])
def test_a_checkpoint_of_another_config_is_refused_in_a_clear_error(copied, tmp_path, other):
    made = trainer(tmp_path / "other", other)
    made.state.step = 2
    made.save()
    shutil.rmtree(copied / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", copied / "checkpoints")
    with pytest.raises(ValueError, match=r"the checkpoint of step 2 is not one of this run's settings \(.*\): resume with"):
        trainer(copied).train(resume=True)


def test_a_checkpoint_without_what_a_run_needs_is_refused_in_a_clear_error(copied):
    for state in ({"step": 2, "memory": {"microbatch": 4}}, {"step": 2, "memory": []}, {"step": 2, "memory": {}}):
        checkpoint.save(copied / "checkpoints", 2, state, keep=1)
        with pytest.raises(ValueError, match=r"is not one of this run's settings|0\.2 or before"):
            trainer(copied).train(resume=True)
        with pytest.raises(ValueError, match="was not written by flow-grpo: it holds no adapter"):
            load_trained_weights(tiny_policy(), str(copied / "checkpoints" / "step_000002"))


def test_resuming_a_folder_that_is_not_there_makes_none(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere has no checkpoint to resume from: start the run without --resume"):
        trainer(tmp_path / "nowhere").train(resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_run_whose_metrics_are_lost_is_not_begun_anew_over_its_checkpoints(copied):
    (copied / METRICS).unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        trainer(copied).train()


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_what_can_not_be_written_leaves_what_was_there(tmp_path):
    write_atomic(tmp_path / "file", "before")
    with atomic_folder(tmp_path / "folder") as made:
        (made / "file").write_text("before")
    (tmp_path / "lines").write_text("one\n")
    for _ in range(2):
        with full_disk(100):
            with pytest.raises(WriteError, match=f"{tmp_path / 'file'} could not be written: file too large."):
                write_atomic(tmp_path / "file", "x" * 1000)
            with (
                pytest.raises(WriteError, match=f"{tmp_path / 'folder'} could not be written"),
                atomic_folder(tmp_path / "folder") as made,
            ):
                (made / "file").write_text("x" * 1000)
            with pytest.raises(WriteError, match=f"{tmp_path / 'lines'} could not be written"):
                append_line(tmp_path / "lines", "x" * 1000)
            append_line(tmp_path / "lines", "two")
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "file").read_text() == "before"
    assert (tmp_path / "lines").read_text() == "one\ntwo\ntwo\n"
    assert names(tmp_path) == ["file", "folder", "lines"]


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(tmp_path / "pipe", "page")
    assert os.read(reading, 100) == b"page"
    os.close(reading)


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_equal_weights_are_equal_files_with_the_mode_of_any_file(tmp_path, mask):
    policy = tiny_policy()
    policy.add_lora(4, 8, "all", seed=0)
    stir(policy)
    former = os.umask(mask)
    try:
        files = [policy.lora.save(tmp_path / str(i)) for i in range(8)]
    finally:
        os.umask(former)
    assert len({file.read_bytes() for file in files}) == 1
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}
    assert names(tmp_path / "0") == [WEIGHTS]
    header = json.loads(files[0].read_bytes()[8 : 8 + int.from_bytes(files[0].read_bytes()[:8], "little")])
    targets = json.loads(header["__metadata__"]["lora_adapter_metadata"])["transformer.target_modules"]
    assert targets == sorted(targets), "else it depends on the process"
    tiny_policy().load_lora(files[0])
    assert all(torch.equal(a, b) for a, b in zip(load_file(files[0]).values(), load_file(files[1]).values(), strict=True))


def test_a_whole_transformer_is_written_alike_too(tmp_path):
    policy = tiny_policy()
    policy.enable_full_finetuning()
    for name in ("a", "b"):
        policy.save(tmp_path / name)
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["config.json", "diffusion_pytorch_model.safetensors"]
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).stat().st_mode & 0o777 == 0o644


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "pictures", "file"),
    [
        pytest.param(0, True, "pictures/step_000001/", marks=pytest.mark.slow),
        (300, False, "metrics.jsonl"),
        (6_000, False, "checkpoints/step_000001"),
    ],
)
def test_a_full_disk_is_reported_with_the_path_and_the_run_goes_on_where_there_is_room(
    finished, tmp_path, monkeypatch, size, pictures, file
):
    if not pictures:
        monkeypatch.setattr(Evaluator, "record_groups", lambda *given: None)
    made = trainer(tmp_path / "run")
    (name,) = made.rewards.rewards
    mine = made.rewards.rewards[name]
    limits = full_disk(size)

    def fills(images, prompts):
        limits.__enter__()
        return mine(images, prompts)

    made.rewards.rewards[name] = fills
    try:
        with pytest.raises(
            ValueError, match=rf"{file}.* could not be written: file too large\. What came after the checkpoint "
        ):
            made.train()
    finally:
        limits.__exit__(None, None, None)
    assert not list((tmp_path / "run").rglob("*.partial*"))
    trainer(tmp_path / "run").train(resume=True)
    assert numbers(tmp_path / "run") == numbers(finished)
    assert (tmp_path / "run" / "lora" / WEIGHTS).read_bytes() == (finished / "lora" / WEIGHTS).read_bytes()


def test_a_rewards_messages_are_not_lost_when_the_checkpoint_after_it_finds_no_room(tmp_path):
    made = trainer(tmp_path / "run", "evaluation.prompts=null")
    (name,) = made.rewards.rewards
    limits = full_disk()

    def fails(images, prompts):
        limits.__enter__()
        raise OSError("the camera is off")

    made.rewards.rewards[name] = fails
    try:
        with pytest.raises(ValueError, match=r"the camera is off.* could not be written: .* go on with --resume"):
            made.train()
    finally:
        limits.__exit__(None, None, None)


def test_a_tracker_that_finds_no_room_is_left_out_without_a_traceback(tmp_path, capfd):
    with Tracker(tmp_path, 400) as tracker:
        tracker.attach(
            services.open_services(tmp_path, FlowGRPOConfig.from_yaml("tiny_grpo", [f"output_dir={tmp_path}"]), tracker.info)
        )
        with full_disk(5000):
            while tracker._services:  # its thread writes when it likes
                tracker._notify(lambda service: service.log(1, {"x": 1.0}))
    output, errors = capfd.readouterr()
    sentences = re.findall(r"the tracker tensorboard failed and is off from here on \(.*File too large\)", output)
    assert len(sentences) == 1, "tensorboard's own words for it differ by version"
    assert errors == ""
