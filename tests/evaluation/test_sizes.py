"""Evaluation at other sizes than that of training, and diversity in every evaluation."""

import json

import pytest
import torch
from support import small_policy
from support.families import TINY, awake

from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.generate import generate_images, image_seed
from flow_grpo.evaluation.hacking import DIVERSITY
from flow_grpo.evaluation.held_out import check_evaluation_sizes
from flow_grpo.policy.policy import Policy
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.metrics_file import metric_name, metric_size, read_metrics
from flow_grpo.run_folder.reader import RunReader, read_all
from flow_grpo.trainer import FlowGRPOTrainer

HELD_OUT = small_policy.PROMPTS.head(3)


def bright(images, prompts, **metadata):
    return images.float().mean((1, 2, 3))


def settings(folder, **evaluation):
    return small_policy.settings(
        output_dir=str(folder), steps=1, evaluation={"steps": 2, "every": 0, "num_images": 0, **evaluation}
    )


def made(folder, **evaluation) -> FlowGRPOTrainer:
    return FlowGRPOTrainer(small_policy.policy(), bright, settings(folder, **evaluation), small_policy.PROMPTS, HELD_OUT)


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_pipeline_at_another_size_is_one_that_was_loaded_for_it(name):
    """With packed latents and ids, and sigmas that depend on the size; the first one goes on at its own."""
    torch.manual_seed(0)
    pipe, tiny = awake(TINY[name].build()), TINY[name]
    policy, loaded = (Policy(pipe, height=h, width=w, **tiny.call) for h, w in (tiny.size, (48, 32)))
    before = generate_images(policy, ["a cat"], [0], 2)
    resized = policy.at_size(48, 32)
    assert not torch.equal(generate_images(resized, ["a cat"], [0], 2)[..., :32, :32], before[..., :32, :32])
    assert torch.equal(generate_images(resized, ["a cat"], [0], 2), generate_images(loaded, ["a cat"], [0], 2))
    assert torch.equal(generate_images(policy, ["a cat"], [0], 2), before)
    assert policy.at_size(None, tiny.size[1]) is policy


def test_an_encoder_that_sees_the_size_encodes_again(monkeypatch):
    policy, sizes = small_policy.policy(), []
    kind = type(policy.pipe)
    encode = kind.encode_prompt

    def with_size(self, *args, height=None, **kwargs):
        sizes.append(height)
        return encode(self, *args, **kwargs)

    shared = policy.at_size(16, 8)
    assert shared.encoder is policy.encoder
    monkeypatch.setattr(kind, "encode_prompt", with_size)
    assert policy.at_size(16, 8).encoder is not policy.encoder
    policy.at_size(16, 8).encode(["a new prompt"])
    assert sizes


