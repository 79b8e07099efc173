"""The LoRA on the embedded pipeline: added, trained, saved, loaded and removed."""

import re

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from support.embedded import CALL, LATENTS, PROMPTS, ROWS, euler, stir, tiny_policy

from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.families import ATTENTION
from flow_grpo.policy.hub import BUNDLED_MODELS, WEIGHTS
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.lora import Lora
from flow_grpo.policy.policy import Policy


def test_gradients_reach_every_lora_parameter_and_no_other(policy):
    v = policy.velocity(LATENTS, torch.tensor(500.0), policy.encode(PROMPTS), ROWS)
    v.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.trainable_parameters().values())
    trained = {id(p) for p in policy.trainable_parameters().values()}
    assert all(p.grad is None for p in policy.pipe.transformer.parameters() if id(p) not in trained)


def test_a_lora_is_as_large_as_its_layers_not_as_their_packed_weights(policy):
    """bitsandbytes packs weights in 4 bits into one column: by its length, a LoRA on FLUX.1-dev took 689 GB."""
    transformer = policy.pipe.transformer
    layer = transformer.transformer_blocks[0].attn.to_k
    layer.weight = torch.nn.Parameter(torch.empty(2**44, 1, device="meta"), requires_grad=False)
    policy.lora.remove()
    policy.add_lora(4, 8, ["to_k"], seed=0)
    assert {p.numel() for p in policy.trainable_parameters().values()} == {4 * layer.in_features}, "rank by width"


def test_a_fresh_adapter_and_a_switched_off_one_are_the_base():
    base = tiny_policy()
    conditioning = base.encode(PROMPTS)
    with torch.no_grad():
        expected = base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
        base.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
        assert torch.equal(base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), expected)
        stir(base)
        moved = base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
        assert (moved - expected).abs().max() > 1e-3
        with base.base_model():
            assert torch.equal(base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), expected)
        assert torch.equal(base.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), moved)


def test_a_lora_is_off_for_images_that_it_does_not_change_and_only_for_those():
    policy = tiny_policy()
    with policy.without_zero_lora():  # there is none
        assert not policy.lora.is_enabled
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    with policy.without_zero_lora():
        assert not policy.lora.is_enabled
        with policy.base_model():
            assert not policy.lora.is_enabled
        assert not policy.lora.is_enabled, "the inner context switched it on again"
    assert policy.lora.is_enabled
    last = [name for name in policy.trainable_parameters() if ".lora_B." in name][-1]
    with torch.no_grad():
        policy.trainable_parameters()[last][-1, -1] = 1e-30
    with policy.without_zero_lora():
        assert policy.lora.is_enabled


@pytest.mark.parametrize("targets", [["to_q", "to_out.0"], "all"])
def test_the_saved_lora_gives_the_same_image_in_plain_diffusers(targets, tmp_path):
    policy = tiny_policy()
    policy.add_lora(4, 8, targets, seed=0)
    stir(policy)
    file = policy.lora.save(tmp_path)
    assert file.name == "pytorch_lora_weights.safetensors"
    plain = StableDiffusion3Pipeline.from_pretrained(BUNDLED_MODELS["tiny"], torch_dtype=torch.float32)
    plain.set_progress_bar_config(disable=True)
    without = plain(PROMPTS, latents=LATENTS, num_inference_steps=4, output_type="pt", **CALL).images
    plain.load_lora_weights(str(tmp_path))
    images = plain(PROMPTS, latents=LATENTS, num_inference_steps=4, output_type="pt", **CALL).images
    torch.testing.assert_close(images, euler(policy, LATENTS, 4), rtol=0, atol=2e-5)
    assert (images - without).abs().max() > 1e-3
    again = load_policy("tiny", "cpu", "fp32", lora=tmp_path, **CALL)
    torch.testing.assert_close(euler(again, LATENTS, 4), images, rtol=0, atol=2e-5)


def test_the_lora_is_float32_whatever_the_model_is():
    policy = tiny_policy("bf16")
    policy.add_lora(4, 8, ["to_q"], seed=0)
    assert policy.pipe.transformer.dtype == torch.bfloat16 or policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.trainable_parameters().values()} == {torch.float32}
    v = policy.velocity(LATENTS, torch.tensor(500.0), policy.encode(PROMPTS), ROWS)
    assert v.dtype == torch.float32
    policy.lora.add_adapter_copy("old")
    assert {p.dtype for p in policy.trainable_parameters("old").values()} == {torch.float32}


def adapted(policy: Policy) -> list[str]:
    """Names of the layers that a LoRA is on."""
    return [name for name, module in policy.pipe.transformer.named_modules() if isinstance(module, BaseTunerLayer)]


