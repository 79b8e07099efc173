"""Votes on images, in the forms of our own files, of Pick-a-Pic and of ImageRewardDB."""

import json

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flow_grpo.data.votes import load_votes
from flow_grpo.errors import FlowGRPOError


def found(file) -> list[tuple]:
    return [(vote.prompt, vote.better, vote.worse) for vote in load_votes(str(file))]


@pytest.fixture
def lines(tmp_path):
    """Writes rows to a file beside the images 0.png to 3.png."""
    for i in range(4):
        Image.new("L", (8, 8), i).save(tmp_path / f"{i}.png")

    def write(*rows: dict):
        (tmp_path / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "votes.jsonl"

    return write


@pytest.mark.parametrize("names", [("chosen", "rejected"), ("better", "worse")])
def test_a_row_is_a_pair(lines, names, tmp_path):
    file = lines(
        {"prompt": "a", names[0]: "1.png", names[1]: "0.png"}, {"prompt": "b", names[0]: "2.png", names[1]: "3.png"}
    )
    assert found(file) == [("a", tmp_path / "1.png", tmp_path / "0.png"), ("b", tmp_path / "2.png", tmp_path / "3.png")]


def test_pick_a_pics_labels_are_votes_and_its_ties_none(tmp_path):
    labels = [(1.0, True), (0.0, True), (0.5, True), (None, True), (float("nan"), True), (0.0, False)]
    rows = [
        {"caption": f"p{i}", "jpg_0": b"left", "jpg_1": b"right", "label_0": label, "has_label": has_label}
        for i, (label, has_label) in enumerate(labels)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "votes.parquet")
    assert found(tmp_path / "votes.parquet") == [("p0", b"left", b"right"), ("p1", b"right", b"left")]


@pytest.mark.parametrize("column", ["image", "image_path"])
def test_all_pairs_of_imagerewarddbs_ranks_are_votes(lines, tmp_path, column):
    ranks = [("x", 2), ("x", 1), ("y", 1), ("x", 2)]
    file = lines(*({"prompt_id": p, "prompt": f"of {p}", column: f"{i}.png", "rank": r} for i, (p, r) in enumerate(ranks)))
    assert found(file) == [("of x", tmp_path / "1.png", tmp_path / f"{i}.png") for i in (0, 3)]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"prompt": "a", "image": "0.png"},
            "no votes in a form that is known: give the columns prompt, chosen and rejected;",
        ),
        ({"prompt": "a", "image": "0.png", "rank": 1}, "holds no votes: all images are ties"),
        ({"prompt": "a", "chosen": "0.png", "rejected": "0.png"}, "row 1, compares an image with itself"),
        ({"prompt": "a", "chosen": "0.png", "rejected": "9.png"}, r"9\.png does not exist"),
        ({"prompt": "a", "chosen": "0.png", "rejected": 1}, "the column `rejected` holds 1: give the path of an image"),
    ],
)
def test_what_is_no_vote_is_one_sentence(lines, row, sentence):
    with pytest.raises(FlowGRPOError, match=sentence):
        found(lines(row))