def test_each_size_is_scored_under_its_own_name(tmp_path):
    trainer = made(tmp_path / "run", sizes=[[16, 8], [8, 16]])
    trainer.train()
    first, last = [row for row in read_metrics(tmp_path / "run") if "eval/reward" in row]
    for size in ("16x8", "8x16"):
        images = generate_images(
            small_policy.policy().at_size(*map(int, size.split("x"))),
            HELD_OUT.prompts,
            [image_seed(1234, place) for place in range(3)],
            2,
        )
        assert images.shape[-2:] == tuple(map(int, size.split("x")))
        assert first[f"eval/bright@{size}"] == pytest.approx(float(bright(images, []).mean()), abs=1e-6)
        assert last[f"monitor/diversity@{size}"] > 0
    kept = read_all(tmp_path / "run", layout.EVALUATION)[-1]
    assert len(kept["values"]["bright@16x8"]) == len(kept["sizes"]["16x8"]["high_frequency_power"]) == 3
    run = RunReader(tmp_path / "run")
    assert run.score_names == ["bright", "bright@16x8", "bright@8x16"]
    assert run.sizes == ["16x8", "8x16"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "held out at 16x8" in page
    assert "diversity @8x16" in page


def test_the_size_of_all_held_out_images_can_be_another_one(tmp_path):
    trainer = made(tmp_path / "run", height=16, num_images=2)
    evaluation = trainer.evaluate()
    assert evaluation.images[0].shape == (3, 16, 8)
    assert len(evaluation.diversity) == 3
    assert trainer.policy.call["height"] == 8
    assert trainer.args.evaluation_call_kwargs()["height"] == 16


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        ({"sizes": [[12, 7]]}, r"evaluation\.sizes: StableDiffusion3Pipeline can't generate 12 x 7 pixels: .*divisible"),
        ({"height": 64}, r"evaluation\.height and width: StableDiffusion3Pipeline can't generate 64 x 8 pixels"),
        ({"sizes": [[16, 8], [16, 8]]}, r"evaluation\.sizes has \[16, 8\] twice"),
    ],
)
def test_a_size_that_cant_be_drawn_is_refused_at_the_start(tmp_path, evaluation, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(tmp_path / "run", **evaluation)


def test_a_size_without_held_out_prompts_is_refused(tmp_path):
    args = settings(tmp_path, sizes=[[16, 8]])
    with pytest.raises(ValueError, match="no held-out prompts"):
        FlowGRPOTrainer(small_policy.policy(), bright, args, small_policy.PROMPTS)


def test_a_size_that_the_pipeline_rounds_is_refused(tmp_path):
    """FLUX draws what its latents can hold, with a warning alone."""
    torch.manual_seed(0)
    tiny = TINY["flux"]
    policy = Policy(awake(tiny.build()), height=32, width=48, **tiny.call)
    with pytest.raises(ValueError, match=r"generates 32 x 48 pixels, not 35 x 48: set that size"):
        check_evaluation_sizes(policy, settings(tmp_path, sizes=[[35, 48]]).evaluation)
    check_evaluation_sizes(policy, settings(tmp_path, sizes=[[48, 48]]).evaluation)


def written(step: int, reward: float, clip: float, small_clip: float, **more) -> dict:
    """An evaluation.json of 20 prompts whose rewards differ."""
    values = {"reward": reward, "ocr": reward, "clip": clip, "reward@8x8": reward, "ocr@8x8": reward, "clip@8x8": small_clip}
    spread = {name: [value + 0.01 * (i * 7 % 20) for i in range(20)] for name, value in values.items()}
    image_metrics = {"high_frequency_power": [0.1] * 20, "diversity": [0.2] * 16}
    return {"step": step, "trained": ["ocr"], "values": spread, **image_metrics, "sizes": {"8x8": image_metrics}, **more}


def test_the_monitor_compares_a_size_with_itself():
    evaluations = [written(0, 0.5, 0.8, 0.8), written(10, 0.9, 0.8, 0.5)]
    own, small = (hacking.read_history(evaluations, size) for size in ("", "8x8"))
    assert hacking.detect_drops(own) == {}
    assert list(own[0].untrained_rewards) == list(small[0].untrained_rewards) == ["clip"]
    assert list(hacking.detect_drops(small)) == ["clip"]
    assert "best/ holds the weights of step 10" in hacking.warnings(small, best=10)["clip"]
    assert hacking.metrics(small, "8x8").keys() == {"monitor/high_frequency_power@8x8", "monitor/diversity@8x8"}
    later = [{**evaluations[0], "sizes": {}}, *evaluations]
    assert len(hacking.read_history(later, "8x8")) == 2, "of a size that was added when the run was resumed"


def test_a_run_of_0_3_is_read_without_sizes_and_without_diversity():
    old = [written(0, 0.5, 0.8, 0.8), written(10, 0.9, 0.5, 0.8)]
    for one in old:
        del one["sizes"], one["diversity"]
        one["values"] = {name: values for name, values in one["values"].items() if "@" not in name}
    history = hacking.read_history(json.loads(json.dumps(old)))
    assert history[0].image_metrics[DIVERSITY] == []
    assert list(hacking.detect_drops(history)) == ["clip"]


def test_names_of_metrics_have_a_size_or_none():
    assert (metric_name("ocr@64x160"), metric_size("ocr@64x160")) == ("ocr", "64x160")
    assert (metric_name("my:fn@home"), metric_size("my:fn@home")) == ("my:fn@home", "")
