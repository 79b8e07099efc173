"""The Bradley-Terry head: the loss it minimises, what it learns from votes, and votes files that must be refused."""

import json
import struct
import zlib

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.reward_inputs import scored_unchanged
from typer.testing import CliRunner

from dev.tiny import pretrain
from flow_grpo import rewards
from flow_grpo.cli import rewards as reward_cli
from flow_grpo.data.votes import load_votes
from flow_grpo.rewards import preference_head
from flow_grpo.rewards.clip import TINY, OpenCLIP
from flow_grpo.rewards.preference_head import bradley_terry, features

PROMPTS = [sign.prompt for sign in pretrain.held_out_signs(24)]


def fit(votes, *arguments, **settings):
    return preference_head.fit(load_votes(str(votes), stay_inside=True), *arguments, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Signs as voted on by someone who likes dark pictures, whatever the prompt."""
    folder = tmp_path_factory.mktemp("votes")
    images = pretrain.images_of(pretrain.held_out_signs(24)) / 2 + 0.5
    lines = []
    for i, prompt in enumerate(PROMPTS):
        for kind, image in (("light", images[i] * 0.5 + 0.5), ("dark", images[i] * 0.5)):
            Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()).save(folder / f"{i}_{kind}.png")
        lines.append(json.dumps({"prompt": prompt, "better": f"{i}_dark.png", "worse": f"{i}_light.png"}))
    (folder / "votes.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def picture(path) -> torch.Tensor:
    return torch.frombuffer(bytearray(Image.open(path).tobytes()), dtype=torch.uint8).view(32, 80, 3).permute(2, 0, 1) / 255


def test_the_fit_is_the_minimum_of_the_bradley_terry_loss():
    """Where -mean d sigmoid(-w . d) + weight_decay w, the gradient written out, is 0."""
    difference = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for weight_decay in (1e-3, 0.1):
        weight = bradley_terry(difference, weight_decay)
        unlikely = 1 / (1 + torch.exp(difference @ weight))
        gradient = -(difference * unlikely[:, None]).mean(0) + weight_decay * weight
        assert gradient.abs().max() < 1e-8


def test_the_fit_finds_the_odds_that_votes_were_drawn_with():
    random = torch.Generator().manual_seed(1)
    truth = torch.tensor([1.5, -1.0, 0.0], dtype=torch.float64)
    difference = torch.randn(20_000, 3, dtype=torch.float64, generator=random)
    agrees = torch.rand(20_000, dtype=torch.float64, generator=random) < torch.sigmoid(difference @ truth)
    assert torch.allclose(bradley_terry(difference * (agrees * 2.0 - 1)[:, None], 1e-6), truth, atol=0.06)


def test_a_head_learns_a_taste_and_scores_with_it_as_a_reward(folder, tmp_path):
    result = fit(folder / "votes.jsonl", tmp_path / "head")
    assert (result.votes, result.held_out_votes) == (24, 5)
    assert result.accuracy == 1.0
    assert result.held_out_accuracy == 1.0
    reward = rewards.load("preference_head", weights=str(tmp_path / "head"))
    dark = torch.stack([picture(folder / f"{i}_dark.png") for i in range(24)])
    light = torch.stack([picture(folder / f"{i}_light.png") for i in range(24)])
    scores = scored_unchanged("preference_head", reward, dark, PROMPTS)
    assert (scores > rewards.score("preference_head", reward, light, PROMPTS)).all()
    # The formula: w . [v, sqrt(E) v t], of the head's file and open_clip's unit vectors.
    embed, weight = OpenCLIP("test", TINY, None, "cpu"), load_file(tmp_path / "head" / "head.safetensors")["weight"]
    pictures = [Image.open(folder / f"{i}_dark.png") for i in range(24)]
    v, t = embed.encode_images(pictures), embed.encode_prompts(PROMPTS)
    assert torch.allclose(scores, v @ weight[:128] + 128**0.5 * (v * t) @ weight[128:], atol=1e-4)
    cosine = features(embed, pictures, PROMPTS) @ torch.cat([torch.zeros(128), torch.full((128,), 128**-0.5)])
    assert torch.allclose(cosine, rewards.load("clip")(dark, PROMPTS), atol=1e-5)


def test_a_head_has_the_gradient_of_its_score(folder, tmp_path):
    fit(folder / "votes.jsonl", tmp_path / "head")
    reward = rewards.load("preference_head", weights=str(tmp_path / "head"), device="cpu")
    images, prompts, step = torch.stack([picture(folder / f"{i}_dark.png") for i in range(3)]), PROMPTS[:3], 1e-6
    expected = reward(images, prompts)
    value, gradient, _ = rewards.WeightedSum({"r": reward}, {"r": 1.0}).gradients(images, prompts)["r"]
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-2)
    reward.double()
    ends = [reward((images.double() + sign * step).requires_grad_(), prompts).detach() for sign in (1, -1)]
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), gradient.double().flatten(1).sum(1), rtol=1e-3, atol=1e-4)


def test_the_command_line_fits_a_head_and_says_how_to_use_it(folder, tmp_path):
    result = CliRunner().invoke(reward_cli.app, ["fit", str(folder / "votes.jsonl"), "--out", str(tmp_path / "head")])
    assert result.exit_code == 0, result.output
    assert "agrees with 1.000 of 19 votes, 1.000 of 5 held out" in result.output
    assert f"rewards={{preference_head: {{options: {{weights: {tmp_path / 'head'}}}}}}}" in result.output
    assert (tmp_path / "head" / "head.safetensors").exists()


def test_votes_the_other_way_round_give_the_other_head(folder, tmp_path):
    votes = [json.loads(line) for line in (folder / "votes.jsonl").read_text().splitlines()]
    turned = [json.dumps({**vote, "better": vote["worse"], "worse": vote["better"]}) for vote in votes]
    (folder / "turned.jsonl").write_text("\n".join(turned))
    fit(folder / "votes.jsonl", tmp_path / "a")
    fit(folder / "turned.jsonl", tmp_path / "b")
    a, b = (load_file(tmp_path / name / "head.safetensors")["weight"] for name in "ab")
    assert torch.allclose(a, -b, atol=1e-5)


def test_a_fit_is_the_same_twice_and_the_seed_chooses_the_held_out_prompts(folder, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit(folder / "votes.jsonl", tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "head.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_head_may_be_read_by_others_as_other_new_files_may(folder, tmp_path):
    fit(folder / "votes.jsonl", tmp_path / "head")
    weights, settings = (tmp_path / "head" / name for name in preference_head.FILES)
    assert weights.stat().st_mode == settings.stat().st_mode


def test_votes_on_one_prompt_stay_on_one_side(folder, tmp_path):
    """Two prompts of 3 and 21 votes: either all of one or all of the other are held out."""
    votes = [json.loads(line) for line in (folder / "votes.jsonl").read_text().splitlines()]
    lines = [json.dumps({**vote, "prompt": PROMPTS[i >= 3]}) for i, vote in enumerate(votes)]
    (folder / "two.jsonl").write_text("\n".join(lines))
    assert {fit(folder / "two.jsonl", tmp_path, seed=seed).held_out_votes for seed in range(6)} == {3, 21}
    (folder / "one.jsonl").write_text("\n".join(json.dumps({**vote, "prompt": "a"}) for vote in votes))
    assert fit(folder / "one.jsonl", tmp_path, held_out=0).held_out_accuracy is None
    with pytest.raises(ValueError, match="set held_out=0"):
        fit(folder / "one.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2: give an object"),
        ('{"prompt": "a", "better": "0_dark.png"}', "row 2: the column `worse` holds None"),
        ('{"prompt": "a", "better": "0_dark.png", "worse": 3}', "the column `worse` holds 3: give the path of an image"),
        ('{"prompt": "a", "better": "0_dark.png", "worse": "0_dark.png"}', "with itself"),
        ('{"prompt": "a", "better": "0_dark.png", "worse": "gone.png"}', "gone.png does not exist"),
        ('{"prompt": "a", "better": "0_dark.png", "worse": "../outside.png"}', "outside its folder"),
        ('{"prompt": "a", "better": "0_dark.png", "worse": "/etc/passwd"}', "outside its folder"),
        ('{"prompt": "a", "better": "0_dark.png", "worse": "link.png"}', "outside its folder"),
        (
            '{"prompt": "a", "better": "0_dark.png", "worse": "torn.png"}',
            r"(torn|huge)\.png.*(could not be read|is not an image)",
        ),
        (
            '{"prompt": "a", "better": "0_dark.png", "worse": "huge.png"}',
            r"(torn|huge)\.png.*(could not be read|is not an image)",
        ),
    ],
)
def test_a_bad_votes_file_is_refused_in_a_clear_error(folder, tmp_path, line, words):
    outside = folder.parent / "outside.png"
    Image.new("RGB", (8, 8)).save(outside)
    if not (folder / "link.png").is_symlink():
        (folder / "link.png").symlink_to(outside)
    (folder / "torn.png").write_bytes((folder / "0_dark.png").read_bytes()[:200])
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13)
    (folder / "huge.png").write_bytes(start + header + struct.pack(">I", zlib.crc32(header)))
    good = (folder / "votes.jsonl").read_text().splitlines()[0]
    (folder / "bad.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=words):
        fit(folder / "bad.jsonl", tmp_path / "head", held_out=0)
    assert not (tmp_path / "head").exists()


def test_settings_and_files_that_cannot_be_are_refused(folder, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no prompts"):
        fit(tmp_path / "empty.jsonl", tmp_path)
    with pytest.raises(ValueError, match="there is no file"):
        fit(tmp_path / "gone.jsonl", tmp_path)
    with pytest.raises(ValueError, match="weight_decay above 0"):
        fit(folder / "votes.jsonl", tmp_path, weight_decay=0)
    with pytest.raises(ValueError, match=r"a share in \[0, 1\)"):
        fit(folder / "votes.jsonl", tmp_path, held_out=1)
    with pytest.raises(ValueError, match="there is no weights file"):
        rewards.load("preference_head", weights=str(tmp_path / "nowhere"))
    fit(folder / "votes.jsonl", tmp_path / "head")
    (tmp_path / "head" / "head.json").write_text("{}")
    with pytest.raises(ValueError, match="is not what fit wrote"):
        rewards.load("preference_head", weights=str(tmp_path / "head"))
