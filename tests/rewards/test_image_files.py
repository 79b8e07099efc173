"""Image files of any origin: as viewers show them, or refused in a sentence."""

import io
import os
import struct
import subprocess
import threading

import numpy as np
import pytest
from PIL import ExifTags, Image

from flow_grpo import ImagePrompt
from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards import images as image_files
from flow_grpo.rewards.images import FORMATS, read_image

CORNERS = np.zeros((8, 16, 3), np.uint8)  # red, green, blue and white quarters
CORNERS[:4, :8], CORNERS[:4, 8:], CORNERS[4:, :8], CORNERS[4:, 8:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)

UNDONE = {  # by the Exif orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def saved(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **settings)
    return content.getvalue()


def grey(content: bytes) -> list[int]:
    """The levels of a row of grey pixels."""
    (row,) = np.asarray(read_image(content))
    assert (row == row[:, :1]).all()
    return row[:, 0].tolist()


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_its_pixels(kind):
    settings = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "AVIF": {"quality": 100}}
    image = read_image(saved(Image.fromarray(CORNERS), kind, **settings.get(kind, {})))
    assert (image.mode, image.size) == ("RGB", (16, 8))
    assert np.abs(np.asarray(image).astype(int) - CORNERS).mean() < 20  # AVIF halves the resolution of colours


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_an_image_is_turned_as_its_exif_data_says(kind, orientation):
    upright = Image.fromarray(CORNERS)
    turn = UNDONE.get(orientation)
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image = read_image(saved(stored, kind, exif=exif))
    assert image.size == (16, 8)
    inside_quarters = [1, 1, 6, 6], [2, 13, 2, 13]
    assert np.abs(np.asarray(image)[inside_quarters].astype(int) - CORNERS[inside_quarters]).max() < 50


def test_a_source_of_an_edit_is_upright_from_a_file_and_from_memory(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(CORNERS).save(tmp_path / "photo.jpg", exif=exif)
    for given in (tmp_path / "photo.jpg", Image.open(tmp_path / "photo.jpg")):
        (source,) = ImagePrompt("make it night", [given]).images
        assert source.size == source.open().size == (8, 16)


def test_an_image_is_turned_though_another_tag_cannot_be_written_again():
    orientation, unit = (struct.pack("<HHIHH", tag, kind, 1, value, 0) for tag, kind, value in ((274, 3, 6), (296, 2, 0x78)))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + unit + bytes(4)
    assert read_image(saved(Image.fromarray(CORNERS), "JPEG", exif=exif)).size == (8, 16)


def test_damaged_exif_data_does_not_spoil_an_image():
    content = saved(Image.fromarray(CORNERS), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(5))
    assert read_image(content).size == (16, 8)


def test_greys_of_16_bits_and_floats_are_scaled_to_8():
    levels = np.array([[0, 128, 257, 32768, 65407, 65535]], np.uint16)
    assert grey(saved(Image.fromarray(levels))) == [0, 0, 1, 128, 255, 255]
    assert grey(saved(Image.fromarray(levels), "TIFF")) == [0, 0, 1, 128, 255, 255]
    assert grey(saved(Image.fromarray(levels.astype(np.int32)), "TIFF")) == [0, 0, 1, 128, 255, 255]
    floats = np.array([[0, 0.25, 0.5, 1]], np.float32)
    assert grey(saved(Image.fromarray(floats), "TIFF")) == [0, 64, 128, 255]


@pytest.mark.parametrize("values", [[0, 255.0], [-1, 0.5], [0, np.nan], [0, np.inf]])
def test_floats_of_an_unknown_range_are_refused(values):
    content = saved(Image.fromarray(np.array([values], np.float32)), "TIFF")
    with pytest.raises(
        FlowGRPOError, match=r"the image photo could not be read: its values are from .* save it with 8 bits\.$"
    ):
        read_image(content, "photo")


def palette(transparent) -> bytes:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 9, 9, 9, 0, 0, 0])
    image.putdata([1, 0, 2])
    return saved(image, transparency=transparent)


HIDDEN = {  # each is hidden, half seen or black
    "RGBA": saved(Image.fromarray(np.array([[(9, 9, 9, 0), (255, 0, 0, 255), (0, 0, 0, 255)]], np.uint8))),
    "palette": palette(1),
    "palette with alphas": palette(bytes([255, 0, 255])),
    "GIF": saved(Image.open(io.BytesIO(palette(1))), "GIF", transparency=1),
    "RGB with a transparent colour": saved(
        Image.fromarray(np.array([[(9, 9, 9), (255, 0, 0), (0, 0, 0)]], np.uint8)), transparency=(9, 9, 9)
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_transparent_is_white_whatever_colour_it_hides(name):
    assert np.asarray(read_image(HIDDEN[name])).tolist() == [[[255, 255, 255], [255, 0, 0], [0, 0, 0]]]


def test_half_transparent_greys_are_mixed_with_white():
    assert grey(saved(Image.fromarray(np.array([[(0, 255), (0, 128), (7, 0)]], np.uint8), "LA"))) == [0, 127, 255]


def test_print_colours_are_converted():
    content = saved(
        Image.fromarray(np.array([[(0, 255, 255, 0), (0, 0, 0, 255)]] * 8, np.uint8), "CMYK").resize((16, 8)), "TIFF"
    )
    pixels = np.asarray(read_image(content))
    assert pixels[0, 0].tolist() == [255, 0, 0]
    assert pixels[0, -1].tolist() == [0, 0, 0]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"


def test_no_other_format_is_decoded_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a program was started"))
    (tmp_path / "a.png").write_bytes(EPS)
    others = [saved(Image.fromarray(CORNERS), kind) for kind in ("PPM", "ICO", "PCX", "TGA", "PDF")]
    for content in (tmp_path / "a.png", EPS, *others):
        with pytest.raises(FlowGRPOError, match="is not an image: give a PNG, JPEG, WEBP, BMP, GIF, TIFF or AVIF file"):
            read_image(content)


def test_devices_pipes_folders_and_dangling_links_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "gone.png").symlink_to("missing.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    refused = []

    def read_all():
        for name in ("pipe.png", "gone.png", "zero.png", "folder.png"):
            try:
                read_image(tmp_path / name)
            except FlowGRPOError as error:
                refused.append(str(error))

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    reader.join(20)
    assert len(refused) == 4
    assert refused[1].startswith("there is no image ")
    assert all("is not a regular file: " in refused[i] for i in (0, 2, 3))


def test_a_file_or_an_image_that_is_too_large_is_refused_unread(tmp_path, monkeypatch):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(image_files.MAX_BYTES + 1)
    with pytest.raises(FlowGRPOError, match="at most 1,024 MB"):
        read_image(tmp_path / "a.png")
    monkeypatch.setattr(image_files, "MAX_PIXELS", 100)
    with pytest.raises(FlowGRPOError, match="million pixels: make it smaller"):
        read_image(saved(Image.fromarray(CORNERS)))


def test_of_a_file_with_several_images_the_first_is_taken():
    black, white = Image.new("L", (4, 4)), Image.new("L", (4, 4), 255)
    for kind in {"GIF", "TIFF", "AVIF"} & set(FORMATS):
        content = saved(black, kind, save_all=True, append_images=[white])
        assert np.asarray(read_image(content)).max() <= 2
        assert image_files.read_image_file(content).is_animation is (kind != "TIFF")
