"""The embedded model as a diffusers user meets it, and the recipe that made it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from support.embedded import tiny_policy
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from dev.tiny import pretrain, pretraining_stage, world
from flow_grpo import rewards
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.evaluation.generate import evaluate
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.rewards.clip import FOLDER as CLIP_FOLDER

FOLDER = BUNDLED_MODELS["tiny"]


def test_it_is_a_whole_sd35_pipeline_in_16_bit():
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER)
    assert isinstance(pipe.transformer, SD3Transformer2DModel)
    assert isinstance(pipe.vae, AutoencoderKL)
    assert isinstance(pipe.text_encoder, CLIPTextModelWithProjection)
    assert isinstance(pipe.text_encoder_2, CLIPTextModelWithProjection)
    assert isinstance(pipe.text_encoder_3, T5EncoderModel)
    assert pipe.scheduler.config.shift == 3.0
    from safetensors import safe_open

    for file in FOLDER.rglob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            assert {weights.get_slice(k).get_dtype() for k in weights.keys()} == {"F16"}, file  # noqa: SIM118


def test_the_packaged_model_stays_below_25_mb_and_its_clip_below_8():
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) <= 25e6
    assert sum(f.stat().st_size for f in CLIP_FOLDER.rglob("*") if f.is_file()) <= 8e6


def test_plain_diffusers_draws_signs_with_its_defaults_and_without_guidance():
    """No size, 256 T5 tokens, 28 steps, guidance 7: what a user gets who knows nothing about the model."""
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    sign = world.parse('white text "HOUSE" on a blue background')
    for guidance in ({}, {"guidance_scale": 1.0}):
        picture = pipe(sign.prompt, generator=torch.Generator().manual_seed(0), output_type="np", **guidance).images[0]
        assert picture.shape == (80, 80, 3)
        corners = picture[[0, 0, -1, -1], [0, -1, 0, -1]]
        # guidance 7 overdraws a little; the nearest other colour is 0.4 away
        assert np.abs(corners - np.array(world.COLORS["blue"]) / 255).max() < 0.2
        band = picture[32:48]
        assert (np.abs(band - 1).max(-1) < 0.15).mean() > 0.1, "white letters in the middle"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "count", "least"),
    [({"height": 32, "width": 80}, 24, 0.5), ({}, 12, 0.3)],
)
def test_plain_diffusers_spells_with_captions_of_256_tokens_and_on_squares(shape, count, least):
    """Before it was trained for these shapes, the model spelled 0.34 of such signs and 0.13 of such squares."""
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    prompts = load_prompts("prompts/signs_eval.txt").prompts[:count]
    call = {"num_inference_steps": 10, "guidance_scale": 1.0, "output_type": "pt", **shape}
    images = pipe(prompts, generator=torch.Generator().manual_seed(0), **call).images
    assert rewards.load("ocr_exact")(images, prompts).mean() >= least


@pytest.mark.slow
def test_it_leaves_work_to_reinforcement_learning():
    prompts = load_prompts("prompts/signs_eval.txt")
    exact = rewards.WeightedSum({"exact": rewards.load("ocr_exact")}, {"exact": 1.0})
    score = {}
    for guidance, count in ((1.0, 96), (3.0, 32)):
        policy = tiny_policy("auto", guidance_scale=guidance)
        score[guidance] = evaluate(policy, prompts.head(count), exact, base=policy.base_model, steps=10, seed=1234).means()[
            "exact"
        ]
    assert 0.55 <= score[1.0] <= 0.72
    assert score[3.0] >= 0.85, "the right word is one of its modes: guidance finds it"


def test_the_prompt_sets_are_english_words_apart_and_readable():
    train, held_out = (load_prompts(f"prompts/signs_{name}.txt").prompts for name in ("train", "eval"))
    words = [{world.parse(prompt).word for prompt in prompts} for prompts in (train, held_out)]
    assert not words[0] & words[1]
    assert len(held_out) == 256
    exact = rewards.load("ocr_exact")
    drawn = pretrain.images_of([world.parse(prompt) for prompt in held_out]) / 2 + 0.5
    assert float(exact(drawn, held_out).mean()) == 1.0, "a perfect model scores 1"


@pytest.mark.parametrize(
    "prompt",
    [
        "a cat",
        'red text "cat" on a blue background',
        'red text "CAT" on a red background',
        'pink text "CAT" on a blue background',
    ],
)
def test_other_prompts_are_not_of_this_world(prompt):
    with pytest.raises(ValueError, match="not a prompt of the embedded model"):
        world.parse(prompt)


def test_tokenizers_see_the_letters():
    prompt = 'orange text "ABCDE" on a purple background'
    clip, t5 = pretrain.clip_tokenizer(), pretrain.t5_tokenizer()
    assert [t.replace("</w>", "") for t in clip.tokenize('"CAT"')] == ['"', "c", "a", "t", '"']
    assert len(clip(prompt).input_ids) <= pretrain.CLIP_LENGTH
    assert t5.tokenize(prompt)[2:9] == ['▁"', "A", "B", "C", "D", "E", '"']
    assert len(t5(prompt).input_ids) <= pretrain.T5_LENGTH
    saved = StableDiffusion3Pipeline.from_pretrained(FOLDER)
    for ours, theirs in [(clip, saved.tokenizer), (clip, saved.tokenizer_2), (t5, saved.tokenizer_3)]:
        assert ours(prompt).input_ids == theirs(prompt).input_ids


def test_misspelling_changes_letters_at_its_rate_and_nothing_else():
    rng = np.random.default_rng(0)
    sign = world.Sign("ABCDE", "red", "blue")
    drawn = [world.misspell(sign, rng, 0.13) for _ in range(4000)]
    wrong = np.array([[a != b for a, b in zip(d.word, sign.word, strict=True)] for d in drawn])
    assert abs(wrong.mean() - 0.13) < 4 * (0.13 * 0.87 / wrong.size) ** 0.5
    assert {(d.color, d.background) for d in drawn} == {("red", "blue")}


def test_the_recipe_goes_on_where_it_was(tmp_path, monkeypatch):
    """Two steps at once, or one and one more: the same weights."""
    monkeypatch.setattr(pretrain, "VAE_BATCH", 2)
    monkeypatch.setattr(pretraining_stage, "SAVE_EVERY", 1)
    monkeypatch.setattr(pretraining_stage, "EVALUATE_EVERY", 100)

    def run(folder: Path, stops: list[int]) -> dict:
        folder.mkdir(exist_ok=True)
        for stop in stops:
            torch.manual_seed(0)
            # the learning rate's schedule is the whole stage's
            plan = pretraining_stage.StagePlan(0, stop, lr=2e-3, horizon=2)
            stage = pretraining_stage.PretrainingStage("vae", plan, pretrain.pipeline(), ["vae"], folder=folder, seed=0)

            def loss(rng, step, stage=stage):
                x = pretrain.images_of([world.random_sign(rng) for _ in range(2)])
                return (stage.model.vae.encode(x).latent_dist.sample() ** 2).mean()

            stage.run(loss, dict)
        return torch.load(folder / "vae.pt", weights_only=True)["vae"]

    once, twice = run(tmp_path / "once", [2]), run(tmp_path / "twice", [1, 2])
    assert all(torch.equal(value, twice[key]) for key, value in once.items())
    rows = [json.loads(line) for line in (tmp_path / "once" / "log.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in rows} == {"vae"}
