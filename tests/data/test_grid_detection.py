"""Sheets of other programs are cut into their very images, or refused: no cell is ever somewhere else."""

import io

import matplotlib.figure
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter
from torchvision.utils import make_grid

from flow_grpo.data.grid_layout import GridOptions, NotAGrid, detect, layout_of


def noise(count: int, height: int, width: int, seed: int = 0, low: int = 0, high: int = 256) -> np.ndarray:
    """(count, height, width, 3) uint8."""
    return np.random.default_rng(seed).integers(low, high, (count, height, width, 3), dtype=np.uint8)


def smooth(count: int, size: int) -> np.ndarray:
    """Images as photographs are: no JPEG can keep noise."""
    drawn = np.random.default_rng(0).normal(size=(count, size, size, 3))
    return (gaussian_filter(drawn, (0, size / 24, size / 24, 0)) * 1500 + 128).clip(0, 200).astype(np.uint8)


def sheet(images: np.ndarray, columns: int, padding: int, color: tuple[int, int, int]) -> np.ndarray:
    """As torchvision makes it, with a color."""
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    made = [make_grid(tensor[:, [c]], nrow=columns, padding=padding, pad_value=color[c])[0] for c in range(3)]
    return torch.stack(made, -1).numpy().astype(np.uint8)


def jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


COLORS = st.sampled_from([(0, 0, 0), (255, 255, 255), (128, 0, 7), (3, 3, 3)])


@st.composite
def bordered(draw) -> tuple[np.ndarray, int, int, tuple[int, int, int]]:
    """Noise, dark at times, images with or without borders of other colors than the gutters'; columns, padding and color of its sheet."""
    count, columns = draw(st.integers(2, 9)), draw(st.integers(1, 4))
    height, width = draw(st.integers(12, 40)), draw(st.integers(12, 40))
    images = noise(count, height, width, draw(st.integers(0, 99)), 0, draw(st.sampled_from([12, 70, 256])))
    color, border = draw(COLORS), draw(st.integers(0, 2))
    others = COLORS.filter(lambda other: other != color)
    shared = draw(others | st.none())  # the same for all, or each its own
    for image in images:
        own = shared or draw(others)
        for k in range(border if shared or draw(st.booleans()) else 0):
            image[k] = image[-1 - k] = own
            image[:, k] = image[:, -1 - k] = own
    return images, columns, draw(st.integers(1, 12)), color


