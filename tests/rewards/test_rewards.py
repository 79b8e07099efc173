"""Every reward on pictures with a known answer, and the ways a reward can fail."""

import pickle
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from support.paths import SAMPLE_REWARDS, SUPPORT

from dev.tiny import pretrain, world
from flow_grpo import rewards
from flow_grpo.rewards.ocr import ENGINES, _engine

CAT = 'red text "CAT" on a blue background'


def signs(*prompts: str) -> torch.Tensor:
    return pretrain.images_of([world.parse(prompt) for prompt in prompts]) / 2 + 0.5


@pytest.fixture(scope="module")
def ocr():
    return rewards.load("ocr")


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("cat", "cat", 1.0),
        ("cats", "cat", 1.0),  # a substring counts as a hit
        ("cut", "cat", 2 / 3),
        ("ct", "cat", 2 / 3),
        ("", "cat", 0.0),
        ("elephant", "cat", 0.0),  # the distance is cut at the target's length
        ("horse", "house", 0.8),
    ],
)
def test_the_published_ocr_score(ocr, read, target, score):
    assert ocr.score(read, target) == pytest.approx(score)


def test_ocr_reads_small_signs_in_every_colour():
    colors = list(world.COLORS)
    prompts = [f'{a} text "HOUSE" on a {b} background' for a in colors for b in colors if a != b]
    exact = rewards.load("ocr_exact")
    assert float(exact(signs(*prompts), prompts).mean()) == 1.0
    wrong = [prompt.replace("HOUSE", "MOUSE") for prompt in prompts]
    assert float(exact(signs(*prompts), wrong).mean()) == 0.0


def test_ocr_scores_a_wrong_letter_by_its_share(ocr):
    assert ocr(signs(CAT), [CAT.replace("CAT", "CUT")]).tolist() == pytest.approx([2 / 3])


def test_ocr_detects_and_reads_in_large_images(ocr):
    picture = Image.new("RGB", (512, 384), (240, 230, 220))
    font = ImageFont.truetype(str(world.FONT), 48)
    pen = ImageDraw.Draw(picture)
    pen.text((60, 40), "GRAND", fill=(20, 20, 60), font=font)
    pen.text((200, 260), "Hotel", fill=(150, 20, 20), font=font)
    images = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    assert ocr(images, ['a sign that says "Grand Hotel"']).tolist() == [1.0]
    assert ocr(images, ['a sign that says "Zzyzx"']).item() < 0.5


def test_large_images_are_read_in_a_batch_as_one_by_one(ocr):
    """The lines of all pictures are recognised together, and each text goes back to its own picture, an empty one to none."""
    font = ImageFont.truetype(str(world.FONT), 48)
    pictures = []
    for words in (["GRAND", "HOTEL"], [], ["CINEMA"], ["A", "LONGER", "STORY"]):
        picture = Image.new("RGB", (512, 384), (240, 230, 220))
        for row, word in enumerate(words):
            ImageDraw.Draw(picture).text((60, 40 + 100 * row), word, fill=(20, 20, 60), font=font)
        pictures.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255)
    together = ocr.read(torch.stack(pictures))
    assert together == [ocr.read(picture[None])[0] for picture in pictures]
    assert together[1] == ""
    assert "CINEMA" in together[2]
    assert "HOTEL" in together[0]


def test_case_and_spaces_do_not_count(ocr):
    assert ocr(signs(CAT), ['a sign "c a t"']).tolist() == [1.0]


def test_two_ocr_rewards_read_a_tensor_once_and_again_when_it_has_changed(ocr, monkeypatch):
    reads = []
    original = type(ocr)._read

    def counted(self, images):
        reads.append(len(images))
        return original(self, images)

    monkeypatch.setattr(type(ocr), "_read", counted)
    exact, images, prompt = rewards.load("ocr_exact"), signs(CAT), [CAT]
    assert (ocr(images, prompt).item(), exact(images, prompt).item()) == (1, 1)
    assert reads == [1]
    images.fill_(1.0)
    assert (ocr(images, prompt).item(), exact(images, prompt).item()) == (0, 0)
    assert ocr(signs(CAT), prompt).item() == 1
    assert reads == [1, 1, 1], "the same pixels in another tensor are read again"
    assert rewards.load("ocr", several_lines=True)(images, prompt).item() == 0
    assert len(reads) == 4


