"""A written LoRA adds what was trained, by the formula of each program that reads it."""

import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from support.families import TINY
from torch import Tensor

from flow_grpo.policy import lora_file
from flow_grpo.policy.families import family
from flow_grpo.policy.hub import ADAPTER_CONFIG, PEFT_WEIGHTS, WEIGHTS, expert_lora
from flow_grpo.policy.lora import TRAINED, Lora
from flow_grpo.policy.lora_file import PEFT_PREFIX, PIPELINE_PREFIX


def with_lora(pipe, rank: int = 4, alpha: float = 6) -> Lora:
    """A LoRA whose alpha is not its rank, with weights that change something."""
    described = family(type(pipe).__name__)
    experts = [name for name in described.experts if getattr(pipe, name, None) is not None]
    lora = Lora(pipe, torch.float32, described.lora_targets, experts)
    lora.add(rank, alpha, None, seed=0)
    torch.manual_seed(1)
    for parameter in lora.parameters().values():
        parameter.data.normal_()
    return lora


def trained(transformer, adapter: str = TRAINED) -> dict[str, Tensor]:
    """What an adapter adds to each layer's weight, by peft."""
    layers = {name: one for name, one in transformer.named_modules() if hasattr(one, "get_delta_weight")}
    return {name: layer.get_delta_weight(adapter) for name, layer in layers.items() if adapter in layer.lora_A}


def by_tensors(file, scale_of) -> dict[str, Tensor]:
    """What a program adds that reads the tensors of a file alone: a scale of the rank, times up @ down."""
    tensors = load_file(file)
    downs = {name.removesuffix(".lora_A.weight"): value for name, value in tensors.items() if "lora_A" in name}
    assert 2 * len(downs) == len(tensors), "nothing else is in the file"
    ranks = [value.shape[0] for value in downs.values()]
    return {
        lora_file.strip_prefixes(name): scale_of(ranks[0], down.shape[0]) * tensors[f"{name}.lora_B.weight"] @ down
        for name, down in downs.items()
    }


def comfyui(first_rank: int, rank: int) -> float:
    """Without an alpha tensor, ComfyUI's scale is 1."""
    return 1.0


def diffusers_033(first_rank: int, rank: int) -> float:
    """diffusers before 0.34: alpha is the first layer's rank."""
    return first_rank / rank


def assert_ratio_is_1(applied: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert applied.keys() == right.keys()
    for name, difference in right.items():
        assert difference.abs().max() > 0
        ratio = float((applied[name] * difference).sum() / difference.square().sum())
        assert ratio == pytest.approx(1, abs=1e-6), name
        torch.testing.assert_close(applied[name], difference, rtol=0, atol=1e-5 * float(difference.abs().max()))


@pytest.mark.parametrize("name", TINY)
def test_every_program_applies_a_written_lora_at_full_strength(name, tmp_path):
    pipe = TINY[name].build()
    lora = with_lora(pipe)
    file = lora.save(tmp_path)
    for component in ("transformer", *lora.experts):
        right = trained(getattr(pipe, component))
        of_component = file if component == "transformer" else expert_lora(str(tmp_path), component)
        for formula in (comfyui, diffusers_033):
            assert_ratio_is_1(by_tensors(of_component, formula), right)
    right = trained(pipe.transformer)
    if lora.has_pipeline_loader:
        pipe.load_lora_weights(str(tmp_path), weight_name=WEIGHTS, adapter_name="again")
    elif lora.prefix_in_files == "":
        pipe.transformer.load_lora_adapter(str(tmp_path), prefix=None, weight_name=WEIGHTS, adapter_name="again")
    else:
        assert (tmp_path / PEFT_WEIGHTS).is_file()
        bare = TINY[name].build().transformer
        assert_ratio_is_1(by_peft(bare, tmp_path), right)
        return
    assert_ratio_is_1(trained(pipe.transformer, "again"), right)


def by_peft(transformer, folder) -> dict[str, Tensor]:
    """What `PeftModel.from_pretrained` adds to each layer."""
    loaded = PeftModel.from_pretrained(copy.deepcopy(transformer), str(folder))
    return {name.removeprefix(PEFT_PREFIX): value for name, value in trained(loaded).items()}


def test_peft_applies_a_lora_in_its_own_format(tmp_path):
    pipe = TINY["sd3"].build()
    bare = copy.deepcopy(pipe.transformer)
    lora = with_lora(pipe)
    lora.save(tmp_path)
    layers = {lora_file.strip_prefixes(name): one for name, one in lora_file.read(tmp_path / WEIGHTS).layers.items()}
    targets = pipe.transformer.peft_config[TRAINED].target_modules
    (tmp_path / "peft").mkdir()
    lora_file.write(tmp_path / "peft" / PEFT_WEIGHTS, layers, PEFT_PREFIX, {}, targets)
    assert json.loads((tmp_path / "peft" / ADAPTER_CONFIG).read_text())["lora_alpha"] == 4
    assert_ratio_is_1(by_peft(bare, tmp_path / "peft"), trained(pipe.transformer))


def test_the_header_tells_other_programs_what_the_file_is(tmp_path):
    file = with_lora(TINY["sd3"].build()).save(tmp_path)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "4")
    assert header["modelspec.architecture"] == "stable-diffusion-3/lora"
    assert header["ss_base_model_version"] == "sd3"
    config = json.loads(header["lora_adapter_metadata"])
    assert config[f"{PIPELINE_PREFIX}lora_alpha"] == 4
    fields = {"peft_type", "r", "lora_alpha", "target_modules"}
    assert config.keys() == {f"{PIPELINE_PREFIX}{name}" for name in fields}, "a newer field is an error in an older peft"
