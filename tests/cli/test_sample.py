"""`flow-grpo sample`: its prompts and the images that it writes."""

from support.cli_process import run
from support.embedded import PROMPTS

from flow_grpo.cli.sample import _read_prompts, sample
from flow_grpo.data import grid
from flow_grpo.data.grid import read_grid


def test_one_word_is_a_prompt_and_so_are_several_in_a_file(tmp_path):
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    assert _read_prompts(["cat"]) == ["cat"]
    assert _read_prompts(["a red fox", "cat", str(tmp_path / "words.txt")]) == ["a red fox", "cat", "cat", "dog"]


def test_images_are_written_a_few_at_a_time_and_no_grid_that_nobody_could_read(trained, tmp_path, monkeypatch):
    prompts = PROMPTS
    config = str(trained / "short.yaml")
    few = tmp_path / "few.yaml"
    few.write_text((trained / "short.yaml").read_text().replace("microbatch: 8", "microbatch: 2"))
    for name, source in (("whole", config), ("few", str(few))):
        sample(prompts, config=source, seeds=3, steps=2, out=tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "whole").glob("*.png"))
    assert len(files) == 7
    for name in files:
        one, other = (read_grid(tmp_path / folder / name) for folder in ("whole", "few"))
        assert one[1] == other[1]
        assert (one[0] - other[0]).abs().max() <= 1.01 / 255
    monkeypatch.setattr(grid, "MAX_PIXELS", 6 * 32 * 80)
    sample(prompts, config=config, seeds=3, steps=1, out=tmp_path / "none")
    assert len(list((tmp_path / "none").glob("*.png"))) == 6
    assert not (tmp_path / "none" / "grid.png").exists()


def test_a_size_that_the_model_can_not_draw_leaves_no_empty_folder(tmp_path):
    (tmp_path / "old").mkdir()
    for out in ("new", "old"):
        said = " ".join(run("sample", PROMPTS[0], "--height", "33", "--out", out, cwd=tmp_path, code=2).split())
        assert "33 and 80. You can use height 32" in said
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