def test_engines_of_many_shapes_are_not_all_kept(ocr):
    for width in range(64, 64 + 16 * (ENGINES + 1), 16):
        ocr.read(torch.zeros(1, 3, 32, width))
    assert _engine.cache_info().currsize <= ENGINES


def test_ocr_wants_quoted_text(ocr):
    with pytest.raises(ValueError, match="has nothing to read"):
        ocr(signs(CAT), ["a cat"])


@pytest.mark.parametrize(
    ("options", "read", "prompt", "score"),
    [
        ({}, "CAT", 'a sign "cat"', 1.0),
        ({"case_sensitive": True}, "CAT", 'a sign "Cat"', 1 / 3),
        ({"keep_spaces": True}, "redcat", 'a sign "red  cat"', 6 / 7),  # runs of spaces are one
        ({"keep_spaces": True}, "red cat", 'a sign "red  cat"', 1.0),
        ({"substring": False}, "a cat!", 'a sign "cat"', 1 / 3),  # a and ! are insertions
        ({"several_lines": True}, "grand hotel", '"Grand" above "Hotel"', 1.0),
        ({"several_lines": True}, "grand", '"Grand" above "Hotel"', 0.5),
        ({}, "grand", '"Grand" above "Hotel"', 1.0),
        ({}, "GRAND HOTEL", '"Grand\u00a0Hotel"', 1.0),
        ({"keep_spaces": True}, "GRAND HOTEL", '"Grand\u3000Hotel"', 1.0),
        ({}, "CAFÉ", f'"{unicodedata.normalize("NFD", "Café")}"', 1.0),
    ],
)
def test_ocr_counts_what_its_options_say(monkeypatch, options, read, prompt, score):
    ocr = rewards.load("ocr", **options)
    monkeypatch.setattr(ocr, "read", lambda images: [read])
    assert ocr(torch.zeros(1, 3, 8, 8), [prompt]).tolist() == pytest.approx([score])


def test_ocr_reads_several_lines_in_small_images():
    picture = Image.new("RGB", (160, 64), (240, 230, 220))
    font = ImageFont.truetype(str(world.FONT), 22)
    for row, word in enumerate(("GRAND", "HOTEL")):
        ImageDraw.Draw(picture).text((30, 3 + 30 * row), word, fill=(20, 20, 60), font=font)
    images = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    prompt = 'a sign that says "Grand" and below "Hotel"'
    assert rewards.load("ocr", several_lines=True)(images, [prompt]).tolist() == [1.0]
    assert rewards.load("ocr_exact", several_lines=True)(images, [prompt]).tolist() == [1.0]


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="onnxruntime-gpu is installed")
def test_ocr_does_not_fall_back_to_the_cpu_in_silence():
    with pytest.raises(ValueError, match="onnxruntime-gpu"):
        rewards.load("ocr", device="cuda")


def test_clip_finds_the_prompt_of_a_held_out_sign_among_64():
    clip = rewards.load("clip")
    prompts = [sign.prompt for sign in pretrain.held_out_signs(64)]
    images = signs(*prompts)
    table = torch.stack([clip(images, [prompt] * 64) for prompt in prompts], 1)
    assert float((table.argmax(1) == torch.arange(64)).float().mean()) >= 0.9
    assert float(table.abs().max()) <= 1 + 1e-5


def test_clip_falls_with_a_wrong_word_and_with_wrong_colours():
    clip = rewards.load("clip")
    images = signs(CAT, CAT, CAT)
    right, word, color = clip(images, [CAT, CAT.replace("CAT", "DOG"), CAT.replace("red", "white")]).tolist()
    assert right > word + 0.05
    assert right > color + 0.05


def test_clip_is_an_open_clip_model_by_name_and_by_checkpoint():
    import open_clip

    from flow_grpo.rewards.clip import FOLDER, TINY

    assert TINY in open_clip.list_models()
    named = rewards.load("clip", model=TINY, pretrained=str(FOLDER / "open_clip_model.safetensors"))
    folder = rewards.load("clip", model=f"local-dir:{FOLDER}")
    assert torch.equal(named(signs(CAT), [CAT]), folder(signs(CAT), [CAT]))
    with pytest.raises(ValueError, match="laion2b_s32b_b79k"):
        rewards.load("clip", model="ViT-H-14")
    with pytest.raises(ValueError, match="knows no such model"):
        rewards.load("clip", model="ViT-Z-99")


