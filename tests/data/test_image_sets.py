"""Pictures on disk: ours and others', sheets, folders and manifests; what hostile ones are told."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.grids import CELLS, header, pictures
from torchvision.utils import save_image as save_as_torchvision

from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data import image_sets
from flow_grpo.data.grid import ImageInfo, save_grid, save_image
from flow_grpo.data.grid_layout import GridOptions
from flow_grpo.data.prompts import PromptSet
from flow_grpo.errors import FlowGRPOError
from flow_grpo.evaluation.measure import rows_to_generate
from flow_grpo.image_prompt import ImagePrompt, images_of

BYTES = (pictures() * 255).round()


def named(*prompts: str) -> PromptSet:
    return PromptSet(list(prompts), [{"tag": prompt.upper()} for prompt in prompts])


def test_a_folder_is_read_in_the_order_of_its_names_and_is_its_grid(tmp_path):
    for i, cell in enumerate(CELLS):
        save_image(tmp_path / f"{i}.png", pictures()[i], cell)
    save_grid(tmp_path / "grid.png", pictures(), CELLS, 2)
    folder, sheet = image_sets.read(tmp_path), image_sets.read(tmp_path / "grid.png")
    assert folder.labels == [f"{i}.png" for i in range(5)]
    assert folder.prompts == sheet.prompts == [cell.prompt for cell in CELLS]
    assert folder.seeds == sheet.seeds == [0, 1, 2, 3, 4]
    assert torch.equal(folder.pixels, sheet.pixels)
    assert torch.equal(folder.images() * 255, BYTES)
    known = image_sets.read(tmp_path, PromptSet([CELLS[1].prompt], [{"tag": "two"}]))
    assert [row.get("tag") for row in known.metadata] == [None, "two", None, None, None]


def test_images_of_edits_are_no_prompts_without_their_sources(tmp_path):
    prompt = ImagePrompt("make it night", [Image.new("RGB", (8, 8))])
    save_grid(tmp_path / "grid.png", torch.rand(1, 3, 8, 8), [ImageInfo(prompt, 3, "tiny")], columns=1)
    (tmp_path / "single").mkdir()
    save_image(tmp_path / "single" / "a.png", torch.rand(3, 8, 8), ImageInfo(prompt, 3, "tiny"))
    for source in (tmp_path / "grid.png", tmp_path / "single"):
        with pytest.raises(FlowGRPOError, match=r"are edits, .* give the file of their prompts by --prompts"):
            rows_to_generate(image_sets.read(source), EvaluationConfig(), 1, None)


def test_prompts_with_a_column_file_are_not_paired_by_their_order(tmp_path):
    for name in ("0.png", "1.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    rows = PromptSet(["b", "a"], [{"file": "1.png"}, {"file": "0.png"}])
    with pytest.raises(FlowGRPOError, match="rename it to `file_name`"):
        image_sets.read(tmp_path, rows)


def test_images_of_others_take_their_prompts_in_order(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert image_sets.read(tmp_path, named("one")).prompts == ["one"]
    assert image_sets.read(tmp_path / "a.png", named("one")).columns() == {"tag": ["ONE"]}
    for source in (tmp_path, tmp_path / "a.png"):
        with pytest.raises(ValueError, match=r"not written by flow-grpo sample. .*--prompts"):
            image_sets.read(source)
    with pytest.raises(ValueError, match="2 prompts for 1 images"):
        image_sets.read(tmp_path, named("one", "two"))


def test_a_grid_of_torchvisions_is_cut_into_the_very_images(tmp_path):
    save_as_torchvision(pictures(), tmp_path / "sheet.png", nrow=3)
    how = GridOptions(2, 3, (2, 2))
    of_cells = image_sets.read(tmp_path / "sheet.png", named(*"abcde"), how)
    assert of_cells.prompts == list("abcde"), "the last cell is empty"
    assert (of_cells.pixels.float() - BYTES).abs().max() <= 1, "torchvision rounds in its own way"
    assert image_sets.read(tmp_path / "sheet.png", named("a", "b"), how).prompts == list("aaabb")
    with pytest.raises(ValueError, match="3 prompts for the 5 images in 2 rows"):
        image_sets.read(tmp_path / "sheet.png", named(*"abc"), how)
    with pytest.raises(ValueError, match=r"38 x 18 pixels, which are not 3 columns x 2 rows .* with 1 and 1 pixels"):
        image_sets.read(tmp_path / "sheet.png", named(*"abcde"), GridOptions(2, 3, (1, 1)))


@pytest.fixture
def foreign(tmp_path):
    """Five images of 24 x 16 pixels in a sheet of two rows that torchvision made, and their bytes."""
    images = pictures(5, 16, 24)
    save_as_torchvision(images, tmp_path / "sheet.png", nrow=3, padding=3)
    return tmp_path / "sheet.png", images


def test_a_foreign_grid_is_cut_where_its_images_are_and_that_is_reported(foreign):
    file, images = foreign
    image_set = image_sets.read(file, named(*"abcde"))
    assert (image_set.prompts, image_set.columns()) == (list("abcde"), {"tag": list("ABCDE")})
    assert "alone" not in image_set.note
    with_empty = image_sets.read(file, named(*"abcdef"))
    assert with_empty.note.endswith("; the last 1 image of the 6 has the colour of the gutters alone")
    assert (image_set.images() - images).abs().max() <= 1.01 / 255
    assert image_set.note.startswith("sheet.png: 2 rows x 3 columns of images with 24 x 16 pixels, margins of 3 left")
    for prompts, expected in (("a fox", ["a fox"] * 5), (named("one"), ["one"] * 5), (named("a", "b"), list("aaabb"))):
        assert image_sets.read(file, prompts).prompts == expected
    assert image_sets.read(file, named(*"abcdef")).prompts == list("abcdef"), "the last may be a black image"
    for count in (3, 4, 7):
        with pytest.raises(ValueError, match=f"there are {count} prompts for the 5 images in 2 rows of .*sheet.png"):
            image_sets.read(file, named(*"abcdefg"[:count]))


def test_a_foreign_image_alone_is_one_image_unless_it_is_a_grid(tmp_path, foreign):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    image_set = image_sets.read(tmp_path / "a.png", "a fox")
    assert (len(image_set), image_set.note) == (1, "a.png: one image of 64 x 64 pixels")
    assert len(image_sets.read(tmp_path / "a.png", "a fox", GridOptions(2, 2))) == 4, (
        "a sheet without gutters, by its number"
    )
    with pytest.raises(ValueError, match="has no gutters between images"):
        image_sets.read(tmp_path / "a.png", named(*"abcd"))
    assert len(image_sets.read(foreign[0], "a fox", GridOptions(1, 1))) == 1, "if its user says so"


def test_an_image_at_the_end_is_not_left_out_because_a_prompt_is_missing(tmp_path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="3 prompts for the 4 images"):
        image_sets.read(tmp_path / "a.png", named(*"abc"), GridOptions(2, 2))


def table(*rows: tuple[str, object], file: bool = False) -> PromptSet:
    """Rows of prompt and answer, by the file's name if it is there."""
    metadata = [{"answer": answer, **({"file_name": f"{i}.png"} if file else {})} for i, (_, answer) in enumerate(rows)]
    return PromptSet([prompt for prompt, _ in rows], metadata)


