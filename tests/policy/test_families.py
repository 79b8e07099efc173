"""The contract, for every family of pipelines: the pipeline is the model, and its LoRA goes where people use LoRAs."""

import functools
import logging
import math

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.guiders import ClassifierFreeGuidance
from peft import PeftModel
from scipy import stats
from support.embedded import stir
from support.families import TINY, Tiny, awake
from support.sample_rewards import brightness

from flow_grpo import sampling
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective_by_name import section_type
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.data.prompts import PromptSet
from flow_grpo.doctor.model import check_model
from flow_grpo.doctor.result import OK
from flow_grpo.policy.encoding import EmbeddingCache
from flow_grpo.policy.hub import WEIGHTS, expert_weights
from flow_grpo.policy.interception import InterceptingScheduler
from flow_grpo.policy.loading import load_policy, save_merged
from flow_grpo.policy.policy import Policy
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.forward_process_loss import draw_noise_level
from flow_grpo.types import Schedule, StochasticSteps

PROMPTS = ["a red cat", "a big dog"]  # of one length, so that pipelines encode both in one batch without padding
ROWS = torch.arange(2)
STEPS = 2  # the first and the last: of a pipeline with two experts, each computes one
# The guided call of a pipeline has the unguided one in it. Where diffusers' guidance fails for two prompts, there is only that one.
GUIDANCES = [
    pytest.param(name, guidance, marks=[pytest.mark.slow] * (guidance == 1 and tiny.guidance is not None))
    for name, tiny in TINY.items()
    for guidance in (1.0, 3.0)
    if guidance == 1 or tiny.guidance is not None
]
# A trainer's step is made of what other tests prove for every family: here are three kinds of states, and two experts.
TRAINED = ("sd3", "flux", "wan22")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoint of a family, built when it is first asked for."""
    made = {}

    def folder(name: str):
        if name not in made:
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp(name)
            awake(TINY[name].build()).save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def unchanged(folders):
    """A family's policy, for all tests that leave it as it is: what one encodes, the others need not."""
    return functools.cache(functools.partial(loaded, folders))


def loaded(folders, name: str, guidance: float = 1.0, dtype: str = "fp32") -> Policy:
    """A new policy. What another one of these settings has encoded is read from disk."""
    tiny, folder = TINY[name], folders(name)
    size = {"height": tiny.size[0], "width": tiny.size[1]}
    known = folder.with_name("embeddings") / name
    if tiny.attributes:
        cache = EmbeddingCache(known, guidance)
        return Policy(from_folder(folder, tiny), guidance=guidance, embedding_cache=cache, **size, **tiny.call)
    memory = MemoryConfig(embedding_cache_dir=str(known))
    return load_policy(str(folder), "cpu", dtype, guidance=guidance, memory=memory, **size, **tiny.call)


def from_folder(folder, tiny: Tiny) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(folder)
    for attribute, value in tiny.attributes.items():
        setattr(pipe, attribute, value)
    return pipe


def noise(policy: Policy, seed: int = 0) -> torch.Tensor:
    _, shape = policy.schedule(STEPS)
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


def plain(pipe: DiffusionPipeline, name: str, policy: Policy, state: torch.Tensor, guidance: float = 1.0) -> torch.Tensor:
    """What a user's own call of the pipeline draws from the same noise."""
    pipe.set_progress_bar_config(disable=True)
    call = {**policy.call, "latents": state.clone()}
    if name.startswith("flux2"):  # they take unpacked latents
        height, width = (side // 4 for side in TINY[name].size)
        call["latents"] = state.transpose(1, 2).unflatten(2, (height, width))
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * 2
    if name.startswith("wan"):  # its own solver is of order 2; ours takes Euler's steps
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=pipe.scheduler.config.flow_shift)
    if name == "hunyuan_image":
        pipe.guider = ClassifierFreeGuidance(guidance) if guidance > 1 else None
    out = pipe(prompt=list(PROMPTS), num_inference_steps=STEPS, output_type="pt", **call)
    return out[0].float()