def test_a_lora_is_scaled_by_alpha_over_its_rank():
    policy = tiny_policy()
    policy.add_lora(4, 6, ["to_q"], seed=0)
    for layer in policy.lora.lora_layers():
        assert layer.lora_A["default"].weight.shape[0] == layer.lora_B["default"].weight.shape[1] == 4
        assert layer.scaling["default"] == 6 / 4
    assert policy.pipe.transformer.peft_config["default"].lora_alpha == 6


def test_a_lora_begins_gaussian_from_a_seed_of_its_own():
    started = []
    for seed in (0, 0, 1):
        policy = tiny_policy()
        before = torch.random.get_rng_state()
        policy.add_lora(4, 8, ["to_q"], seed)
        assert torch.equal(torch.random.get_rng_state(), before), "the global stream stays as it was"
        started.append(torch.cat([p.detach().flatten() for n, p in policy.trainable_parameters().items() if "lora_A" in n]))
        assert not any(p.any() for n, p in policy.trainable_parameters().items() if "lora_B" in n)
    assert torch.equal(started[0], started[1])
    assert not torch.equal(started[0], started[2])
    assert float(started[0].std()) == pytest.approx(1 / 4, rel=0.05), "peft's gaussian has a std of 1 / rank"


def test_a_lora_is_on_the_layers_that_were_asked_for():
    linear = [name for name, module in tiny_policy().pipe.transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    for targets, expected in (
        (["to_q", "no_such"], [name for name in linear if name.endswith(".to_q")]),
        (None, [name for name in linear if name.split("attn.")[-1] in ATTENTION]),
        ("all", linear),
    ):
        policy = tiny_policy()
        policy.add_lora(2, 4, targets, seed=0)
        assert adapted(policy) == expected
        assert policy.lora.adapters == ["default"]
        policy.lora.remove()
        assert not policy.has_lora
        policy.add_lora(2, 4, "all", seed=0)  # the layers of the first are wrapped from then on
        assert adapted(policy) == linear


def test_what_could_have_been_a_target_is_named():
    policy = tiny_policy()
    with pytest.raises(ValueError, match=r"no linear layer .* is named to_nothing: set lora\.targets") as error:
        policy.add_lora(4, 8, ["to_nothing"], seed=0)
    named = str(error.value).removesuffix(".").split("some of ")[1].split(", ")
    assert named == sorted(named)
    assert {"to_q", "to_out.0", "add_q_proj", "proj_out", "net.2"} <= set(named)
    assert not any(name.startswith("attn") or name.isdigit() for name in named)
    policy.add_lora(2, 4, named, seed=0)
    linear = [name for name, module in tiny_policy().pipe.transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    assert set(linear) <= set(adapted(policy)), "each layer has a name among them"


def test_a_lora_that_is_taken_off_leaves_the_base_model(policy):
    conditioning = policy.encode(PROMPTS)
    with torch.no_grad(), policy.base_model():
        base = policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
    policy.reset_to_base()
    assert policy.trainable_parameters() == {}
    policy.reset_to_base()  # nothing is left to take off
    with torch.no_grad():
        assert torch.equal(policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), base)


def test_the_copies_go_with_a_lora_and_a_new_one_may_have_another_rank(policy):
    policy.lora.add_adapter_copy("old")
    policy.reset_to_base()
    assert policy.lora.adapters == []
    assert not policy.has_lora
    for rank in (3, 5):
        policy.reset_to_base()
        policy.add_lora(rank, 1, ["to_k"], seed=0)
        policy.lora.add_adapter_copy("old")
        assert {min(p.shape) for p in policy.trainable_parameters("old").values()} == {rank}


def test_a_second_lora_is_refused_with_what_to_do(policy, tmp_path):
    policy.save(tmp_path)
    again = "the policy has trained weights already: remove them by policy.reset_to_base()"
    with pytest.raises(FlowGRPOError, match=re.escape(again)):
        policy.load_lora(tmp_path)
    with pytest.raises(FlowGRPOError, match=re.escape(again)):
        policy.add_lora(4, 8, ["to_q"], seed=0)
    policy.reset_to_base()
    policy.load_lora(tmp_path)


def test_a_transformer_is_loaded_and_trained_where_a_lora_was(policy, tmp_path):
    """Such as by `eval` of a run with a LoRA and one of all weights: the base layers have the model's own names again."""
    names = list(tiny_policy().pipe.transformer.state_dict())
    whole = tiny_policy()
    whole.enable_full_finetuning()
    whole.save(tmp_path / "whole")
    policy.reset_to_base()
    assert list(policy.pipe.transformer.state_dict()) == names
    policy.load_lora(tmp_path / "whole")
    with pytest.raises(FlowGRPOError, match="the policy has trained weights already"):
        policy.load_lora(tmp_path / "whole")


@pytest.mark.parametrize(("dtype", "cast"), [("fp32", True), ("bf16", False)])
def test_inputs_are_cast_by_peft_only_without_autocast(dtype, cast):
    policy = tiny_policy(dtype)
    policy.add_lora(4, 8, ["to_q"], seed=0)
    assert {layer.cast_input_dtype_enabled for layer in policy.lora.lora_layers()} == {cast}


def test_a_save_that_only_helps_others_writes_nothing(policy, tmp_path):
    assert policy.save(tmp_path / "none", write=False) == tmp_path / "none" / WEIGHTS
    assert not (tmp_path / "none").exists()
    for _ in range(2):  # over what is there
        assert policy.save(tmp_path / "a" / "b") == tmp_path / "a" / "b" / WEIGHTS
    assert (tmp_path / "a" / "b" / WEIGHTS).is_file()


def folded(policy: Policy) -> dict[str, torch.Tensor]:
    """The adapter of rank 4 and alpha 8 with its scale in the second matrix."""
    return {name: 2 * value if "lora_B" in name else value for name, value in policy.adapter_state().items()}


@pytest.mark.parametrize("name", [WEIGHTS, "other.safetensors"])
@pytest.mark.parametrize("by_pipeline", [True, False])
def test_a_lora_is_loaded_by_its_folder_or_its_file(policy, by_pipeline, name, tmp_path, monkeypatch):
    """By the pipeline's method or, where it has none, by the transformer's; whatever else is in the folder."""
    monkeypatch.setattr(Lora, "has_pipeline_loader", by_pipeline)
    saved, file = folded(policy), policy.save(tmp_path)
    file.rename(tmp_path / "other.safetensors")
    stir(policy, seed=1)
    policy.save(tmp_path)
    expected = folded(policy) if name == WEIGHTS else saved
    again = load_policy("tiny", "cpu", "fp32", lora=tmp_path if name == WEIGHTS else tmp_path / name, **CALL)
    assert again.adapter_state().keys() == saved.keys()
    assert all(torch.equal(value, expected[n]) for n, value in again.adapter_state().items())
    assert all(
        parameter.requires_grad and parameter.dtype == torch.float32 for parameter in again.trainable_parameters().values()
    )
    assert {layer.scaling["default"] for layer in again.lora.lora_layers()} == {1.0}


def test_a_damaged_lora_is_a_clear_error(tmp_path):
    (tmp_path / WEIGHTS).write_bytes(b"no weights")
    for place in (tmp_path, tmp_path / WEIGHTS):
        with pytest.raises(
            ValueError, match=rf"the LoRA .* could not be loaded: .*{WEIGHTS} is damaged or no \.safetensors file"
        ):
            tiny_policy().load_lora(place)
    (tmp_path / "words.txt").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"could not be loaded: (?!.*is damaged)"):
        tiny_policy().load_lora(tmp_path / "words.txt")
    with pytest.raises(ValueError, match="there is no LoRA at"):
        tiny_policy().load_lora("./missing")
    (tmp_path / "runs" / "tiny_ocr").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"there is no LoRA at .*/runs/tiny_ocrr\. Did you mean .*/runs/tiny_ocr\? Give a folder"
    ):
        tiny_policy().load_lora(tmp_path / "runs" / "tiny_ocrr")


