"""Videos as files: strips and animations, and what refuses them."""

import pytest
import torch
from PIL import Image

from flow_grpo.data import image_sets
from flow_grpo.data.grid import (
    ImageInfo,
    cut_strips,
    open_image,
    read_grid,
    save_animation,
    save_grid,
    save_image,
    strip_frames,
    strips,
)

VIDEOS = torch.randint(0, 256, (2, 6, 3, 8, 12), generator=torch.Generator().manual_seed(0)) / 255
CELLS = [ImageInfo("a cat", 0, "m"), ImageInfo("a dog", 1, "m")]


def test_a_strip_has_four_frames_with_the_first_and_the_last():
    strip = strips(VIDEOS)
    assert strip.shape == (2, 3, 8, 48)
    assert torch.equal(strip[..., :12], VIDEOS[:, 0])
    assert torch.equal(strip[..., -12:], VIDEOS[:, -1])
    assert torch.equal(strips(VIDEOS[:, 0]), VIDEOS[:, 0]), "images stay"
    assert torch.equal(cut_strips(strip, 12), strip_frames(VIDEOS))


def test_an_animation_has_all_frames_and_repeats(tmp_path):
    save_animation(tmp_path / "a.webp", VIDEOS[0])
    with Image.open(tmp_path / "a.webp") as animation:
        assert animation.n_frames == 6
        assert animation.size == (12, 8)
        assert animation.info["loop"] == 0
    save_animation(tmp_path / "small.webp", VIDEOS[0], longest_side=6)
    with Image.open(tmp_path / "small.webp") as animation:
        assert animation.size == (6, 4)


def test_a_grid_of_videos_shows_strips_and_is_not_scored(tmp_path):
    save_grid(tmp_path / "grid.png", VIDEOS, CELLS, columns=2)
    shown, cells = read_grid(tmp_path / "grid.png")
    assert torch.equal(shown, strips(VIDEOS))
    assert cells == CELLS
    with pytest.raises(ValueError, match=r"grid.png shows strips of videos, which can't be scored"):
        image_sets.read(tmp_path / "grid.png")


def test_an_animation_is_not_taken_for_its_first_frame(tmp_path):
    save_image(tmp_path / "0.png", VIDEOS[0], CELLS[0])
    assert [file.name for file in tmp_path.iterdir()] == ["0.webp"]
    with pytest.raises(ValueError, match="it is an animation: give a single image"):
        open_image(tmp_path / "0.webp")