def ours(policy: Policy, state: torch.Tensor) -> torch.Tensor:
    schedule, _ = policy.schedule(STEPS)
    velocity = policy.velocity_fn(schedule, policy.encode(PROMPTS), ROWS)
    return policy.decode(sampling.rollout(velocity, schedule, state).final)


@pytest.mark.parametrize(("name", "guidance"), GUIDANCES)
def test_noise_0_is_the_pipelines_own_call(folders, unchanged, name, guidance):
    policy = unchanged(name, guidance)
    state = noise(policy)
    expected = plain(from_folder(folders(name), TINY[name]), name, policy, state, guidance)
    torch.testing.assert_close(ours(policy, state), expected.clamp(0, 1), rtol=0, atol=2e-4)
    assert (expected[0] - expected[1]).abs().max() > 1e-3, "the prompts and their noise make a difference"
    schedule, _ = policy.schedule(4)
    assert schedule.sigmas.diff().max() < 0, "shares of noise, also of a pipeline that counts from noise to image"
    assert 0.99 < schedule.sigmas[0] <= 1
    assert schedule.sigmas[-1] == 0
    for solver in sampling.SOLVERS.values():
        assert sampling.rollout(lambda x, i: x, schedule, state, solver=solver).final.isfinite().all()


@pytest.mark.parametrize("name", ["qwen_image", "hunyuan_image", "sd3"])
def test_calls_without_guidance_log_nothing(unchanged, name, monkeypatch, caplog):
    """A program has its own settings of the libraries' logs, and a run makes thousands of calls."""
    caplog.set_level(logging.WARNING, "diffusers")
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    policy = unchanged(name, 1.0)
    ours(policy, noise(policy))
    assert not caplog.messages


def shifted(level: torch.Tensor, scheduler: InterceptingScheduler, mu: float | None) -> torch.Tensor:
    """The sigma of a noise level before the shift (arXiv 2403.03206 and Black Forest Labs' for resolutions), by hand."""
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return config.shift * level / (1 + (config.shift - 1) * level)
    factor = math.exp(mu) if config.time_shift_type == "exponential" else mu
    return factor / (factor + 1 / level - 1)


