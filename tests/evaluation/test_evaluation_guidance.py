"""Evaluation with another guidance scale than that of training."""

import pytest
import torch
from support import small_policy
from support.cli_process import run
from support.families import TINY, awake

from flow_grpo.data.grid import read_grid
from flow_grpo.evaluation.generate import SEED, generate_images, image_seed
from flow_grpo.export import model_card
from flow_grpo.export.export import export
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.run_folder.metrics_file import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer

HELD_OUT = small_policy.PROMPTS.head(3)
SEEDS = [image_seed(SEED, place) for place in range(3)]


def bright(images, prompts, **metadata):
    return images[:, 0, 0, 0].float()  # a single pixel, which shows a small change


def made(folder, policy=None, **evaluation) -> FlowGRPOTrainer:
    args = small_policy.settings(output_dir=str(folder), steps=2, evaluation={"steps": 2, "every": 0, **evaluation})
    return FlowGRPOTrainer(policy or small_policy.policy(), bright, args, small_policy.PROMPTS, HELD_OUT)


@pytest.mark.parametrize(("own", "other"), [(1.0, 3.0), (3.0, 1.0)])
@pytest.mark.parametrize("name", ["sd3", "qwen_image", "hunyuan_image"])
def test_a_policy_with_another_guidance_is_one_that_was_loaded_with_it(name, own, other):
    """Guidance is an argument of the call, one of another name beside a negative prompt, and a component of the pipeline."""
    torch.manual_seed(0)
    pipe, tiny = awake(TINY[name].build()), TINY[name]
    size = dict(zip(("height", "width"), tiny.size, strict=True))
    policy, loaded = (Policy(pipe, guidance=scale, **size, **tiny.call) for scale in (own, other))
    expected = generate_images(loaded, ["a cat"], [0], 2)
    assert not torch.equal(generate_images(policy, ["a cat"], [0], 2), expected)
    assert torch.equal(generate_images(policy.with_guidance(other), ["a cat"], [0], 2), expected)
    assert policy.with_guidance(own) is policy
    assert policy.with_guidance(None) is policy


def test_held_out_images_have_the_guidance_of_evaluation_and_training_does_not(tmp_path):
    trainer, plain = made(tmp_path / "run", guidance=3.0), made(tmp_path / "plain")
    for one in (trainer, plain):
        one.train()
    for name, parameter in plain.policy.trainable_parameters().items():
        assert torch.equal(trainer.policy.trainable_parameters()[name], parameter)
    first, last = [row for row in read_metrics(tmp_path / "run") if "eval/reward" in row]
    guided = small_policy.policy(guidance=3.0)
    before = generate_images(guided, HELD_OUT.prompts, SEEDS, 2)
    with trainer.policy.ema.applied():
        after = generate_images(trainer.policy.with_guidance(3.0), HELD_OUT.prompts, SEEDS, 2)
    assert first["eval/bright"] == pytest.approx(float(bright(before, []).mean()), abs=1e-6)
    assert last["eval/bright"] == pytest.approx(float(bright(after, []).mean()), abs=1e-6)
    unguided = generate_images(small_policy.policy(), HELD_OUT.prompts, SEEDS, 2)
    assert abs(float(bright(before, []).mean() - bright(unguided, []).mean())) > 1e-3


def test_a_pipeline_without_guidance_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("flow_grpo.policy.loading.FlowPipeline.velocity", lambda self, x, *given: x)
    with pytest.raises(ValueError, match=r"StableDiffusion3Pipeline has no guidance: leave evaluation\.guidance out"):
        made(tmp_path / "run", guidance=3.0)


def test_a_policy_of_the_users_own_has_its_own_guidance(tmp_path):
    """The config's guidance, 1 by default, is not that of a policy that the user has made."""
    trainer = made(tmp_path / "run", small_policy.policy(guidance=3.0), guidance=1.0)
    images = trainer.evaluate().images
    expected = generate_images(small_policy.policy(), HELD_OUT.prompts, SEEDS, 2)
    assert torch.equal(torch.stack([images[place] for place in range(3)]), expected)


def test_sample_uses_the_guidance_of_evaluation(tmp_path):
    """`sample` draws the image of `--guidance 3`, unless another one is given."""
    config = tmp_path / "guided.yaml"
    config.write_text("model: tiny\ndtype: fp32\nheight: 32\nwidth: 80\nevaluation: {guidance: 3, steps: 2}\n")
    images = {}
    for name, words in {"config": [], "off": ["--guidance", "1"]}.items():
        run("sample", "a cat", "--config", str(config), "--seeds", "1", "--out", name, *words, cwd=tmp_path)
        images[name] = read_grid(tmp_path / name / "grid.png")[0]
    for name, guidance in (("config", 3.0), ("off", 1.0)):
        policy = load_policy("tiny", "cpu", "fp32", guidance=guidance, height=32, width=80)
        torch.testing.assert_close(images[name], generate_images(policy, ["a cat"], [0], 2), atol=1 / 255, rtol=0)


def test_the_card_of_an_export_samples_as_evaluations_do(tmp_path):
    made(tmp_path / "run", guidance=3.0).train()
    export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / model_card.CARD).read_text()
    assert "guidance_scale=3.0," in card
    assert "2 ODE steps and guidance 3.0" in card
