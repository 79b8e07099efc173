"""The pipeline as a velocity function: what it is called with, how rows share a call, and that nothing outside is touched."""

import inspect
import re
from unittest.mock import Mock

import diffusers
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.guiders import ClassifierFreeGuidance
from support.embedded import CALL, PROMPTS, tiny_policy
from support.families import TINY, awake

from flow_grpo import sampling
from flow_grpo.data.prompts import PromptSet
from flow_grpo.image_prompt import with_images
from flow_grpo.policy import pipeline
from flow_grpo.policy.encoding import ENCODE_BATCH, ENCODER_PREFIXES
from flow_grpo.policy.families import Family
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.interception import InterceptingScheduler
from flow_grpo.policy.policy import Policy
from flow_grpo.types import Schedule

LATENTS = torch.randn(3, 8, 8, 20, generator=torch.Generator().manual_seed(0))
MIDDLE = torch.tensor(500.0)
SIZE = {"height": 32, "width": 80, "max_sequence_length": 14}


@pytest.fixture(scope="module")
def shared() -> Policy:
    """The embedded model, for tests that leave it as it is."""
    return tiny_policy()


@pytest.fixture
def as_family(monkeypatch):
    """Makes the embedded model another family's."""

    def make(scale: float = 1.0, **particular) -> Policy:
        monkeypatch.setattr(pipeline, "family", lambda name: Family(**particular))
        return Policy(StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"]), guidance=scale, **SIZE)

    return make


def of_family(name: str) -> Policy:
    torch.manual_seed(0)
    height, width = TINY[name].size
    return Policy(awake(TINY[name].build()), height=height, width=width, **TINY[name].call)


def drawn(policy: Policy, latents: torch.Tensor, prompts: list[str], steps: int = 3) -> torch.Tensor:
    """The ODE from these latents, through our path."""
    schedule, _ = policy.schedule(steps)
    velocity = policy.velocity_fn(schedule, policy.encode(prompts), torch.arange(len(prompts)))
    return policy.decode(sampling.rollout(velocity, schedule, latents).final)


class Calls:
    """Notes the rows of each call of a policy's transformer, and of its encoders."""

    def __init__(self, policy: Policy) -> None:
        self.transformer: list[int] = []
        self.encoders: list[int] = []
        policy.pipe.transformer.register_forward_hook(lambda _, a, kwargs, out: self.note(kwargs), with_kwargs=True)
        encode = policy.pipe.encode_prompt
        policy.pipe.encode_prompt = lambda *a, **k: self.encoders.append(len(k["prompt"])) or encode(*a, **k)

    def note(self, kwargs: dict) -> None:
        self.transformer.append(len(kwargs["hidden_states"]))


# -- what it is called with -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_the_guidance_is_the_pipelines_own(guidance):
    pipe = StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"])
    policy = Policy(pipe, guidance=guidance, negative_prompt="ugly", **SIZE)
    encode, given = pipe.encode_prompt, []
    pipe.encode_prompt = lambda *a, **k: given.append((k["prompt"], k["negative_prompt"])) or encode(*a, **k)
    images = drawn(policy, LATENTS[:2], PROMPTS)
    assert all(negative == ["ugly"] * len(prompts) for prompts, negative in given), "some pipelines take no single one"
    pipe.set_progress_bar_config(disable=True)
    call = {**SIZE, "num_inference_steps": 3, "output_type": "pt", "negative_prompt": ["ugly"] * 2}
    expected = pipe(PROMPTS, latents=LATENTS[:2], guidance_scale=guidance, **call).images
    torch.testing.assert_close(images, expected, rtol=0, atol=2e-5)
    if guidance > 1:
        plain = pipe(PROMPTS, latents=LATENTS[:2], guidance_scale=1.0, **call).images
        assert (plain - expected).abs().max() > 1e-3


def test_without_a_word_there_is_no_guidance_and_no_offloading(shared):
    policy = Policy(shared.pipe)
    assert policy.call == {"guidance_scale": 1.0}
    assert policy.dtype == torch.float32
    assert not policy.encoder.offload


@pytest.mark.parametrize(("guidance", "value"), [(1.0, 0.0), (0.5, 0.0), (1.5, 1.5)])
def test_guidance_is_off_as_the_family_has_it(as_family, guidance, value):
    policy = as_family(guidance, guidance="guidance_scale", no_guidance_value=0.0)
    assert policy.call == {"guidance_scale": value, **SIZE}


def test_a_family_has_arguments_of_every_call_and_guiders_in_place_of_one(as_family):
    """Arguments that this version of the pipeline does not know are left out."""
    for guidance in (1.0, 1.5):
        policy = as_family(guidance, guidance="", guiders=("guider",), call_kwargs={"negative_prompt": " ", "no_such": 1})
        assert policy.call == {**({"negative_prompt": " "} if guidance > 1 else {}), **SIZE}
        guider = policy._intercepted.guider
        assert isinstance(guider, ClassifierFreeGuidance)
        assert guider.num_conditions == (1 if guidance == 1 else 2)
    assert guider.guidance_scale == 1.5


def test_what_can_not_be_called_so_is_refused():
    for wrong, words in (({"steps": 3}, "takes no argument steps"), ({"latents": 0}, "latents can't be set in pipeline")):
        with pytest.raises(ValueError, match=words):
            tiny_policy(**wrong)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            {"height": 31},
            None,
            "can't be called with guidance_scale=1.0, height=31, width=80, max_sequence_length=14: `height` and",
        ),
        ({}, TypeError("no such\nthing"), "max_sequence_length=14: TypeError: no such"),
    ],
)
def test_what_a_pipeline_can_not_be_called_with_is_said_in_its_own_words(monkeypatch, call, error, words):
    """A ValueError's words are for a user; of another error the kind helps."""
    policy = tiny_policy(**call)
    if error is not None:
        monkeypatch.setattr(policy.pipe.transformer, "forward", Mock(side_effect=error))
        monkeypatch.setattr(policy._intercepted, "prepare_latents", Mock(side_effect=error), raising=False)
    with pytest.raises(ValueError, match=re.escape(words)):
        policy.schedule(2)