def drawn(folder, prompts: list[str]):
    """A grid and a folder of single images, as `sample` writes them."""
    for i, prompt in enumerate(prompts):
        save_image(folder / "single" / f"{i}.png", pictures()[i], ImageInfo(prompt, i, "tiny"))
    save_grid(folder / "grid.png", pictures()[: len(prompts)], [ImageInfo(p, i, "tiny") for i, p in enumerate(prompts)], 2)
    return folder / "grid.png", folder / "single"


def test_rows_reach_images_in_their_order_although_the_prompt_is_one(tmp_path):
    rows = table(("a", "bright"), ("a", "dark"), ("a", "bright"), ("a", "dark"))
    for source in drawn(tmp_path, ["a"] * 4):
        assert image_sets.read(source, rows).columns() == {"answer": ["bright", "dark"] * 2}
    for i in range(4):  # and without prompts in them
        Image.new("RGB", (8, 8)).save(tmp_path / "single" / f"{i}.png")
    assert image_sets.read(tmp_path / "single", rows).columns() == {"answer": ["bright", "dark"] * 2}


def test_rows_that_name_files_reach_them_whatever_the_order(tmp_path):
    single = drawn(tmp_path, ["a", "a", "b"])[1]
    rows = table(("a", 0), ("a", 1), ("b", 2), ("c", 3), file=True)
    turned = PromptSet(rows.prompts[::-1], rows.metadata[::-1])
    image_set = image_sets.read(single, turned)
    assert (image_set.prompts, image_set.columns()) == (["a", "a", "b"], {"answer": [0, 1, 2]})
    assert image_set.note == f"warning: 1 row of the prompts without an image in {single}: 3.png"
    assert image_sets.read(single, PromptSet(rows.prompts[:3], rows.metadata[:3])).note == "", "each row has one"
    many = table(*[("a" if i < 2 else "b", i) for i in range(9)], file=True)
    assert image_sets.read(single, many).note.endswith(
        f"6 rows of the prompts without an image in {single}: 3.png, 4.png, 5.png and 3 more"
    )
    missing = PromptSet(rows.prompts[:2], rows.metadata[:2])
    with pytest.raises(ValueError, match=r"no row whose file name is 2\.png, which is in .*single"):
        image_sets.read(single, missing)
    twice = PromptSet(["a"] * 3, [rows.metadata[0]] * 3)
    with pytest.raises(ValueError, match=r"rows 1 and 2 of the prompts are both for 0\.png"):
        image_sets.read(single, twice)
    with pytest.raises(ValueError, match=r"2\.png in .* shows 'b', but .* row 3, is 'x'"):
        image_sets.read(single, table(("a", 0), ("a", 1), ("x", 2), file=True))


