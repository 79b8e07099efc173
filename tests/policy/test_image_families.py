"""The contract for pipelines whose prompts carry images: each row is the pipeline's own call with its own images."""

import functools
import inspect
from unittest.mock import Mock

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from support.embedded import stir
from support.image_families import IMAGE_TINY, SEVERAL, picture, small_pictures

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.data.prompts import PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.doctor.groups import reads_last_word
from flow_grpo.doctor.model import check_model
from flow_grpo.doctor.result import OK
from flow_grpo.image_prompt import ImagePrompt
from flow_grpo.policy import policy as policy_module
from flow_grpo.policy.interception import check_flow, images_to_tensor
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.types import StochasticSteps

RED, DOG = ImagePrompt("a red cat", [picture(1)]), ImagePrompt("a big dog", [picture(2)])
WIDE = ImagePrompt("a red cat", [picture(3, size=(64, 128))])
TALL = ImagePrompt("a red cat", [picture(3, size=(128, 64))])  # its tensors have the shapes of the wide one's
ROWS = torch.arange(2)
STEPS = 2
# What a family repeats of the others is tried with two kinds of states.
TWO = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("flux_kontext", "qwen_edit"))) for name in IMAGE_TINY]


@pytest.fixture(autouse=True)
def _small_pictures():
    with small_pictures():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoint of a family, built when it is first asked for."""
    made = {}

    def folder(name: str):
        if name not in made:
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp(name)
            IMAGE_TINY[name].build().save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def unchanged(folders):
    """A family's policy, for all tests that leave it as it is: what one encodes, the others need not."""
    return functools.cache(functools.partial(loaded, folders))


def loaded(folders, name: str, **more) -> Policy:
    tiny = IMAGE_TINY[name]
    size = {"height": tiny.size[0], "width": tiny.size[1]}
    return load_policy(str(folders(name)), "cpu", "fp32", **{**size, **tiny.call, **more})


def noise(policy: Policy, rows: int = 2) -> torch.Tensor:
    _, shape = policy.schedule(STEPS)
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0))


