"""Results are exchanged as a whole: whatever call a process is killed before, the earlier or the new one is there."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.kill_points import contents, states

from flow_grpo import files
from flow_grpo.files import WriteError, atomic_file, atomic_folder, finish_files, new_files

OLD, NEW = {"a": b"old", "sub/b": b"old", "gone": b"old"}, {"a": b"new", "sub/b": b"new", "more": b"new"}
DEAD = 2**22 + 1  # larger than any process id


def fill(folder: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.fixture(autouse=True)
def nothing_is_swept(monkeypatch):
    monkeypatch.setattr(files, "_swept", set())


@pytest.mark.parametrize("place", ["alone", "with others", "no exchange"])
def test_a_kill_before_any_call_leaves_the_old_or_the_new_files(tmp_path, monkeypatch, place):
    others = {"mine": b"mine", "sub/mine": b"mine"} if place == "with others" else {}
    if place == "no exchange":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    home = tmp_path / "home"
    fill(home / "result", {**OLD, **others})

    def write() -> None:
        with new_files(home / "result", "result", OLD) as folder:
            fill(folder, NEW)

    seen = []
    for state in states(home, tmp_path / "states", write):
        with new_files(state / "result", "next", ["next"]) as folder:  # what the next command does first
            finish_files(state / "result", "result")
            (folder / "next").write_bytes(b"")
        left = {name: data for name, data in contents(state / "result").items() if name != "next"}
        assert left in ({**OLD, **others}, {**NEW, **others})
        seen.append(left["a"])
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == b"old"
    assert seen[-1] == b"new"
    assert len(seen) > 10
    assert not list(home.rglob(".*"))


def test_without_other_files_no_reader_ever_sees_a_mixture(tmp_path):
    fill(tmp_path / "home/result", OLD)

    def write() -> None:
        with new_files(tmp_path / "home/result", "result", OLD) as folder:
            fill(folder, NEW)

    for state in states(tmp_path / "home", tmp_path / "states", write):
        assert contents(state / "result") in (OLD, NEW)


def test_a_folder_is_exchanged_where_it_is_and_a_link_to_it_stays(tmp_path):
    fill(tmp_path / "far/result", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "far/result")
    with atomic_folder(tmp_path / "link") as folder:
        fill(folder, NEW)
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "far/result") == NEW


def test_an_error_leaves_the_earlier_files_and_nothing_else(tmp_path):
    for number, others in enumerate(({}, {"mine": b"mine"})):
        folder = tmp_path / str(number) / "result"
        fill(folder, {**OLD, **others})
        with suppress(KeyError), new_files(folder, "result", OLD) as partial:
            fill(partial, NEW)
            raise KeyError
        assert contents(folder) == {**OLD, **others}
        assert not list(folder.parent.rglob(".*"))
    with suppress(KeyError), new_files(tmp_path / "new", "result"):
        raise KeyError
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_a_sentence_with_the_path_and_another_error_keeps_its_own(tmp_path):
    with pytest.raises(WriteError, match=r"result could not be written: no space left on device"):  # noqa: SIM117
        with new_files(tmp_path / "result", "result"):
            raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(FileNotFoundError), new_files(tmp_path / "result", "result"):
        (tmp_path / "not there").read_bytes()


def test_files_of_a_downloaded_folder_are_not_moved_or_deleted_outside_it(tmp_path):
    fill(
        tmp_path, {"private": b"mine", "result/.x.complete/.obsolete": b'["../private", 3]', "result/.x.complete/out/a": b""}
    )
    (tmp_path / "result/out").symlink_to(tmp_path)
    finish_files(tmp_path / "result", "x")
    assert contents(tmp_path)["private"] == b"mine"
    assert not (tmp_path / "a").exists()


def test_what_dead_processes_left_is_swept_and_what_others_write_is_not(tmp_path):
    dead = [f".report.{DEAD}.partial.html", f".report.{files.HOST}-{DEAD}.partial.html", f".x.{files.HOST}-{DEAD}.partial"]
    alive = [f".x.{files.HOST}-{os.getppid()}.partial", f".x.ffffff-{DEAD}.partial", ".x.partial", "x.5.partial"]
    fill(tmp_path, dict.fromkeys([*dead[:2], f"{dead[2]}/inner", *alive], b""))
    with atomic_file(tmp_path / "report.html") as partial:
        partial.write_bytes(b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*alive, "report.html"])