def test_rows_of_another_number_reach_images_by_their_prompt_if_that_is_unambiguous(tmp_path):
    for source in drawn(tmp_path, ["a", "a", "b", "b"]):
        assert image_sets.read(source, table(("b", 2), ("a", 1))).columns() == {"answer": [1, 1, 2, 2]}
        assert image_sets.read(source, table(("a", 1), ("a", 1), ("c", 3))).columns() == {"answer": [1, 1, None, None]}
        with pytest.raises(
            ValueError, match=r"3 prompts for 4 images in .*, and several with the text 'a' but different metadata"
        ):
            image_sets.read(source, table(("a", 1), ("a", 2), ("b", 2)))
        with pytest.raises(ValueError, match=r"3 prompts for 4 images in .*, and no image has one of these prompts"):
            image_sets.read(source, table(("x", 1), ("y", 2), ("z", 2)))
        with pytest.raises(ValueError, match=r"shows 'a', but the prompt given for it, row 2, is 'b'.* in the order"):
            image_sets.read(source, table(("a", 1), ("b", 2), ("a", 1), ("b", 2)))
        with pytest.raises(ValueError, match="shows 'a', but the prompt given"):
            image_sets.read(source, "a fox")


def test_a_manifests_rows_are_joined_by_the_same_rule(tmp_path):
    for i in (0, 1, 2):
        save_image(tmp_path / f"{i}.png", pictures()[i], CELLS[i])
    manifest(tmp_path, *[{"file_name": f"{i}.png", "prompt": "a", "own": i} for i in (0, 1, 2)])
    assert image_sets.read(tmp_path, table(("a", 5), ("a", 6), ("a", 7))).columns() == {
        "answer": [5, 6, 7],
        "own": [0, 1, 2],
    }


def edit(text: str, level: int) -> ImagePrompt:
    """A prompt with a source of that grey."""
    return ImagePrompt(text, [Image.new("L", (8, 8), level)])


def sources(image_set: image_sets.ImageSet) -> list[list[int]]:
    """The greys of the sources of each image."""
    return [[image.open().getpixel((0, 0))[0] for image in images_of(prompt)] for prompt in image_set.prompts]


def test_images_keep_the_sources_of_their_prompts_whatever_the_number_of_rows(tmp_path):
    for source in drawn(tmp_path, ["a", "a", "b", "b"]):
        of_rows = PromptSet([edit("b", 2), edit("a", 1)], [{}, {}])
        assert sources(image_sets.read(source, of_rows)) == [[1], [1], [2], [2]]
        assert sources(image_sets.read(source, PromptSet([edit("a", 1)], [{}]))) == [[1], [1], [], []]
        each = PromptSet([edit(text, i) for i, text in enumerate("aabb")], [{}] * 4)
        assert sources(image_sets.read(source, each)) == [[0], [1], [2], [3]]
        with pytest.raises(ValueError, match="several with the text 'a' but different metadata or images"):
            image_sets.read(source, PromptSet([edit("a", 1), edit("a", 2), "b"], [{}] * 3))
        with pytest.raises(ValueError, match="several with the text 'a' but different metadata or images"):
            image_sets.read(source, PromptSet([edit("a", 1), "a", "b"], [{}] * 3))
        with pytest.raises(ValueError, match="no image has one of these prompts"):
            image_sets.read(source, PromptSet([edit("x", 1)], [{}]))