def test_probe_images_are_a_multiple_of_the_calls_size_and_differ(shared):
    images = [image.open() for image in shared.probe_images(3)]
    assert [image.size for image in images] == [(160, 64)] * 3
    assert len({image.tobytes() for image in images}) == 3


def test_an_image_is_refused_by_a_pipeline_that_takes_none(shared):
    with pytest.raises(ValueError, match="takes no image"):
        shared.encode([with_images("a", shared.probe_images(1))])


def test_the_transformer_alone_is_frozen():
    pipe = StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"])
    pipe.transformer.train()
    pipe.vae.train()
    Policy(pipe)
    assert not pipe.transformer.training
    assert not any(parameter.requires_grad for parameter in pipe.transformer.parameters())
    assert pipe.vae.training
    assert all(parameter.requires_grad for parameter in pipe.vae.parameters())


def test_what_only_prompts_need_is_known_by_its_name():
    """What the constructors call it: an encoder of pictures stays."""
    named = {}
    for kind in ("StableDiffusion3Pipeline", "GlmImagePipeline"):
        components = inspect.signature(getattr(diffusers, kind)).parameters
        named[kind] = {name for name in components if name.startswith(ENCODER_PREFIXES)}
    assert named["StableDiffusion3Pipeline"] == {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert named["GlmImagePipeline"] == {"text_encoder", "vision_language_encoder"}


# -- prompts --------------------------------------------------------------------------------------------------------------


def test_prompts_are_encoded_in_passes_of_one_size(as_family):
    """All are padded to one length, so they share passes; where each needs a call of its own, or lengths differ, they do not."""
    prompts = [f"prompt {i}" for i in range(ENCODE_BATCH + 3)]
    for alone, expected in ((False, [ENCODE_BATCH] * 2), (True, [1] * len(prompts))):
        policy = as_family(encode_separately=alone)
        policy.schedule(2)
        calls = Calls(policy)
        policy.encode(prompts)
        assert calls.encoders == expected
        assert policy.encode([*prompts, *prompts]).prompt_index.tolist() == [*range(len(prompts))] * 2
        assert calls.encoders == expected, "they are kept"
    policy = as_family()
    policy.encode(prompts[:1])
    policy.encoder.pads_to_one_length = False  # as after encoding a short and a long prompt that became of different lengths
    calls = Calls(policy)
    policy.encode(prompts[1:4])
    assert calls.encoders == [1, 1, 1]


def test_whether_all_prompts_become_of_one_length_is_found_out(shared):
    shared.encode(PROMPTS)
    assert shared.encoder.pads_to_one_length
    uneven = of_family("z_image")
    uneven.encode(PROMPTS)
    assert not uneven.encoder.pads_to_one_length


def test_encoding_leaves_the_global_stream_and_keeps_no_graph(shared):
    """Some encoders sample."""
    policy = Policy(shared.pipe, **SIZE)
    encode = policy.pipe.encode_prompt
    try:
        policy.pipe.encode_prompt = lambda *a, **k: torch.rand(1) is None or encode(*a, **k)
        before = torch.random.get_rng_state()
        _, recording = policy.encode(PROMPTS).select(torch.arange(2))
        assert torch.equal(torch.random.get_rng_state(), before)
    finally:
        del policy.pipe.encode_prompt
    assert not any(isinstance(part, torch.Tensor) and part.requires_grad for _, output in recording for part in output)


def test_offloaded_encoders_come_to_the_device_for_each_encoding_and_leave_it(monkeypatch):
    for offload in (False, True):
        policy = Policy(StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"]), offload=offload, **SIZE)
        events, to, encode = [], torch.nn.Module.to, policy.pipe.encode_prompt
        encoders = (policy.pipe.text_encoder, policy.pipe.text_encoder_2, policy.pipe.text_encoder_3)

        def moved(self, where, events=events, to=to):
            events.append((self, str(where)))
            return to(self, where)

        monkeypatch.setattr(torch.nn.Module, "to", moved)
        policy.pipe.encode_prompt = lambda *a, encode=encode, events=events, **k: events.append("encode") or encode(*a, **k)
        trip = [(encoder, "cpu") for encoder in encoders] if offload else []
        policy.encode(PROMPTS[:1])
        assert events == [*trip, *["encode"] * 4, *trip, *trip, "encode", *trip], (
            "two probes, alone and twice, then the prompt"
        )
        events.clear()
        policy.diffusers_image(PROMPTS[0], 2, seed=0)
        assert events == [*trip, "encode", *trip]
        monkeypatch.undo()


# -- the velocity ---------------------------------------------------------------------------------------------------------


def test_rows_that_can_not_share_a_call_go_into_calls_filled_up_to_all_rows(as_family, shared):
    policy, rows = as_family(encode_separately=True), torch.tensor([0, 1, 0])
    calls = Calls(policy)
    conditioning = policy.encode(PROMPTS)
    calls.transformer.clear()
    with torch.no_grad():
        velocities = policy.velocity(LATENTS, MIDDLE, conditioning, rows)
        expected = shared.velocity(LATENTS, MIDDLE, shared.encode(PROMPTS), rows)
    assert calls.transformer == [3, 3], "with the shape of a call its last bits would change"
    torch.testing.assert_close(velocities, expected, rtol=0, atol=1e-4)
    assert policy.supports_per_sample_timesteps is None, "it was not asked"
    policy.synced_call_count = lambda calls: 4  # of another process, which needs more of them
    calls.transformer.clear()
    with torch.no_grad():
        assert torch.equal(policy.velocity(LATENTS, MIDDLE, conditioning, rows), velocities)
    assert calls.transformer == [3, 3, 3, 3]


@pytest.mark.parametrize("alone", [False, True])
def test_timesteps_that_can_not_share_a_call_go_into_calls_of_their_own(as_family, shared, alone):
    policy = as_family(encode_separately=alone)
    rows, timesteps = torch.tensor([0, 1, 0]), torch.tensor([900.0, 900.0, 300.0])
    policy.supports_per_sample_timesteps = False
    calls = Calls(policy)
    conditioning = policy.encode(PROMPTS)
    calls.transformer.clear()
    with torch.no_grad():
        velocities = policy.velocity(LATENTS, timesteps, conditioning, rows)
        assert calls.transformer == ([3, 3, 3] if alone else [3, 3])
        for i in range(3):
            one = shared.velocity(LATENTS[i : i + 1], timesteps[i], shared.encode(PROMPTS), rows[i : i + 1])
            torch.testing.assert_close(velocities[i : i + 1], one, rtol=0, atol=1e-5)


def test_a_pipeline_that_takes_timesteps_is_found_out_once(as_family):
    policy, with_graph = as_family(), []
    policy.pipe.transformer.register_forward_hook(lambda *_: with_graph.append(torch.is_grad_enabled()))
    conditioning = policy.encode(PROMPTS)
    # the two ends alone, both together, and what was asked; then that only
    for expected in ([False, False, False, True], [True]):
        with_graph.clear()
        policy.velocity(LATENTS[:2], torch.tensor([900.0, 300.0]), conditioning, torch.arange(2))
        assert with_graph == expected
    assert policy.supports_per_sample_timesteps is True


@pytest.mark.parametrize(("share", "takes"), [(0.01, True), (0.03, False), (None, False)])
def test_a_pipeline_takes_timesteps_if_each_row_is_within_a_fiftieth_of_what_it_is_alone(as_family, share, takes):
    """A transformer with a known answer: one number is off, or the call fails, where the rows have different timesteps."""
    policy, timesteps = as_family(), torch.tensor([800.0, 900.0])
    conditioning = policy.encode(PROMPTS)
    for sign, row in ((1, 0), (1, 1), (-1, 0), (-1, 1)):
        ramp = torch.linspace(0, sign, 8 * 8 * 20).reshape(8, 8, 20)

        def answer(_, args, kwargs, out, sign=sign, row=row, ramp=ramp):
            timestep = kwargs["timestep"]
            v = (850 - timestep).reshape(-1, 1, 1, 1) * ramp
            differ = (timestep != timestep[0]).any()
            if differ and share is None:
                raise RuntimeError("one timestep, please")
            if differ:
                v[row, 0, 0, 0] -= sign * share * 100  # the answers at 800 and at 900 are up to 100 apart, and opposite
            return (v,)

        policy.supports_per_sample_timesteps = None
        hook = policy.pipe.transformer.register_forward_hook(answer, with_kwargs=True)
        v = policy.velocity(LATENTS[:2], timesteps, conditioning, torch.arange(2))
        hook.remove()
        assert policy.supports_per_sample_timesteps is takes
        if not takes:
            torch.testing.assert_close(v, (850 - timesteps).reshape(-1, 1, 1, 1) * ramp)


def test_a_velocity_leaves_the_global_stream_and_the_next_noise_is_the_pipelines_own(as_family, capsys):
    policy, before = as_family(), torch.random.get_rng_state()
    start = policy.initial_latents(PROMPTS, seed=3)
    policy.velocity(LATENTS[:2], MIDDLE, policy.encode(PROMPTS), torch.arange(2))
    policy.decode(LATENTS[:1])
    policy.schedule(3)
    assert not "".join(capsys.readouterr()), "no progress bar of the pipeline"
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(policy.initial_latents(PROMPTS, seed=3), start)
    assert not torch.equal(policy.initial_latents(PROMPTS, seed=4), start)
    assert torch.equal(start, torch.randn(2, 8, 8, 20, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("name", ["flux", "flux2_klein", "ernie"])
def test_states_of_any_shape_are_given_to_the_pipeline(name):
    """Packed states with ids beside them, `prepare_latents` by keywords, and a pipeline without that method."""
    policy = of_family(name)
    (schedule, shape), rows = policy.schedule(3), torch.arange(2)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    conditioning = policy.encode(["a red cat", "a big dog"])
    with torch.no_grad():
        v = policy.velocity(x, schedule.timesteps[1], conditioning, rows)
        assert v.shape == x.shape
        alone = [policy.velocity(x[i : i + 1], schedule.timesteps[1], conditioning, rows[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(v, torch.cat(alone), rtol=0, atol=1e-5)
    assert (policy.velocity(2 * x, schedule.timesteps[1], conditioning, rows) - v).abs().max() > 1e-4
    assert not torch.equal(policy.initial_latents(["a red cat", "a big dog"], seed=1), x)


# -- pictures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_pipelines_own_call_gives_the_policys_image(dtype, capsys):
    """Also from a folder that names another solver of the same flow; the policy's path leads to the same picture."""
    policy = tiny_policy(dtype)
    policy.add_lora(2, 4, ["to_q"], seed=0)
    image = policy.diffusers_image(PROMPTS[0], 3, seed=5)
    assert (image.dtype, image.requires_grad, image.device.type) == (torch.float32, False, "cpu")
    assert capsys.readouterr().err == "", "no progress bar"
    if dtype == "bf16":
        return
    torch.testing.assert_close(
        drawn(policy, policy.initial_latents(PROMPTS[:1], seed=5), PROMPTS[:1]), image, rtol=0, atol=2e-5
    )
    generator = torch.Generator().manual_seed(5)
    plain = policy.pipe([PROMPTS[0]], num_inference_steps=3, generator=generator, output_type="pt", **CALL).images
    torch.testing.assert_close(image, plain, rtol=0, atol=1e-6)
    capsys.readouterr()
    other = StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"])
    other.scheduler = FlowMatchHeunDiscreteScheduler.from_config(other.scheduler.config)
    torch.testing.assert_close(Policy(other, **CALL).diffusers_image(PROMPTS[0], 3, seed=5), image, rtol=0, atol=1e-6)


def test_an_image_is_drawn_by_the_guider_of_the_policy():
    policy = of_family("hunyuan_image")
    images = []
    policy._intercepted.guider = policy._intercepted.ocr_guider = mark = ClassifierFreeGuidance(2.0)
    kind = type(policy.pipe)
    call = kind.__call__
    try:
        kind.__call__ = lambda self, **more: images.append((self.guider, self.ocr_guider)) or (torch.zeros(1, 3, 8, 8),)
        policy.diffusers_image("a red cat", 2, seed=0)
    finally:
        kind.__call__ = call
    assert images == [(mark, mark)]


def test_images_are_float32_between_0_and_1_without_gradients(monkeypatch):
    policy = tiny_policy("bf16")
    process = policy.pipe.image_processor.postprocess
    monkeypatch.setattr(policy.pipe.image_processor, "postprocess", lambda *a, **k: 3 * process(*a, **k) - 1)
    assert policy.velocity(LATENTS[:2], MIDDLE, policy.encode(PROMPTS), torch.arange(2)).dtype == torch.float32
    own = policy.diffusers_image(PROMPTS[0], 2, seed=0)
    for images in (policy.decode(3 * LATENTS), own):
        assert images.dtype == torch.float32
        assert not images.requires_grad
        assert (float(images.min()), float(images.max())) == (0, 1)
        assert ((images > 0) & (images < 1)).any()


def test_images_do_not_depend_on_the_micro_batch_of_decoding(shared):
    torch.testing.assert_close(shared.decode(LATENTS, 2), shared.decode(LATENTS), rtol=0, atol=1e-5)


def test_the_latents_of_an_image_are_its_vaes_shifted_and_scaled(shared):
    images = torch.rand(3, 3, 32, 80, generator=torch.Generator().manual_seed(0))
    vae = shared.pipe.vae
    z = vae.encode(2 * images - 1).latent_dist.mode()
    assert vae.config.shift_factor
    latents = shared.encode_images(images, 2)
    torch.testing.assert_close(latents, (z - vae.config.shift_factor) * vae.config.scaling_factor, rtol=0, atol=1e-5)
    assert (latents.dtype, latents.requires_grad) == (torch.float32, False)
    assert tiny_policy("bf16").encode_images(images).dtype == torch.float32
    with pytest.raises(ValueError, match=r"given images of \(16, 40\) pixels: they become latents of shape \(8, 4, 10\)"):
        shared.encode_images(images[..., :16, :40])


def test_latents_by_mean_and_deviation_are_those_that_the_vae_gets_back(monkeypatch):
    policy = of_family("glm_image")
    images = torch.rand(2, 3, *TINY["glm_image"].size, generator=torch.Generator().manual_seed(0))
    vae, received = policy.pipe.vae, []
    decode, latents = vae.decode, policy.encode_images(images)
    monkeypatch.setattr(vae, "decode", lambda z, **more: (received.append(z), decode(z, **more))[1])
    policy.decode(latents)
    torch.testing.assert_close(received[0], vae.encode(2 * images - 1).latent_dist.mode(), rtol=0, atol=1e-5)


def test_images_are_refused_where_a_pipeline_scales_latents_otherwise():
    """This one leaves a VAE's shift out, so its states would be off by it."""
    policy = of_family("cogview4")
    assert policy.pipe.vae.config.shift_factor
    images = torch.rand(1, 3, *TINY["cogview4"].size, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError, match="CogView4Pipeline can't be trained on given images: it scales its latents in a way"
    ):
        policy.encode_images(images)
    assert "decode" not in vars(policy.pipe.vae)
    policy.pipe.vae.register_to_config(shift_factor=0.0)
    assert policy.encode_images(images).shape[1:] == policy.schedule(2)[1]


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_is_no_sentence_on_given_images(shared, monkeypatch):
    """A run then halves its micro-batch."""
    monkeypatch.setattr(shared.pipe.vae, "encode", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        shared.encode_images(torch.rand(1, 3, 32, 80))


def test_memory_that_runs_out_in_a_probe_is_no_answer(monkeypatch):
    policy, passes = tiny_policy(), []
    schedule, shape = policy.schedule(2)
    conditioning, forward = policy.encode(PROMPTS[:2]), policy.pipe.transformer.forward

    def fails_in_the_third_pass(*args, **kwargs):
        passes.append(1)
        return no_memory() if len(passes) == 3 else forward(*args, **kwargs)

    monkeypatch.setattr(policy.pipe.transformer, "forward", fails_in_the_third_pass)
    ask = (torch.zeros(2, *shape), schedule.timesteps, conditioning, torch.arange(2))
    with pytest.raises(torch.OutOfMemoryError):
        policy.accepts_per_sample_timesteps(*ask)
    assert policy.accepts_per_sample_timesteps(*ask), "asked again"


def test_packed_latents_are_packed_by_the_pipeline():
    """And a VAE without a shift has none."""
    policy = of_family("flux")
    policy.pipe.vae.register_to_config(shift_factor=0.0)
    images = torch.rand(2, 3, *TINY["flux"].size, generator=torch.Generator().manual_seed(0))
    _, shape = policy.schedule(2)
    latents = policy.encode_images(images)
    assert latents.shape == (2, *shape)
    with torch.no_grad():
        z = policy.pipe.vae.encode(2 * images - 1).latent_dist.mode() * policy.pipe.vae.config.scaling_factor
    torch.testing.assert_close(policy.pipe._unpack_latents(latents, *TINY["flux"].size, policy.pipe.vae_scale_factor), z)


def test_a_pipeline_whose_state_is_no_latent_of_its_vae_says_so(shared):
    policy = Policy(shared.pipe, **SIZE)
    policy.pipe.vae, vae = torch.nn.Identity(), policy.pipe.vae
    try:
        with pytest.raises(ValueError, match="StableDiffusion3Pipeline can't be trained on given images"):
            policy.encode_images(torch.rand(1, 3, 32, 80))
    finally:
        policy.pipe.vae = vae


def test_a_prompt_is_drawn_the_same_in_any_company(shared):
    batch = PromptSet(PROMPTS, [{}] * 2).repeat(1)
    start = sampling.batch_noise((8, 8, 20), batch, 0, "start")
    both, alone = drawn(shared, start, PROMPTS), drawn(shared, start[1:], PROMPTS[1:])
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"shift": 3.0}, {"num_inference_steps": 5}),
        ({"shift": 3.0, "invert_sigmas": True, "num_train_timesteps": 1}, {"sigmas": [1.0, 0.6, 0.2]}),
        ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, {"sigmas": [1.0, 0.6, 0.2], "mu": 0.7}),
        ({"use_dynamic_shifting": True, "shift_terminal": 0.02}, {"sigmas": [1.0, 0.75, 0.5, 0.25], "mu": 0.5}),
        ({"shift": 3.0, "use_karras_sigmas": True}, {"num_inference_steps": 5}),
        ({"shift": 3.0, "use_exponential_sigmas": True}, {"num_inference_steps": 5}),
        ({"shift": 3.0, "use_beta_sigmas": True}, {"num_inference_steps": 5}),
        ({"shift": 3.0}, {"num_inference_steps": 1}),
    ],
)
def test_the_shift_of_noise_levels_has_the_samplers_own_steps_under_each_option_of_diffusers(options, call):
    scheduler = InterceptingScheduler(**options)
    scheduler.set_timesteps(**call)
    table = scheduler.shift_table()
    sigmas = 1 - scheduler.sigmas if options.get("invert_sigmas") else scheduler.sigmas
    timesteps, shifted = Schedule(scheduler.timesteps, sigmas, table).at(torch.from_numpy(scheduler._given[0]).float())
    torch.testing.assert_close(shifted, sigmas[:-1], rtol=0, atol=2e-5)
    torch.testing.assert_close(timesteps, scheduler.timesteps, rtol=0, atol=2e-5 * scheduler.config.num_train_timesteps)
    assert (table[:, 0].diff() < 0).all()
    assert (table[:, 2].diff() <= 0).all()
    assert (float(table[-1, 0]), float(table[-1, 2])) == (0, 0)
