"""Prompts with images: read from every kind of table, compared by content, and refused in a sentence where they can't be used."""

import contextlib
import io
import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from flow_grpo.data.prompt_sources import held_out_overlap, load_prompts
from flow_grpo.image_prompt import ImagePrompt, SourceImage, images_of


def pixels(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    for seed in range(3):
        pixels(seed).save(tmp_path / "in" / f"{seed}.png")
    return tmp_path


def shown(prompts: list[str]) -> list[tuple[str, list[int]]]:
    """The text of each prompt, and which of the images it has."""
    known = {pixels(seed).tobytes(): seed for seed in range(3)}
    return [(str(prompt), [known[image.open().tobytes()] for image in images_of(prompt)]) for prompt in prompts]


EXPECTED = [("a", [0]), ("b", [1, 2]), ("c", [])]


def test_json_lines_have_paths_relative_to_the_file(folder, monkeypatch):
    rows = [
        {"prompt": "a", "image": "in/0.png", "tag": 1},
        {"prompt": "b", "image": ["in/1.png", "in/2.png"]},
        {"prompt": "c"},
    ]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir("/")
    prompts = load_prompts(folder / "p.jsonl")
    assert shown(prompts.prompts) == EXPECTED
    assert prompts.metadata[0] == {"tag": 1}, "the images are no metadata"
    assert [type(prompt) for prompt in prompts.prompts] == [ImagePrompt, ImagePrompt, str]


def test_a_csv_cell_has_a_path_or_a_json_list(folder):
    (folder / "p.csv").write_text('prompt,image\na,in/0.png\nb,"[""in/1.png"", ""in/2.png""]"\nc,\n')
    assert shown(load_prompts(folder / "p.csv").prompts) == EXPECTED


def test_parquet_has_the_images_of_hub_data_sets(folder):
    cells = [[{"bytes": png(pixels(seed)), "path": None} for seed in seeds] for _, seeds in EXPECTED]
    table = pyarrow.table({"prompt": ["a", "b", "c"], "image": cells})
    parquet.write_table(table, folder / "several.parquet")
    assert shown(load_prompts(folder / "several.parquet").prompts) == EXPECTED
    table = pyarrow.table({"prompt": ["a"], "image": [{"bytes": None, "path": "in/0.png"}]})
    parquet.write_table(table, folder / "one.parquet")
    assert shown(load_prompts(folder / "one.parquet").prompts) == EXPECTED[:1]


def test_a_folder_of_images_is_a_prompt_file(folder):
    (folder / "in" / "metadata.jsonl").write_text('{"file_name": "0.png", "prompt": "a", "tag": "x"}\n')
    prompts = load_prompts(folder / "in")
    assert shown(prompts.prompts) == EXPECTED[:1]
    assert prompts.metadata == [{"tag": "x"}]
    (folder / "in" / "metadata.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="no column `file_name`"):
        load_prompts(folder / "in")


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def big() -> bytes:
    """A PNG of more pixels than are allowed, which Pillow would open."""
    return png(Image.new("1", (14_000, 13_000)))


HOSTILE = {
    "missing.png": (None, "there is no image .*missing.png"),
    "torn.png": (png(pixels(0))[:-30], "could not be read: "),
    "words.png": (b"not an image", "is not an image: give a PNG, JPEG"),
    "empty.png": (b"", "is not an image"),
    "bomb.png": (bomb(), "more than 178 million pixels"),
    "big.png": (big(), "more than 178 million pixels"),
    "page.ps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_image_that_cannot_be_used_is_named_with_its_line(folder, name):
    content, message = HOSTILE[name]
    if content is not None:
        (folder / name).write_bytes(content)
    (folder / "p.jsonl").write_text(f'{{"prompt": "a", "image": "in/0.png"}}\n{{"prompt": "b", "image": "{name}"}}\n')
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(folder / "p.jsonl")
    assert "p.jsonl, line 2" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (3, "the column `image` holds 3"),
        ({"a": 1}, "holds None"),
        ("[in/0.png", "is not a list of paths"),
        ("in", "not a regular file"),
    ],
)
def test_a_cell_that_is_no_path_is_named(folder, cell, message):
    (folder / "p.jsonl").write_text(json.dumps({"prompt": "a", "image": cell}))
    with pytest.raises(ValueError, match=message):
        load_prompts(folder / "p.jsonl")


def test_columns_that_rewards_receive_the_images_as_are_refused(folder):
    (folder / "p.jsonl").write_text('{"prompt": "a", "image": "in/0.png", "source": "web"}')
    with pytest.raises(ValueError, match="a column `source`, a name that is reserved"):
        load_prompts(folder / "p.jsonl")
    (folder / "p.jsonl").write_text('{"prompt": "a", "source": "web"}')
    assert load_prompts(folder / "p.jsonl").metadata == [{"source": "web"}]


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_an_image_or_a_sentence(content, begins_like_one):
    with contextlib.suppress(ValueError):
        SourceImage.read((png(pixels(0))[:40] if begins_like_one else b"") + content, "x")


def test_prompts_are_equal_if_texts_and_images_are(folder):
    one, same, other = (SourceImage.read(png(pixels(seed)), name) for seed, name in ((0, "x"), (0, "y"), (1, "x")))
    assert ImagePrompt("a", [one]) == ImagePrompt("a", [same])
    assert (
        len({ImagePrompt("a", [one]), ImagePrompt("a", [same]), ImagePrompt("a", [other]), ImagePrompt("b", [one]), "a"})
        == 4
    )
    assert ImagePrompt("a", [one, other]) != ImagePrompt("a", [other, one])
    assert ImagePrompt("a", [one]) != "a"
    assert str(ImagePrompt("a", [one])) == "a"
    assert type(str(ImagePrompt("a", [one]))) is str
    again = pickle.loads(pickle.dumps(ImagePrompt("a", [one])))
    assert again == ImagePrompt("a", [one])
    assert again.images[0].open().tobytes() == pixels(0).tobytes()
    held_out = [ImagePrompt("An A", [one]), ImagePrompt("a", [other]), "a"]
    assert held_out_overlap([ImagePrompt("the A.", [one])], held_out) == 1


def test_a_file_that_changes_during_a_run_is_an_error(folder):
    pixels(77).save(folder / "in" / "0.png")
    source = SourceImage.read(folder / "in" / "0.png", "0.png")
    pixels(1).save(folder / "in" / "0.png")
    with pytest.raises(ValueError, match=r"0\.png has changed"):
        source.open()


def test_a_prompt_of_python_takes_paths_and_pil_images(folder):
    prompt = ImagePrompt("a", [folder / "in" / "0.png", str(folder / "in" / "1.png"), pixels(2)])
    assert shown([prompt]) == [("a", [0, 1, 2])]
    assert load_prompts([prompt, "b"]).prompts == [prompt, "b"]
    for wrong in ([], "in/0.png"):
        with pytest.raises(ValueError, match="the prompt 'a': give a list of its images"):
            ImagePrompt("a", wrong)
    with pytest.raises(ValueError, match="there is no image missing"):
        ImagePrompt("a", ["missing.png"])