@pytest.mark.parametrize("name", TINY)
def test_noise_levels_are_uniform_before_the_schedulers_own_shift(unchanged, name):
    """Each draw is the straight schedule's, shifted; and the sampler's own steps are what their levels become."""
    policy = unchanged(name, 1.0 if TINY[name].guidance is None else 3.0)
    schedule, _ = policy.schedule(5)
    scheduler = policy._scheduler
    assert scheduler._given is not None
    levels, given_timesteps = scheduler._given
    timesteps, sigmas = schedule.at(torch.from_numpy(levels).float())
    torch.testing.assert_close(sigmas, schedule.sigmas[:-1], rtol=0, atol=2e-5)
    torch.testing.assert_close(timesteps, schedule.timesteps, rtol=1e-4, atol=2e-5)

    objective = section_type("sft")(name="sft", sigma_range=(0.4, 1.0))
    batch = PromptSet(["a"] * 200, [{}] * 200).repeat(1)
    straight = Schedule(torch.linspace(1, 0, 6)[:-1], torch.linspace(1, 0, 6))
    drawn, plain = (draw_noise_level(batch, one, (1,), objective, seed=0, step=0, draw=0) for one in (schedule, straight))
    assert stats.kstest(plain.sigma, stats.uniform(0.4, 0.6).cdf).pvalue > 0.01
    expected = shifted(plain.sigma, scheduler, scheduler._mu)
    if scheduler.config.shift_terminal:
        last = shifted(torch.tensor(0.2), scheduler, scheduler._mu)
        expected = 1 - (1 - expected) * (1 - scheduler.config.shift_terminal) / (1 - last)
    torch.testing.assert_close(drawn.sigma, expected, rtol=0, atol=2e-5)
    of_model = plain.sigma if given_timesteps is not None else 1 - drawn.sigma if name == "omnigen" else drawn.sigma
    torch.testing.assert_close(drawn.timestep, scheduler.config.num_train_timesteps * of_model, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", TINY)
def test_stored_steps_replay_to_a_ratio_of_exactly_1_with_gradients(folders, name):
    policy = loaded(folders, name)
    policy.add_lora(2, 4, None, seed=0)
    stir(policy)
    schedule, shape = policy.schedule(3)
    prompts = [PROMPTS[0], PROMPTS[1], "a very long prompt about a dog"]
    velocity = policy.velocity_fn(schedule, policy.encode(prompts), torch.arange(3))
    start, step = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    stochastic = StochasticSteps([0, 1], "cps", noise_level=0.7)
    trajectory = sampling.rollout(velocity, schedule, start, stochastic=stochastic, noise=lambda i: step)
    rows = torch.arange(3)
    for k in range(2):  # of a pipeline with two experts, one computes each of them
        log_prob = sampling.replay(velocity, trajectory, k, rows).log_prob
        assert torch.equal(log_prob, trajectory.log_prob[rows, k])
        log_prob.sum().backward()
    silent = [n for n, p in policy.trainable_parameters().items() if p.grad is None or not p.grad.any()]
    assert not [n for n in silent if not any(dead in n for dead in TINY[name].dead)]


@pytest.mark.parametrize(("name", "guidance"), GUIDANCES)
def test_a_timestep_per_sample_equals_one_call_each(unchanged, name, guidance):
    policy = unchanged(name, guidance)
    schedule, _ = policy.schedule(4)
    x, conditioning = noise(policy), policy.encode(PROMPTS)
    timesteps = schedule.timesteps[[1, 3]]
    with torch.no_grad():
        both = policy.velocity(x, timesteps, conditioning, ROWS)
        for i in range(2):
            alone = policy.velocity(x[i : i + 1], timesteps[i], conditioning, ROWS[i : i + 1])
            torch.testing.assert_close(both[i : i + 1], alone, rtol=0, atol=2e-5 * guidance)
        swapped = policy.velocity(x, timesteps.flip(0), conditioning, ROWS)
    assert (both - swapped).abs().max() > 1e-4
    if name in ("sd3", "sana", "flux", "flux2", "qwen_image", "wan"):
        assert policy.supports_per_sample_timesteps, "in one call"


@pytest.mark.parametrize("name", TINY)
def test_the_adapter_is_the_base_when_off_and_the_same_image_when_saved(folders, name, tmp_path):
    policy = loaded(folders, name)
    state, schedule = noise(policy), policy.schedule(STEPS)[0]
    conditioning = policy.encode(PROMPTS)
    with torch.no_grad():
        base = policy.velocity(state, schedule.timesteps[0], conditioning, ROWS)
        policy.add_lora(2, 4, None, seed=0)
        assert torch.equal(policy.velocity(state, schedule.timesteps[0], conditioning, ROWS), base)
        stir(policy)
        assert (policy.velocity(state, schedule.timesteps[0], conditioning, ROWS) - base).abs().max() > 1e-4
        with policy.base_model():
            assert torch.equal(policy.velocity(state, schedule.timesteps[0], conditioning, ROWS), base)
    policy.lora.save(tmp_path)
    pipe = from_folder(folders(name), TINY[name])
    if policy.lora.has_pipeline_loader:
        pipe.load_lora_weights(str(tmp_path))
    elif hasattr(pipe.transformer, "load_lora_adapter"):
        pipe.transformer.load_lora_adapter(str(tmp_path), prefix=None, weight_name=WEIGHTS)
    else:
        PeftModel.from_pretrained(pipe.transformer, str(tmp_path))
    if name == "wan22":
        pipe.load_lora_weights(str(tmp_path), weight_name=expert_weights("transformer_2"), load_into_transformer_2=True)
    expected = ours(policy, state)
    torch.testing.assert_close(plain(pipe, name, policy, state).clamp(0, 1), expected, rtol=0, atol=2e-4)
    again = loaded(folders, name)
    again.load_lora(tmp_path)
    with torch.no_grad():
        trained, read = (one.velocity(state, schedule.timesteps[0], conditioning, ROWS) for one in (policy, again))
    torch.testing.assert_close(read, trained, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["prx", "omnigen"])  # transformers that know nothing of adapters; one's encoder is wrapped
def test_a_merged_model_draws_what_its_lora_drew(folders, name, tmp_path):
    policy = loaded(folders, name)
    policy.add_lora(2, 4, None, seed=0)
    stir(policy)
    state = noise(policy)
    with policy.base_model():
        base = ours(policy, state)
    expected = ours(policy, state)
    save_merged(policy, tmp_path, str(folders(name)))
    size = {"height": TINY[name].size[0], "width": TINY[name].size[1]}
    merged = load_policy(str(tmp_path), "cpu", "fp32", **size, **TINY[name].call)
    assert not merged.has_lora
    torch.testing.assert_close(ours(merged, state), expected, rtol=0, atol=5e-5)
    assert (expected - base).abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if not tiny.attributes and name != "wan22"])
