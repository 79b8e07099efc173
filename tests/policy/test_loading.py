"""A pipeline becomes a policy, or is refused in a sentence."""

import logging
from concurrent.futures import ThreadPoolExecutor

import diffusers.utils.logging as diffusers_logging
import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from support.embedded import CALL, LATENTS, euler, tiny_policy

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.policy import loading
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.loading import check_guidance, load_policy
from flow_grpo.policy.policy import Policy


def test_the_users_pipeline_stays_as_it_was():
    pipe = StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"], torch_dtype=torch.float32)
    scheduler, encode_prompt, config = pipe.scheduler, pipe.encode_prompt, dict(pipe.config)
    policy = Policy(pipe, **CALL)
    euler(policy, LATENTS, 3)
    assert pipe.scheduler is scheduler
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler
    assert pipe.encode_prompt == encode_prompt
    assert dict(pipe.config) == config


def test_an_unknown_argument_of_the_pipeline_is_a_clear_error():
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline takes no argument max_lenght"):
        tiny_policy(max_lenght=3)


def test_what_is_no_flow_is_refused():
    pipe = StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"])
    pipe.scheduler = EulerDiscreteScheduler()
    with pytest.raises(ValueError, match="does not sample a flow"):
        Policy(pipe)


@pytest.mark.parametrize("name", ["no_such_folder", "./models/sd", "/models/sd", "a/b/c", "tests/missing"])
def test_a_missing_folder_is_reported_as_missing_at_once(name):
    with pytest.raises(ValueError, match="there is no model folder"):
        load_policy(name)


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no model_index\.json"):
        load_policy(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_policy(str(tmp_path))


def test_the_model_is_loaded_in_the_dtype_and_with_the_guidance_that_were_asked_for():
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        policy = load_policy("tiny", "cpu", name, height=32, width=80)
        assert policy.pipe.transformer.dtype == policy.pipe.vae.dtype == policy.dtype == dtype
        assert policy.call == {"guidance_scale": 1.0, "height": 32, "width": 80}
    guided = load_policy("tiny", dtype="fp32", guidance=1.5)
    assert guided.call["guidance_scale"] == 1.5
    assert guided.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="dtype is 'fp8', but it should be 'auto', 'fp32', 'bf16' or 'fp16'"):
        load_policy("tiny", dtype="fp8")


def test_a_check_of_guidance_logs_nothing_of_its_own_long_prompt(caplog):
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_warning()  # as in a program that imports diffusers
    logging.getLogger("diffusers").addHandler(caplog.handler)
    try:
        check_guidance(load_policy("tiny", "cpu", "fp32", height=32, width=80), 2.0, "")
        assert [record.getMessage()[:80] for record in caplog.records] == []
        assert diffusers_logging.get_verbosity() == logging.WARNING
    finally:
        logging.getLogger("diffusers").removeHandler(caplog.handler)
        diffusers_logging.set_verbosity(verbosity)


def test_the_base_is_quantised_as_the_settings_say(monkeypatch):
    """bitsandbytes need not be here: what diffusers is asked for is looked at."""
    asked, load = [], DiffusionPipeline.from_pretrained

    def from_pretrained(source, quantization_config=None, **more):
        asked.append(quantization_config)
        return load(source, **more)

    monkeypatch.setattr(loading, "quantization", lambda dtype, pipeline: ("nf4", dtype))
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", from_pretrained)
    tiny_policy(memory=MemoryConfig(quantize="nf4"))
    tiny_policy()
    assert asked == [("nf4", torch.float32), None]


def test_models_loaded_in_several_threads_leave_later_ones_whole():
    """transformers and diffusers replace functions of torch while they load."""
    before = torch.nn.Linear(2, 2).weight.dtype, torch.nn.init.normal_
    with ThreadPoolExecutor(3) as threads:
        policies = list(threads.map(lambda _: load_policy("tiny", "cpu", "fp32"), range(3)))
    values = [policy.pipe.text_encoder.state_dict() for policy in (*policies, load_policy("tiny", "cpu", "fp32"))]
    assert all(torch.equal(value, values[0][name]) for one in values for name, value in one.items())
    assert (torch.nn.Linear(2, 2).weight.dtype, torch.nn.init.normal_) == before


def test_all_weights_of_a_transformer_that_cannot_be_saved_are_refused_at_once(policy):
    policy.reset_to_base()

    class Other(torch.nn.Linear):
        dtype = torch.float32

    policy.pipe.transformer = Other(2, 2)
    with pytest.raises(ValueError, match="Other is no ModelMixin of diffusers, which could save them: set lora"):
        policy.enable_full_finetuning()