@settings(max_examples=150)
@given(made=bordered())
def test_a_grid_of_torchvision_is_cut_into_its_very_images_or_refused(made):
    images, columns, padding, color = made
    pixels = sheet(images, columns, padding, color)
    try:
        layout = detect(pixels)
    except NotAGrid:
        layout = None
    if layout is not None:
        cells = layout.crop_cells(pixels)
        assert np.array_equal(cells[: len(images)], images)
        assert layout.filled == len(images)
    exact = layout_of(
        pixels, GridOptions(-(-len(images) // columns), min(columns, len(images)), (padding, padding)), "", False
    )
    assert np.array_equal(exact.crop_cells(pixels)[: len(images)], images), "whatever the images, --padding cuts them"


@settings(max_examples=60)
@given(
    count=st.integers(2, 9),
    columns=st.integers(1, 5),
    size=st.tuples(st.integers(12, 40), st.integers(12, 40)),
    padding=st.integers(1, 12),
    seed=st.integers(0, 99),
    color=COLORS,
)
def test_a_grid_of_torchvision_with_any_padding_is_found(count, columns, size, padding, seed, color):
    images = noise(count, *size, seed)
    layout = detect(pixels := sheet(images, columns, padding, color))
    assert layout is not None
    assert (layout.filled, layout.columns) == (count, min(columns, count))
    assert np.array_equal(layout.crop_cells(pixels)[:count], images)
    assert set(layout.margins()) == {padding}


def test_dark_photographs_on_black_and_pale_ones_on_white_are_found():
    for low, high, color in ((0, 12, (0, 0, 0)), (244, 256, (255, 255, 255))):
        images = noise(6, 64, 48, 0, low, high)
        layout = detect(pixels := sheet(images, 3, 2, color))
        assert np.array_equal(layout.crop_cells(pixels), images)


def test_a_black_image_keeps_its_cell_and_an_empty_end_is_none():
    images = noise(7, 32, 32)
    images[1] = 0
    layout = detect(pixels := sheet(images, 3, 2, (0, 0, 0)))
    assert (layout.rows, layout.columns, layout.filled) == (3, 3, 7)
    assert np.array_equal(layout.crop_cells(pixels)[:7], images)


@pytest.mark.parametrize(("gutters", "color"), [((0, 7), 255), ((7, 0), 0), ((5, 9), 128)])
def test_gutters_of_two_sizes_and_no_margins_are_found(gutters, color):
    images, (across, down) = noise(6, 20, 30), gutters
    pixels = np.full((2 * 20 + down, 3 * 30 + 2 * across, 3), color, np.uint8)
    for i, image in enumerate(images):
        y, x = i // 3 * (20 + down), i % 3 * (30 + across)
        pixels[y : y + 20, x : x + 30] = image
    if min(gutters) == 0:  # images that touch are one part
        layout = detect(pixels)
        assert (layout.rows, layout.columns) == ((2, 1) if across == 0 else (1, 3))
        with pytest.raises(ValueError, match="but --rows and --columns give other numbers"):
            layout_of(pixels, GridOptions(2, 3), "x.png", False)
        return
    layout = detect(pixels)
    assert layout.gutters() == gutters
    assert np.array_equal(layout.crop_cells(pixels), images)


def figure(
    rows: int, columns: int, *, titles: bool = True, ticks: bool = False, kind: str = "png", face: str = "white"
) -> np.ndarray:
    """A matplotlib figure of red, green, ... noise with a title over each image and one over all."""
    made = matplotlib.figure.Figure(figsize=(8, 4), facecolor=face)
    made.suptitle("Samples at step 100, held out", color="red")
    for i, axes in enumerate(np.ravel(made.subplots(rows, columns, squeeze=False))):
        axes.imshow(noise(1, 32, 60, i)[0])
        if titles:
            axes.set_title(f"prompt number {i}", fontsize=8, color="gray")
        if not ticks:
            axes.axis("off")
    file = io.BytesIO()
    made.savefig(file, format=kind)
    return np.asarray(Image.open(file).convert("RGB"))


@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (3, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("face", ["white", "black"])
def test_a_figure_of_matplotlib_is_cut_without_its_margins_and_titles(rows, columns, face):
    pixels = figure(rows, columns, face=face)
    layout = detect(pixels)
    assert (layout.rows, layout.columns, layout.filled) == (rows, columns, rows * columns)
    background = np.array([255 if face == "white" else 0] * 3)
    rest = pixels.copy()
    for box in layout.boxes():
        assert (box.crop(pixels) != background).any(-1).mean() > 0.95, "no margin is in a cell"
        rest[box.top - 1 : box.bottom + 1, box.left - 1 : box.right + 1] = background  # sizes are rounded to a pixel
    vivid = np.ptp(rest.astype(int), axis=-1) > 8  # of the images, and the red title over all
    assert not vivid[layout.tops[0] - 1 :].any(), "and nothing of the images is beside them"


def test_a_figure_in_a_jpeg_is_found_too():
    assert (layout := detect(figure(2, 3, kind="jpg"), is_lossy=True)) is not None
    assert (layout.rows, layout.columns) == (2, 3)


@pytest.mark.parametrize("quality", [95, 75])
@pytest.mark.parametrize("padding", [2, 4, 8, 16])
def test_a_jpeg_is_cut_to_the_pixel_or_refused(quality, padding):
    pixels = jpeg(sheet(smooth(6, 96), 3, padding, (255, 255, 255)), quality)
    try:
        layout = detect(pixels, is_lossy=True)
    except NotAGrid:
        assert quality == 75
        return
    assert (layout.width, layout.height, layout.margins()) == (96, 96, (padding,) * 4)


def collage(size: tuple[int, int], *boxes: tuple[int, int, int, int]) -> np.ndarray:
    pixels = np.full((*size, 3), 255, np.uint8)
    for i, (y, x, high, wide) in enumerate(boxes):
        pixels[y : y + high, x : x + wide] = noise(1, high, wide, i)[0]
    return pixels


def letters() -> np.ndarray:
    image = Image.new("RGB", (420, 160), "white")
    ImageDraw.Draw(image).text((20, 30), "III DDD", font=ImageFont.load_default(80), fill="black")
    return np.asarray(image)


REFUSED = {
    "uneven": (collage((190, 270), (10, 10, 100, 150), (10, 170, 100, 90), (120, 10, 60, 250)), "have different sizes"),
    "a wide one over two": (
        collage((230, 230), (10, 10, 100, 210), (120, 10, 100, 100), (120, 120, 100, 100)),
        "different sizes",
    ),
    "columns of their own": (
        collage((230, 230), (10, 10, 80, 100), (100, 10, 120, 100), (10, 120, 120, 100), (140, 120, 80, 100)),
        "different sizes",
    ),
    "unequal distances": (
        collage((60, 260), (10, 10, 40, 60), (10, 80, 40, 60), (10, 170, 40, 60)),
        "not at equal distances",
    ),
    "a large picture beside": (collage((220, 200), *[(10, x, 40, 40) for x in (10, 60, 110)], (60, 10, 140, 180)), "sizes"),
    "a border of the gutters' color": (
        sheet(np.pad(noise(6, 26, 26), ((0, 0), (3, 3), (3, 3), (0, 0))), 3, 2, (0, 0, 0)),
        r"26 x 26 pixels or, with borders of the gutters' color, 32 x 32; .*--rows 2 --columns 3 --padding 2",
    ),
    "ticks": (figure(2, 3, ticks=True), "outside the cells|straight edges|equal distances|different sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_grid_is_refused_with_the_options_that_help(name):
    pixels, reason = REFUSED[name]
    for said in (GridOptions(), GridOptions(rows=2), GridOptions(2, 3)):
        with pytest.raises(ValueError, match=rf"^x\.png can't be cut into images: .*({reason}).*--rows.*\.$"):
            layout_of(pixels, said, "x.png", allow_single=False)


@pytest.mark.parametrize("words", ["CAT", "TREE", "THE ROAD AHEAD"])
def test_a_contact_sheet_with_captions_and_a_heading_is_cut_into_its_images(words):
    """A word of a small font is wider than a letter may be, and as flat as one."""
    images = noise(6, 66, 162, high=200)
    made = Image.new("RGB", (3 * 170 + 10, 2 * 92 + 40), "white")
    pen, font = ImageDraw.Draw(made), ImageFont.load_default(size=10)
    pen.text((10, 6), "Samples", fill="black", font=font)
    for i, image in enumerate(images):
        x, y = 10 + 170 * (i % 3), 50 + 92 * (i // 3)
        pen.text((x, y - 17), words, fill="black", font=font)
        made.paste(Image.fromarray(image), (x, y))
    pixels = np.asarray(made)
    assert np.array_equal(detect(pixels).crop_cells(pixels), images)


def test_a_title_that_clings_to_one_image_is_cut_off_and_titles_on_all_are_refused():
    images = noise(4, 60, 60)
    image = Image.fromarray(sheet(images, 2, 10, (255, 255, 255)))
    for x, y in ((10, 1), (80, 1), (10, 71), (80, 71)):
        ImageDraw.Draw(image).text((x + 2, y), "title", fill="gray")
        if (x, y) == (10, 71):  # the last one has none yet
            layout = detect(pixels := np.asarray(image))
            assert np.array_equal(layout.crop_cells(pixels)[3], images[3])
            assert (layout.margins(), layout.gutters()) == ((10,) * 4, (10, 10))
    with pytest.raises(NotAGrid):
        detect(np.asarray(image))


def test_an_image_of_a_thing_on_one_colour_is_no_gutter():
    """The sides of the middle image are as plain as a gutter."""
    images = noise(3, 64, 80)
    images[1] = 255
    images[1, 16:32, 20:60] = (200, 30, 30)
    pixels = sheet(images, 3, 4, (0, 0, 0))
    for one in (pixels, pixels[4:-4, 4:-4]):
        assert np.array_equal(detect(one).crop_cells(one), images)
    for columns in (2, 3):  # several columns: beside an image is no title
        with pytest.raises(NotAGrid, match="other content where there is room for another row or column"):
            detect(sheet(images, columns, 4, (255, 255, 255)))


@pytest.mark.parametrize("pixels", [letters(), noise(1, 100, 100)[0], np.zeros((40, 40, 3), np.uint8), noise(1, 1, 1)[0]])
def test_an_image_alone_stays_one(pixels):
    layout = layout_of(pixels, GridOptions(), "x.png", allow_single=True)
    assert np.array_equal(layout.crop_cells(pixels), pixels[None])
    with pytest.raises(ValueError, match="--rows"):
        layout_of(pixels, GridOptions(), "x.png", allow_single=False)


def test_images_without_gutters_are_cut_by_their_number_if_they_are_equal():
    pixels = noise(1, 64, 64)[0]
    layout = layout_of(pixels, GridOptions(2, 2), "x.png", allow_single=True)
    assert np.array_equal(layout.crop_cells(pixels)[3], pixels[32:, 32:])
    with pytest.raises(ValueError, match="64 x 64 pixels, which are not 3 columns x 2 rows of equal images"):
        layout_of(pixels, GridOptions(2, 3), "x.png", allow_single=True)


def test_a_user_may_crop_and_say_the_gutters():
    pixels = collage((100, 140), (30, 11, 40, 50), (30, 70, 40, 50))
    pixels[5:20, 5:100] = noise(1, 15, 95)[0]  # a banner
    with pytest.raises(ValueError, match=r"--crop"):
        layout_of(pixels, GridOptions(), "x.png", allow_single=False)
    for said in (GridOptions(crop=(0, 25, 0, 0)), GridOptions(1, 2, (9, 0), (11, 30, 20, 30))):
        layout = layout_of(pixels, said, "x.png", allow_single=False)
        assert [(b.top, b.left, b.bottom, b.right) for b in layout.boxes()] == [(30, 11, 70, 61), (30, 70, 70, 120)]
        assert layout.size == (100, 140)
    with pytest.raises(ValueError, match=r"--crop 70,0,70,0 leaves none"):
        layout_of(pixels, GridOptions(crop=(70, 0, 70, 0)), "x.png", allow_single=False)


@settings(max_examples=40)
@given(pixels=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 999), st.sampled_from([2, 3])))
def test_no_image_makes_the_detection_fail(pixels):
    height, width, seed, levels = pixels
    try:
        layout = detect(noise(1, height, width, seed, 0, levels)[0] * 100)
    except NotAGrid:
        return
    assert layout is None or layout.filled > 1


def test_a_grid_without_gutters_is_cut_by_its_numbers_although_its_letters_look_like_parts():
    signs = noise(4, 64, 160, low=240, high=253)
    for i, sign in enumerate(signs):
        drawn = Image.fromarray(sign)
        for x in (20, 60, 100):  # letters with straight edges
            ImageDraw.Draw(drawn).rectangle((x, 16, x + 19, 47), fill=(20 * i, 0, 90))
        signs[i] = np.asarray(drawn)
    pixels = np.concatenate([np.concatenate(signs[i : i + 2], 1) for i in (0, 2)])
    with pytest.raises(ValueError, match="Give --rows and --columns"):
        layout_of(pixels, GridOptions(), "sheet.png", allow_single=False)
    layout = layout_of(pixels, GridOptions(2, 2), "sheet.png", allow_single=False)
    assert (layout.crop_cells(pixels) == signs).all()
    labelled = np.full((168, 410, 3), 255, np.uint8)  # with labels above and to the left
    labelled[40:, 90:] = pixels
    with pytest.raises(ValueError, match=r"--padding .*\(0 if nothing is\), and --crop"):
        layout_of(labelled, GridOptions(2, 2), "sheet.png", allow_single=False)
