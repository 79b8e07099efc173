"""Text to video from the command line: trained, resumed, sampled, evaluated, reported and exported."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.cli_process import run
from support.families import TINY, awake
from support.paths import SAMPLE_REWARDS
from support.run_contents import numbers, same

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_image
from flow_grpo.policy.hub import expert_weights

METHODS = {
    "grpo": {"objective": {"name": "grpo"}, "sampling": {"steps": 4, "transition": "cps", "noise_level": 0.8}},
    "awm": {"objective": {"name": "awm"}, "sampling": {"steps": 4}},
}
REWARD = f"{SAMPLE_REWARDS}:brightness"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the models and two prompt files."""
    folder = tmp_path_factory.mktemp("videos")
    for name in ("wan", "wan22"):
        torch.manual_seed(0)
        awake(TINY[name].build()).save_pretrained(folder / name)
    nouns = ["cat", "dog", "sun", "owl", "tree", "boat", "car", "bird"]
    (folder / "train.txt").write_text("".join(f"a {noun} that moves\n" for noun in nouns))
    (folder / "held_out.txt").write_text("".join(f"a red {noun}\n" for noun in nouns))
    return folder


def config(folder: Path, name: str, method: str, **more) -> Path:
    args = FlowGRPOConfig(
        **{
            "model": "wan",
            "prompts": "train.txt",
            "rewards": {REWARD: {"frames": "last"}},
            "pipeline_kwargs": {"height": 32, "width": 48, **TINY["wan"].call},
            "output_dir": name,
            "steps": 5,
            "prompts_per_step": 4,
            "images_per_prompt": 8,
            "microbatch": 16,
            "optimizer": {"lr": 1e-2},
            "lora": {"rank": 4, "alpha": 8},
            "evaluation": {"prompts": "held_out.txt", "every": 5, "steps": 4, "rewards": {"motion": {}}},
            "device": "cpu",
            "dtype": "fp32",
            **METHODS[method],
            **more,
        }
    )
    file = folder / f"{name}.yaml"
    file.write_text(args.to_yaml())
    return file


@pytest.fixture(scope="module", params=[pytest.param("grpo", marks=pytest.mark.slow), "awm"])
def trained(request, folder) -> Path:
    """The folder of a run of each method."""
    run("train", str(config(folder, request.param, request.param)), cwd=folder)
    return folder / request.param


def test_the_held_out_reward_of_the_last_frame_rises(trained):
    first, last = (
        torch.tensor(json.loads((trained / "pictures" / step / "evaluation.json").read_text())["values"]["reward"])
        for step in ("step_000000", "step_000005")
    )
    change = last - first
    assert change.mean() > 4 * change.std() / len(change) ** 0.5


def test_the_report_shows_animations_and_strips(trained):
    page = (trained / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]
    assert all(strip.startswith("data:image/webp;base64,") for frame in data["frames"] for strip in frame["strips"])
    with Image.open(trained / "pictures" / "step_000005" / "prompt_0000.webp") as animation:
        assert animation.n_frames == 5
    with Image.open(trained / "pictures" / "step_000005" / "prompt_0000_strip.webp") as strip:
        assert (strip.size, getattr(strip, "n_frames", 1)) == ((4 * 48, 32), 1)
    with Image.open(trained / "before_after.png") as sheet:
        assert json.loads(sheet.text["flow_grpo"])["videos"]


def test_a_run_is_sampled_evaluated_and_exported(trained):
    folder, name = trained.parent, trained.name
    of_images = folder / f"{name}_drawn" / "0000_seed0.png"  # of an earlier command
    save_image(of_images, torch.rand(3, 8, 8), ImageInfo("a red cat", 0, "tiny"))
    (of_images.parent / "metadata.jsonl").write_text('{"file_name": "0000_seed0.png", "prompt": "a red cat"}\n')
    said = run("sample", "a red cat", "--seeds", "2", "--lora", str(trained / "lora"), "--out", f"{name}_drawn", cwd=folder)
    assert "2 videos: " in said
    files = sorted(file.name for file in (folder / f"{name}_drawn").iterdir())
    assert files == ["0000_seed0.webp", "0001_seed1.webp", "grid.png", "metadata.jsonl"]
    for source in (f"{name}_drawn", f"{name}_drawn/grid.png"):
        said = run("score", source, "--reward", "jpeg_size", cwd=folder, code=2)
        assert "it is an animation" in said or "shows strips of videos" in said
    run("eval", str(trained), "--reward", "motion", "--out", f"{name}_eval", cwd=folder)
    values = json.loads((folder / f"{name}_eval" / "eval.json").read_text())
    assert "motion" in json.dumps(values)
    run("export", str(trained), "--out", f"{name}_export", cwd=folder)
    card = (folder / f"{name}_export" / "README.md").read_text()
    assert 'export_to_video(frames, "video.mp4", fps=16)' in card
    assert ".frames[0]" in card
    assert "pipeline_tag: text-to-video\n" in card
    assert "text-to-image" not in card


@pytest.mark.slow
def test_a_run_with_two_experts_resumes_and_exports_both_loras(folder):
    short = {"model": "wan22", "steps": 2, "save_every": 1, "evaluation": {"prompts": None}, "images_per_prompt": 2}
    for name, steps in (("whole", 2), ("halved", 1)):
        run("train", str(config(folder, name, "awm", **{**short, "steps": steps})), cwd=folder)
    run("train", str(config(folder, "halved", "awm", **short)), "--resume", cwd=folder)
    file = Path("lora") / expert_weights("transformer_2")
    for place in (file, file.with_name("pytorch_lora_weights.safetensors")):
        whole, halved = (load_file(folder / name / place) for name in ("whole", "halved"))
        assert same(whole, halved)
        assert any(value.any() for key, value in whole.items() if "lora_B" in key)
    assert numbers(folder / "whole") == numbers(folder / "halved")
    run("export", "whole", "--out", "both", cwd=folder)
    card = (folder / "both" / "README.md").read_text()
    assert (folder / "both" / file.name).is_file()
    assert "load_into_transformer_2=True" in card


def test_frames_of_a_reward_are_refused_for_a_model_of_images(folder):
    file = config(folder, "images", "awm", model="tiny", pipeline_kwargs={})
    said = run("train", str(file), cwd=folder, code=2)
    assert "frames=last is for videos, and StableDiffusion3Pipeline makes images: leave it out." in " ".join(said.split())