def velocity(policy: Policy, state: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    schedule, _ = policy.schedule(STEPS)
    with torch.no_grad():
        return policy.velocity(state, schedule.timesteps[1], policy.encode(prompts), torch.arange(len(prompts)))


def ours(policy: Policy, state: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    schedule, _ = policy.schedule(STEPS)
    velocity = policy.velocity_fn(schedule, policy.encode(prompts), torch.arange(len(prompts)))
    return policy.decode(sampling.rollout(velocity, schedule, state).final)


def plain(pipe: DiffusionPipeline, name: str, policy: Policy, state: torch.Tensor, prompt: ImagePrompt) -> torch.Tensor:
    """What a user's own call of the pipeline draws from the same noise."""
    pipe.set_progress_bar_config(disable=True)
    images = [image.open() for image in prompt.images]
    call = {**policy.call, "latents": state.clone(), "image": images if len(images) > 1 else images[0]}
    if name.startswith("flux2"):  # they take unpacked latents
        height, width = (side // 4 for side in IMAGE_TINY[name].size)
        call["latents"] = state.transpose(1, 2).unflatten(2, (height, width))
    if name == "flux_kontext":
        call["max_area"] = call["height"] * call["width"]
    out = pipe(prompt=str(prompt), num_inference_steps=STEPS, output_type="pt", **call)
    return images_to_tensor(out[0]).float().clamp(0, 1)


@pytest.mark.parametrize("name", IMAGE_TINY)
def test_noise_0_is_the_pipelines_own_call_with_the_image(folders, name):
    """With guidance; without it a saved LoRA is compared below."""
    policy = loaded(folders, name, guidance=3.0)
    pipe, state = DiffusionPipeline.from_pretrained(folders(name)), noise(policy)
    expected = torch.cat([plain(pipe, name, policy, state[i : i + 1], prompt) for i, prompt in enumerate((RED, DOG))])
    torch.testing.assert_close(ours(policy, state, [RED, DOG]), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", IMAGE_TINY)
def test_rows_of_a_batch_get_their_own_images(unchanged, name):
    """One text, so that the image is all that differs; a later batch must not get the images of the first."""
    policy = unchanged(name)
    prompts = [ImagePrompt("a red cat", [picture(seed)]) for seed in (1, 2)]
    state = noise(policy, 1).expand(5, *noise(policy).shape[1:])
    alone = [velocity(policy, state[:1], [prompt]) for prompt in (*prompts, WIDE, TALL)]
    assert (alone[0] - alone[1]).abs().max() > 1e-3, "the image makes a difference"
    mixed = velocity(policy, state, [prompts[1], WIDE, TALL, prompts[0], prompts[1]])
    expected = torch.cat([alone[1], alone[2], alone[3], alone[0], alone[1]])
    torch.testing.assert_close(mixed, expected, rtol=0, atol=2e-5)
    assert policy.supports_images_per_row


def test_a_pipeline_that_reads_images_past_the_recording_gets_a_call_for_each_prompt(folders):
    """As one would whose `prepare_latents` is called by another name: all rows would have the first row's image."""
    policy, trusting = loaded(folders, "flux_kontext"), loaded(folders, "flux_kontext")
    policy.encoder._image_methods = trusting.encoder._image_methods = []
    trusting.supports_images_per_row = True
    state, prompts = noise(policy), [RED, ImagePrompt("a red cat", [picture(2)])]
    expected = velocity(loaded(folders, "flux_kontext"), state, prompts)
    assert (velocity(trusting, state, prompts)[1] - expected[1]).abs().max() > 1e-3
    torch.testing.assert_close(velocity(policy, state, prompts), expected, rtol=0, atol=2e-5)
    assert policy.supports_images_per_row is False


def test_rows_with_other_images_and_other_timesteps_share_a_call(unchanged):
    policy = unchanged("flux_kontext")
    state, prompts = noise(policy), [RED, ImagePrompt("a red cat", [picture(2)])]
    timesteps = policy.schedule(STEPS)[0].timesteps[:2]
    with torch.no_grad():
        both = policy.velocity(state, timesteps, policy.encode(prompts), ROWS)
        assert policy.supports_images_per_row, "that was found out at one timestep"
        assert policy.supports_per_sample_timesteps
        for i in ROWS:
            alone = policy.velocity(state[i : i + 1], timesteps[i], policy.encode(prompts), ROWS[i : i + 1])
            torch.testing.assert_close(both[i : i + 1], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("error", [None, ValueError, RuntimeError, TypeError])
def test_whether_images_share_a_call_is_tried_while_all_sharded_processes_are_alike(folders, monkeypatch, error):
    """Nothing is sharded here. A model that was trained on texts may fail at an image, in its own way."""
    policy = loaded(folders, "flux_kontext")
    monkeypatch.setattr(policy_module, "fully_shard_blocks", lambda *_: None)
    if error is not None:
        monkeypatch.setattr(policy, "encode", Mock(side_effect=[policy.encode([RED] * 2), policy.encode([RED]), error]))
    policy.shard(Processes())
    assert policy.supports_images_per_row is (error is None)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_images_and_their_order_count(folders, unchanged, name):
    policy = unchanged(name)
    both, swapped = (ImagePrompt("a red cat", [picture(a), picture(b)]) for a, b in ((1, 2), (2, 1)))
    state = noise(policy, 1).expand(3, *noise(policy).shape[1:])
    v = velocity(policy, state, [both, swapped, RED])
    assert min((v[0] - v[1]).abs().max(), (v[0] - v[2]).abs().max()) > 1e-4
    expected = plain(DiffusionPipeline.from_pretrained(folders(name)), name, policy, state[:1], both)
    torch.testing.assert_close(ours(policy, state[:1], [both]), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", IMAGE_TINY)
def test_stored_steps_replay_to_a_ratio_of_exactly_1_with_gradients(folders, name):
    policy = loaded(folders, name)
    policy.add_lora(2, 4, None, seed=0)
    stir(policy)
    schedule, _ = policy.schedule(3)
    velocity = policy.velocity_fn(schedule, policy.encode([RED, DOG, WIDE]), torch.arange(3))
    start = noise(policy, 3)
    stochastic = StochasticSteps([0, 1], "cps", noise_level=0.7)
    trajectory = sampling.rollout(velocity, schedule, start, stochastic=stochastic, noise=lambda i: start.flip(0))
    rows = torch.arange(3)
    for k in range(2):
        log_prob = sampling.replay(velocity, trajectory, k, rows).log_prob
        assert torch.equal(log_prob, trajectory.log_prob[rows, k])
    log_prob.sum().backward()
    received = [p.grad is not None and bool(p.grad.any()) for p in policy.trainable_parameters().values()]
    assert sum(received) > 0.8 * len(received)


@pytest.mark.parametrize("name", IMAGE_TINY)
def test_a_saved_lora_draws_the_same_edit(folders, name, tmp_path):
    policy = loaded(folders, name)
    state = noise(policy)
    base = ours(policy, state, [RED, DOG])
    policy.add_lora(2, 4, None, seed=0)
    stir(policy)
    expected = ours(policy, state, [RED, DOG])
    policy.save(tmp_path)
    pipe = DiffusionPipeline.from_pretrained(folders(name))
    pipe.load_lora_weights(str(tmp_path))
    own = torch.cat([plain(pipe, name, policy, state[i : i + 1], prompt) for i, prompt in enumerate((RED, DOG))])
    torch.testing.assert_close(own, expected, rtol=0, atol=2e-4)
    assert (expected - base).abs().max() > 1e-3


@pytest.mark.parametrize("name", IMAGE_TINY)
def test_recordings_on_disk_are_those_of_the_image(folders, name, tmp_path):
    memory, same_text = MemoryConfig(embedding_cache_dir=str(tmp_path)), ImagePrompt("a red cat", [picture(2)])
    prompts = [RED, same_text, WIDE]
    first = loaded(folders, name, memory=memory)
    state = noise(first, 1).expand(3, *noise(first).shape[1:])
    expected = velocity(first, state, prompts)
    again = loaded(folders, name, memory=memory, prompts=prompts)
    assert again.pipe.text_encoder is None, "all that it encodes is on disk"
    assert torch.equal(velocity(again, state, prompts), expected)
    assert (
        loaded(folders, name, memory=memory, prompts=[ImagePrompt("a red cat", [picture(4)])]).pipe.text_encoder is not None
    )


def brighter_than_source(images: torch.Tensor, prompts: list[str], source: torch.Tensor) -> torch.Tensor:
    assert source.shape == images.shape
    return (images - source).flatten(1).mean(1)


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("method", ["grpo", "awm"])
def test_two_training_steps_have_a_ratio_of_1_finite_losses_and_gradients(folders, name, method, tmp_path):
    sampled = {"steps": 3, "transition": "cps"} if method == "grpo" else {"steps": 3}
    args = FlowGRPOConfig(
        steps=2,
        prompts_per_step=2,
        images_per_prompt=2,
        microbatch=2,
        objective={"name": method},
        sampling=sampled,
        lora={"rank": 2, "alpha": 4},
        output_dir=str(tmp_path),
    )
    prompts = PromptSet([RED, DOG], [{}, {}])
    trainer = FlowGRPOTrainer(loaded(folders, name), [brighter_than_source], args, prompts)
    for _ in range(2):
        metrics = trainer.training_step()
        assert metrics.get("ratio/first_update_max_deviation", 0) == 0
        assert torch.isfinite(torch.tensor(metrics["loss"]))
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", TWO)
def test_doctor_says_that_it_can_be_trained(folders, name):
    results = list(check_model(loaded(folders, name)))
    assert "Prompts of a batch get their own images, and images change the result" in [result.name for result in results]
    assert all(result.status == OK for result in results), [result for result in results if result.status != OK]


def test_doctor_finds_a_pipeline_that_gives_all_rows_the_first_image(folders):
    policy = loaded(folders, "flux_kontext")
    policy.encoder._image_methods, policy.supports_images_per_row = [], True
    wrong = [result.name for result in check_model(policy) if result.status != OK]
    assert wrong == ["Prompts of a batch get their own images, and images change the result"]


def refused(folders, name: str, prompts: list[str], **more) -> str:
    policy = loaded(folders, name, **more)
    try:
        policy.encode(prompts)
    except ValueError as error:
        return str(error)
    return "it was not refused"


def test_what_a_pipeline_cannot_take_is_refused_in_a_sentence(folders, tmp_path):
    assert "takes 1 images to a prompt" in refused(folders, "flux_kontext", [ImagePrompt("a", [picture(1), picture(2)])])
    assert "give prompts a column `image`" in refused(folders, "qwen_edit", ["a red cat"])
    assert "set height and width" in refused(folders, "flux2", [RED], height=None)
    text_only = load_policy("tiny", "cpu", "fp32")
    with pytest.raises(ValueError, match="takes no images, and the prompt 'a red cat' has 1"):
        text_only.encode([RED])
    with_sound = diffusers.LTX2Pipeline.__new__(diffusers.LTX2Pipeline)
    object.__setattr__(with_sound, "scheduler", diffusers.FlowMatchEulerDiscreteScheduler())
    object.__setattr__(with_sound, "transformer", None)
    parameters = inspect.signature(inspect.unwrap(diffusers.LTX2Pipeline.__call__)).parameters
    with pytest.raises(ValueError, match="LTX2Pipeline also denoises audio latents, which is not supported"):
        check_flow(with_sound, parameters)
    tall = ImagePrompt("a", [picture(1, size=(640, 16))])
    assert "Flux2Pipeline can't take the images, 16 x 640 pixels" in refused(folders, "flux2", [tall])


@pytest.mark.parametrize("name", ["qwen_edit", "qwen_edit_plus"])
def test_a_pipeline_that_needs_an_image_is_checked_for_truncation(folders, name):
    policy = loaded(folders, name)
    assert reads_last_word(policy, ImagePrompt("a red cat", [picture(1)]))
