"""Contact sheets give back the very pictures and their cells; hostile files get a sentence."""

import json
import math

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.grids import CELLS, header, pictures

from flow_grpo.data.grid import read_grid, save_grid, save_image


@pytest.mark.parametrize("columns", [1, 2, 3, 8])
def test_a_grid_gives_back_the_very_pixels_and_cells(tmp_path, columns):
    save_grid(tmp_path / "grid.png", pictures(), CELLS, columns)
    images, cells = read_grid(tmp_path / "grid.png")
    assert torch.equal((images * 255).round(), (pictures() * 255).round())
    assert cells == CELLS


def test_a_single_image_remembers_its_prompt_too(tmp_path):
    save_image(tmp_path / "one.png", pictures()[0], CELLS[0])
    images, cells = read_grid(tmp_path / "one.png")
    assert torch.equal((images[0] * 255).round(), (pictures()[0] * 255).round())
    assert cells == CELLS[:1]


@pytest.mark.parametrize("content", [b"", b"no picture", header(50_000, 50_000), header(8, 8)])
def test_a_file_that_is_no_image_gets_a_clear_error(tmp_path, content):
    (tmp_path / "bad.png").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"could not be read: .*\. Replace or remove it\.$|is not an image: give a PNG|more than 178 million pixels",
    ):
        read_grid(tmp_path / "bad.png")


def test_a_truncated_grid_gets_a_clear_error(tmp_path):
    save_grid(tmp_path / "grid.png", pictures(), CELLS, 2)
    content = (tmp_path / "grid.png").read_bytes()
    (tmp_path / "grid.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"could not be read: .*truncated.*\. Replace or remove it\.$"):
        read_grid(tmp_path / "grid.png")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        json.dumps({"scale": 0, "cells": [{"box": [0, 0, 8, 8], "prompt": "a", "seed": 0, "model": "m"}]}),
        json.dumps({"scale": 1, "cells": [{"box": [0, 0, 8, 8], "prompt": "a", "seed": 0, "model": "m"}] * 1000}),
        json.dumps({"scale": 1, "cells": [{"box": [0, 0, 8], "prompt": "a", "seed": 0, "model": "m"}]}),
        json.dumps({"scale": 1, "cells": [{"box": [0, 0, -1, -1], "prompt": "a", "seed": 0, "model": "m"}] * 1000}),
        json.dumps({"scale": 1, "cells": [{"box": [4, 0, 8, 8], "prompt": "a", "seed": 0, "model": "m"}]}),
        json.dumps({"scale": 1, "cells": []}),
        json.dumps({"scale": math.inf, "cells": []}),
        json.dumps({"scale": 1, "cells": [{"box": [0, 0, 8, 8], "prompt": "a", "seed": math.inf, "model": "m"}]}),
    ],
)
def test_a_grid_with_false_metadata_gets_a_clear_error(tmp_path, content):
    info = PngInfo()
    info.add_itxt("flow_grpo", content)
    Image.new("RGB", (8, 8)).save(tmp_path / "lie.png", pnginfo=info)
    with pytest.raises(ValueError, match=r"lie\.png (is damaged|has no prompts)"):
        read_grid(tmp_path / "lie.png")