def test_images_of_a_manifest_keep_the_sources_of_their_prompts(tmp_path):
    for i in (0, 1):
        save_image(tmp_path / f"{i}.png", pictures()[i], CELLS[i])
    rows = [{"file_name": f"{i}.png", "prompt": "a"} for i in (0, 1)]
    manifest(tmp_path, *rows)
    assert sources(image_sets.read(tmp_path, PromptSet([edit("a", 1)], [{}]))) == [[1], [1]]
    assert sources(image_sets.read(tmp_path, PromptSet([edit("a", 1), edit("a", 2)], [{}, {}]))) == [[1], [2]]
    Image.new("L", (8, 8), 9).save(tmp_path / "own.png")
    manifest(tmp_path, {**rows[0], "image": "own.png"}, rows[1])
    for given in ([edit("a", 1)], [edit("a", 1), edit("a", 1)]):
        assert sources(image_sets.read(tmp_path, PromptSet(given, [{}] * len(given)))) == [[9], [1]], "its own comes first"


def test_images_without_prompts_are_taken_for_rewards_that_read_none(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for source in (tmp_path, tmp_path / "a.png"):
        image_set = image_sets.read(source, promptless=True)
        assert (image_set.prompts, len(image_set)) == ([""], 1)


def manifest(folder, *rows, name="metadata.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_manifest_says_what_the_images_are(tmp_path):
    (tmp_path / "deep").mkdir()
    for i in (0, 1):
        save_image(tmp_path / "deep" / f"{i}.png", pictures()[i], CELLS[i])
    rows = [{"file_name": f"deep/{i}.png", "prompt": f"p{i}", "seed": 7 + i, "tag": "t"} for i in (1, 0)]
    image_set = image_sets.read(manifest(tmp_path, *rows))
    assert (image_set.labels, image_set.prompts, image_set.seeds) == (["deep/1.png", "deep/0.png"], ["p1", "p0"], [8, 7])
    assert torch.equal(image_set.images() * 255, BYTES[[1, 0]])
    assert image_set.columns() == {"tag": ["t", "t"]}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"file_name": "../outside.png"}, "is outside its folder"),
        ({"file_name": "link.png"}, "is outside its folder"),
        ({"file_name": "ABSOLUTE"}, "is outside its folder"),
        ({"file_name": "missing.png"}, "which does not exist"),
        ({"file_name": ""}, "instead of a path"),
        ({"picture": "0.png"}, "no column `file_name`"),
        ({"file_name": "0.png", "seed": 1.5}, "not a whole number"),
        ({"file_name": "0.png", "seed": 1e400}, "not a whole number"),
    ],
)
def test_a_manifest_that_is_wrong_gets_a_clear_error(tmp_path, row, sentence):
    folder = tmp_path / "folder"
    for place in (tmp_path / "outside.png", folder / "0.png"):
        save_image(place, pictures()[0], CELLS[0])
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    given = {k: str(tmp_path / "outside.png") if v == "ABSOLUTE" else v for k, v in row.items()}
    with pytest.raises(ValueError, match=sentence):
        image_sets.read(manifest(folder, {**given, "prompt": "a"}))


def test_images_that_are_none_or_too_large_get_a_clear_error(tmp_path):
    save_grid(tmp_path / "whole.png", pictures(), CELLS, 2)
    cut = (tmp_path / "whole.png").read_bytes()[:-400]
    for content in (header(50_000, 50_000), cut, b"GIF89a", b""):
        for place in (tmp_path / "bad" / "a.png", tmp_path / "bad.png"):
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)
        for source in (tmp_path / "bad", tmp_path / "bad.png"):
            with pytest.raises(ValueError, match=r"bad.*(could not be read|is not an image|more than 178 million)"):
                image_sets.read(source, named("one"))


def test_an_image_with_too_many_pixels_is_a_clear_error_and_a_large_one_no_warning(tmp_path, recwarn, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns from there on, and refuses twice as many
    Image.new("1", (60, 60)).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match=r"large\.png has more than 178 million pixels: make it smaller\."):
        image_sets.read(tmp_path / "large.png", "a fox")
    Image.new("1", (40, 40)).save(tmp_path / "some.png")
    assert image_sets.read(tmp_path / "some.png", "a fox").pixels.shape == (1, 3, 40, 40)
    assert not recwarn.list


def test_greys_of_16_bits_keep_their_upper_ones(tmp_path):
    levels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(tmp_path / "a.png")
    image_set = image_sets.read(tmp_path, named("one")).images() * 255
    assert torch.equal(image_set, torch.arange(256.0).view(1, 1, 16, 16).expand(1, 3, 16, 16))


def test_images_of_two_sizes_are_distinguished(tmp_path):
    for width in (8, 9):
        Image.new("RGB", (width, 8)).save(tmp_path / f"{width}.png")
    with pytest.raises(ValueError, match=r"9\.png has another size"):
        image_sets.read(tmp_path, named("one", "two"))