def test_jpeg_size_is_the_file_size_and_falls_for_busy_images(tmp_path):
    reward = rewards.load("jpeg_size")
    flat, noise = torch.full((1, 3, 64, 64), 0.5), torch.rand(1, 3, 64, 64)
    file = tmp_path / "x.jpg"
    Image.fromarray((noise[0] * 255).round().byte().permute(1, 2, 0).numpy()).save(file, quality=95)
    assert reward(noise, ["x"]).item() == pytest.approx(-file.stat().st_size / 1000)
    assert reward(flat, ["x"]).item() > reward(noise, ["x"]).item()
    assert rewards.load("jpeg_size", quality=10)(noise, ["x"]).item() > reward(noise, ["x"]).item()


def test_sharpness_is_its_formulas():
    images = torch.rand(3, 3, 12, 15, generator=torch.Generator().manual_seed(0))
    y = (0.299 * images[:, 0] + 0.587 * images[:, 1] + 0.114 * images[:, 2]).double().numpy()
    inner = y[:, :-2, 1:-1] + y[:, 2:, 1:-1] + y[:, 1:-1, :-2] + y[:, 1:-1, 2:] - 4 * y[:, 1:-1, 1:-1]
    laplacian = rewards.load("sharpness")
    assert laplacian(images, ["x"] * 3).tolist() == pytest.approx(inner.var((1, 2)).tolist(), rel=1e-4)
    power = rewards.load("sharpness", measure="high_frequency")
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(64.0), indexing="ij")
    for frequency, counts in ((3 / 16, 0), (4 / 16, 1), (7 / 16, 1)):  # a cosine wave has the power amplitude^2 / 2
        wave = (0.5 + 0.4 * torch.cos(2 * torch.pi * frequency * rows)).expand(1, 3, 32, 64)
        assert power(wave, ["x"]).item() == pytest.approx(counts * 0.08, abs=1e-6)
    checks = ((rows + columns) % 2).expand(1, 3, 32, 64)
    assert (laplacian(checks, ["x"]).item(), power(checks, ["x"]).item()) == pytest.approx((16, 0.25), abs=1e-4)
    assert laplacian(torch.full((1, 3, 9, 9), 0.3), ["x"]).item() == pytest.approx(0, abs=1e-10)
    with pytest.raises(ValueError, match="laplacian or high_frequency"):
        rewards.load("sharpness", measure="fine")(images, ["x"] * 3)


def test_color_counts_background_and_text():
    color = rewards.load("color")
    images = signs(CAT, CAT, CAT, CAT)
    asked = [CAT, CAT.replace("red", "white"), CAT.replace("blue", "white"), 'white text "CAT" on a black background']
    assert color(images, asked).tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=0.01)
    plain = torch.zeros(1, 3, 32, 64) + torch.tensor(world.COLORS["blue"]).view(1, 3, 1, 1) / 255
    assert color(plain, [CAT]).item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="not of the form"):
        color(plain, ["a cat"])


def test_the_palettes_of_world_and_reward_are_the_same():
    from flow_grpo.rewards.pixels import PALETTE

    assert PALETTE == world.COLORS


def test_own_rewards_by_file_and_by_import_path(monkeypatch):
    images = torch.full((2, 3, 4, 4), 0.25)
    by_file = rewards.load(f"{SAMPLE_REWARDS}:brightness")
    assert rewards.score("b", by_file, images, ["a", "b"]).tolist() == [0.25, 0.25]
    monkeypatch.syspath_prepend(str(SUPPORT))
    by_path = rewards.load("sample_rewards:scaled", factor=4)
    assert rewards.score("s", by_path, images, ["a", "b"]).tolist() == [1, 1]
    by_metadata = rewards.load("sample_rewards:uses_metadata")
    assert rewards.score("m", by_metadata, images, ["a", "b"], answer=[3, 4], other=[0, 0]).tolist() == [3, 4]
    assert rewards.score("s", by_path, images, ["a", "b"], other=[0, 0]).tolist() == [1, 1], "options and metadata"


CONSTANT = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass
class Constant:
    value: float = {value}

    def __call__(self, images, prompts):
        return [self.value] * len(prompts)