def test_a_copy_of_the_adapter_follows_slowly_and_takes_no_gradient(policy):
    policy.lora.add_adapter_copy("old")
    conditioning = policy.encode(PROMPTS)
    start = policy.adapter_state()
    with torch.no_grad():
        v = policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS)
        with policy.lora.use("old"):
            assert torch.equal(policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS), v)
    stir(policy, seed=1)
    policy.lora.update_copy("old", 0.9)
    moved, copied = policy.adapter_state(), policy.adapter_state("old")
    for name, value in moved.items():
        torch.testing.assert_close(copied[name.replace(".default.", ".old.")], 0.9 * start[name] + 0.1 * value)
    policy.velocity(LATENTS, torch.tensor(500.0), conditioning, ROWS).mean().backward()
    assert all(p.grad is None for p in policy.trainable_parameters("old").values())
    assert all(p.requires_grad for p in policy.trainable_parameters().values())


def test_a_lora_for_other_modules_and_unknown_targets_are_refused(policy, tmp_path):
    with pytest.raises(ValueError, match="no linear layer"):
        tiny_policy().add_lora(4, 8, ["to_nothing"], seed=0)
    with pytest.raises(ValueError, match="there is no LoRA"):
        tiny_policy().load_lora(tmp_path / "a" / "missing")


def test_a_lora_that_memory_cannot_hold_is_refused_before_it_is_made(policy):
    policy.reset_to_base()
    with pytest.raises(FlowGRPOError, match=r"lora\.rank=100000000: the LoRA alone would take"):
        policy.lora.add(100_000_000, 1, None, seed=0)
