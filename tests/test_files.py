"""Paths that a found file may name, and what is said of one that can't be written."""

import pytest

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import WriteError, atomic_folder, inside, write_atomic


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set" / "in").mkdir(parents=True)
    (tmp_path / "private.png").touch()
    (tmp_path / "set" / "in" / "a.png").touch()
    return tmp_path / "set"


def test_a_path_inside_the_folder_is_taken_and_need_not_exist(folder):
    (folder / "link.png").symlink_to(folder / "in" / "a.png")
    for name in ("in/a.png", "in/../in/a.png", "missing.png", "link.png"):
        assert inside(folder, name) == folder / name


def test_a_path_out_of_the_folder_is_refused(folder):
    (folder / "link.png").symlink_to("../private.png")
    (folder / "up").symlink_to("..")
    absolute = str(folder / "in" / "a.png")
    for name in ("../private.png", "in/../../private.png", "/etc/passwd", absolute, "link.png", "up/private.png", "../set2"):
        with pytest.raises(FlowGRPOError, match=r"rows\.csv names .* outside its folder"):
            inside(folder, name, "rows.csv")


def test_links_in_a_circle_are_refused(folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    with pytest.raises(FlowGRPOError, match=r"can't be followed|outside"):
        inside(folder, "a/c.png")


@pytest.mark.parametrize("name", ["", " ", "a\0b", None, 3, ["a.png"]])
def test_what_is_no_path_is_refused(folder, name):
    with pytest.raises(FlowGRPOError, match="instead of a path"):
        inside(folder, name)


def test_the_links_of_the_hubs_cache_are_inside(tmp_path):
    snapshot, blobs = tmp_path / "datasets--a" / "snapshots" / "0f", tmp_path / "datasets--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1a").touch()
    (blobs / "1b").symlink_to("/etc/passwd")
    for name in ("1a", "1b"):
        (snapshot / f"{name}.png").symlink_to(f"../../blobs/{name}")
    assert inside(snapshot, "1a.png").is_file()
    with pytest.raises(FlowGRPOError):
        inside(snapshot, "1b.png")


def test_a_link_to_nothing_is_named_by_what_it_leads_to(tmp_path):
    (tmp_path / "run").symlink_to("gone")
    with pytest.raises(
        WriteError, match=r"config\.yaml could not be written: .*run is a link to gone, which does not exist"
    ):
        write_atomic(tmp_path / "run" / "config.yaml", "x")


@pytest.mark.parametrize(
    "name",
    ["a" * 255, f"{'b' * 250}.yaml", f"{'字' * 83}.json"],
    ids=["no suffix", "a suffix", "three bytes a letter"],
)
def test_names_up_to_the_file_systems_limit_can_be_written(tmp_path, name):
    for content in ("first", "second"):
        write_atomic(tmp_path / name, content)
        with atomic_folder(tmp_path / "folders" / name) as folder:
            (folder / "file").write_text(content)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]
    assert (tmp_path / name).read_text() == (tmp_path / "folders" / name / "file").read_text() == "second"
    assert [path.name for path in (tmp_path / "folders").iterdir()] == [name]


def test_a_name_beyond_the_limit_is_a_sentence(tmp_path):
    with pytest.raises(WriteError, match=r"could not be written: file name too long\."):
        write_atomic(tmp_path / ("a" * 256), "x")