"""


def test_a_file_may_have_dataclasses_with_postponed_annotations_whose_objects_can_be_pickled(tmp_path):
    loaded = []
    for folder, value in (("one", 1.0), ("other", 20.0)):  # two files of one name
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.own.py").write_text(CONSTANT.format(value=value))
        loaded.append(rewards.load(f"{tmp_path / folder / 'my.own.py'}:Constant"))
    assert [pickle.loads(pickle.dumps(reward)) for reward in loaded] == loaded
    assert [reward.value for reward in loaded] == [1.0, 20.0]


def test_a_file_that_changed_is_loaded_anew_and_one_that_fails_leaves_no_module(tmp_path):
    file = tmp_path / "changing.py"
    for value in (1.0, 20.0, 20.0):
        file.write_text(CONSTANT.format(value=value))
        reward = rewards.load(f"{file}:Constant")
        assert pickle.loads(pickle.dumps(reward)).value == value
    file.write_text(CONSTANT.format(value="no_such_name"))
    with pytest.raises(ValueError, match="could not be run: NameError"):
        rewards.load(f"{file}:Constant")
    assert not [name for name in sys.modules if "changing" in name]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("orc", {}, "there is no reward orc. Did you mean ocr"),
        ("no_module:f", {}, "could not be imported"),
        ("rewards.ocr:nothing", {}, "has no nothing"),
        ("missing.py:f", {}, "there is no reward file"),
        ("color", {"pallette": {}}, "its options are palette"),
        ("jpeg_size", {"qualty": 3}, None),
    ],
)
def test_a_reward_that_is_not_there_gets_a_clear_error(name, options, words):
    if words is None:  # a function that takes any metadata takes any option
        assert callable(rewards.load(name, **options))
        return
    with pytest.raises(ValueError, match=words):
        rewards.load(name, **options)


OWN = """
raise_when_run = 1 / 0

def dark(images, prompts):
    return -images.mean((1, 2, 3))
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own.py", "own.py names a file without a function: write own.py:FUNCTION."),
        ("nowhere.py:dark", "there is no reward file nowhere.py in /"),
        (
            "fine.py:NoCall",
            "its objects can't be called: give the class a method `__call__(self, images, prompts, **metadata)`.",
        ),
        ("ocr:1", "reward ocr:1: a weight follows the colon and a space: write `ocr: 1`."),
        ("own.py:dark:0.5", "a weight follows the colon and a space: write `own.py:dark: 0.5`."),
        (
            "own:dark",
            "reward own:dark could not be imported, since the working directory is not searched for modules: write own.py:dark.",
        ),
        (
            "rewards.mine:dark",
            "since the package `rewards` of flow-grpo hides a folder of that name: write rewards/mine.py:dark.",
        ),
        ("owm:dark", "reward owm:dark could not be imported: ModuleNotFoundError: No module named 'owm'"),
        ("sub.other:dark", "could not be imported: ModuleNotFoundError"),
        ("fine.py:drak", "reward fine.py:drak: fine.py has no drak. Did you mean dark?"),
        ("fine.py:zzz", "reward fine.py:zzz: fine.py has no zzz."),
        ("fine.py:images_only", "fine.py:images_only takes (images), but it must take (images, prompts, **metadata)."),
    ],
)
def test_a_name_that_leads_to_no_reward_is_said_in_one_sentence(tmp_path, monkeypatch, name, sentence):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("rewards").mkdir()
    Path("rewards/mine.py").write_text(OWN)
    Path("fine.py").write_text("def dark(images, prompts): ...\n\ndef images_only(images): ...\n\nclass NoCall: ...\n")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rewards.load(name)


class NeedsWord:
    def __call__(self, images, prompts, word, size=1, **metadata):
        return [1.0] * len(prompts)


class WithoutPrompts:
    def __call__(self, images):
        return images.mean((1, 2, 3))


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (lambda images, prompts: None, "returned None for 2 images; it must return one number each: is a `return` missing?"),
        (lambda images, prompts: "high", "returned a str that can't be read as numbers for 2 images; it must "
         "return one number each: new(): invalid data type 'str'."),
        (lambda images, prompts: [1.0, None], "returned a list that can't be read as numbers for 2 images; it must return one "
         "number each: must be real number, not NoneType."),
        (lambda images, prompts: ["good", "bad"], "returned a list of str for 2 images; it must return one number each: return numbers."),
        (lambda images, prompts: images.mean(), "it is called once with all images of a batch, so average over the "
         "pixels, as images.mean((1, 2, 3)) does, and not over the batch."),
        (lambda images, prompts: images.mean(1), "returned shape (2, 4, 4) for 2 images; it must return one number each."),
        (lambda images: images, "mine takes (images), but it must take (images, prompts, **metadata)."),
        (WithoutPrompts(), "mine takes (images), but it must take (images, prompts, **metadata)."),
        (NeedsWord(), "needs word, but the prompts have no column word (they have other): give a file of prompts with this column, or a "
         "value among the reward's options."),
        (lambda images, prompts, *, word: [1.0, 1.0], "needs word, but the prompts have no column word (they have other): give a file of "
         "prompts with this column, or a value among the reward's options."),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_users_reward_is_said_in_one_sentence(reward, sentence):
    with pytest.raises(ValueError, match=f"^reward mine .*{re.escape(sentence.removeprefix('mine '))}$"):
        rewards.score("mine", reward, torch.zeros(2, 3, 4, 4), ["a", "b"], other=[1, 2])