def test_all_weights_can_be_trained_and_the_base_model_comes_back_as_it_was_loaded(folders, name):
    """Some keep a few modules in float32."""
    policy = loaded(folders, name, dtype="bf16")
    before = {n: v.clone() for n, v in policy.pipe.transformer.state_dict().items()}
    policy.enable_full_finetuning()
    policy.trained.store_base_weights("cpu")
    assert {p.dtype for p in policy.trainable_parameters().values()} == {torch.float32}
    policy.reset_to_base()
    after = policy.pipe.transformer.state_dict()
    assert all(torch.equal(after[n], v) and after[n].dtype == v.dtype for n, v in before.items())


def test_a_quoted_word_does_not_pad_the_other_prompts(folders):
    tiny, prompts = TINY["glm_image"], ['a sign "CAT"', "a big dog"]
    policy = load_policy(str(folders("glm_image")), "cpu", "fp32", height=tiny.size[0], width=tiny.size[1], **tiny.call)
    together = policy.encode(prompts)
    policy.encoder.cache = EmbeddingCache()
    alone = policy.encode(prompts[1:])
    for (_, one), (_, other) in zip(together.select(ROWS[1:])[1], alone.select(ROWS[:1])[1], strict=True):
        assert torch.equal(one[0], other[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_doctor_says_that_it_can_be_trained(folders, name):
    policy = loaded(folders, name)
    results = list(check_model(policy))
    assert len(results) == 8 if policy.takes_images else 7
    wrong = [result for result in results if result.status != OK]
    # it calls its transformer with the images before it denoises
    assert [result.status for result in wrong] == (["warning"] if name == "glm_image" else []), wrong


def test_doctor_says_what_is_wrong_with_a_pipeline(folders):
    policy = loaded(folders, "flux")
    policy.pipe.transformer.proj_out = torch.nn.Sequential(policy.pipe.transformer.proj_out, torch.nn.Dropout(0.5).train())
    wrong = [result for result in check_model(policy) if result.status != OK]
    assert "A sampled step, computed again, has a ratio of exactly 1" in [result.name for result in wrong]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in TRAINED)) for name in TINY])
def test_two_training_steps_have_a_ratio_of_1_finite_losses_and_gradients(folders, name, tmp_path):
    args = FlowGRPOConfig(
        steps=2,
        prompts_per_step=2,
        images_per_prompt=2,
        microbatch=2,
        sampling={"steps": 3, "transition": "cps"},
        lora={"rank": 2, "alpha": 4},
        output_dir=str(tmp_path),
    )
    trainer = FlowGRPOTrainer(loaded(folders, name), [brightness], args, PROMPTS)
    for _ in range(2):
        metrics = trainer.training_step()
        assert metrics["ratio/first_update_max_deviation"] == 0
        assert torch.isfinite(torch.tensor(metrics["loss"]))
        assert metrics["grad_norm"] > 0