@pytest.mark.parametrize(
    "reward", [NeedsWord(), lambda images, prompts, word: [1.0, 1.0], lambda *inputs, **more: [1.0, 1.0]]
)
def test_a_reward_that_has_all_it_needs_is_called(reward):
    assert rewards.score("mine", reward, torch.zeros(2, 3, 4, 4), ["a", "b"], word=["c", "d"]).tolist() == [1, 1]


def test_an_option_without_a_space_after_its_colon_is_named():
    with pytest.raises(ValueError, match=r"reward jpeg_size: write a space after the colon of an option: `quality: 0\.5`"):
        rewards.load("jpeg_size", **{"quality:0.5": None})


def test_a_column_that_is_empty_in_some_rows_is_named_if_a_reward_raises():
    def longer(images, prompts, word):
        return [len(one) for one in word]

    with pytest.raises(ValueError, match=r"raised TypeError.*; some prompts have no word, which is None"):
        rewards.score("longer", longer, torch.zeros(2, 3, 4, 4), ["a", "b"], word=["c", None])


def test_a_reward_is_called_by_its_function_in_the_metrics():
    names = [
        "a/b.py:brightness",
        "ocr",
        "c.py:brightness",
        "my.mod:brightness",
        "x.py:ocr",
        "y.py:clip",
        "z.py:reward",
        "v1.5",
    ]
    assert rewards.metric_names(names, ["reward"]) == {
        "a/b.py:brightness": "brightness",
        "ocr": "ocr",
        "c.py:brightness": "brightness_2",
        "my.mod:brightness": "brightness_3",
        "x.py:ocr": "ocr_2",
        "y.py:clip": "clip_2",  # what a run calls clip is ours in every run
        "z.py:reward": "reward_2",
        "v1.5": "v1.5",
    }


def test_columns_of_the_metadata_may_have_any_name():
    def mine(images, prompts, name, reward):
        return [float(one) + other for one, other in zip(name, reward, strict=True)]

    columns = {"name": [1, 2], "reward": [10, 20]}
    assert rewards.score("mine", mine, torch.zeros(2, 3, 4, 4), ["a", "b"], **columns).tolist() == [11, 22]


@pytest.mark.parametrize(
    ("function", "words"), [("raises", "the camera is off"), ("nan", "returned nan"), ("wrong_shape", "shape")]
)
def test_a_failing_reward_names_itself(function, words):
    reward = rewards.load(f"{SAMPLE_REWARDS}:{function}")
    with pytest.raises(ValueError, match=f"reward mine .*{words}"):
        rewards.score("mine", reward, torch.zeros(2, 3, 4, 4), ["a", "b"])


def test_a_weighted_sum_reports_each_alone():
    def one(images, prompts):
        return [1.0] * len(prompts)

    def two(images, prompts):
        return torch.full((len(prompts),), 2.0)

    both = rewards.WeightedSum({"one": one, "two": two}, {"one": 0.5, "two": 2.0})
    total, by_name = both(torch.zeros(3, 3, 4, 4), ["a", "b", "c"])
    assert total.tolist() == [4.5] * 3
    assert {name: values.tolist() for name, values in by_name.items()} == {"one": [1.0] * 3, "two": [2.0] * 3}


@pytest.mark.parametrize("scale", [1, 2, 3, 8])
def test_ocr_reads_the_same_signs_at_every_size(scale):
    prompts = ['blue text "CAT" on a red background', 'white text "ANT" on a green background']
    images = signs(*prompts)
    size = [scale * side for side in images.shape[-2:]]
    large = torch.nn.functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
    assert rewards.load("ocr_exact")(images if scale == 1 else large, prompts).tolist() == [1, 1]
