"""LoRA files of other programs: loaded whole, or refused in one sentence that says why."""

import json
import logging
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file
from support.embedded import tiny_policy
from support.families import TINY
from torch import Tensor

from flow_grpo.policy import lora_file
from flow_grpo.policy.hub import ADAPTER_CONFIG, PEFT_WEIGHTS, WEIGHTS
from flow_grpo.policy.lora import TRAINED, Lora
from flow_grpo.progress import show_phases

RANK = 4


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def difference(policy) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices of a LoRA on the queries and the output of each attention, by layer."""
    generator = torch.Generator().manual_seed(0)
    layers = {name: one for name, one in policy.pipe.transformer.named_modules() if name.endswith(("to_q", "to_out.0"))}
    return {
        name: (
            torch.randn(RANK, one.in_features, generator=generator),
            torch.randn(one.out_features, RANK, generator=generator),
        )
        for name, one in layers.items()
    }


def tensors(difference, prefix="", down="lora_A", up="lora_B", flat=False, alpha=None) -> dict[str, Tensor]:
    """The LoRA in the names of a program."""
    written = {}
    for name, (a, b) in difference.items():
        layer = prefix + (name.replace(".", "_") if flat else name)
        written |= {f"{layer}.{down}.weight": a.clone(), f"{layer}.{up}.weight": b.clone()}
        written |= {} if alpha is None else {f"{layer}.alpha": torch.tensor(float(alpha))}
    return written


def loaded(policy, path) -> dict[str, Tensor]:
    """What a loaded LoRA adds to each layer."""
    policy.reset_to_base()
    policy.load_lora(path)
    layers = {name: one for name, one in policy.pipe.transformer.named_modules() if hasattr(one, "get_delta_weight")}
    return {name: layer.get_delta_weight(TRAINED).detach() for name, layer in layers.items() if TRAINED in layer.lora_A}


def assert_adds(policy, path, difference, scale: float) -> None:
    added = loaded(policy, path)
    assert added.keys() == difference.keys()
    for name, (a, b) in difference.items():
        torch.testing.assert_close(added[name], scale * b @ a)


KOHYA = {"down": "lora_down", "up": "lora_up"}
NAMES = {
    "diffusers": ({"prefix": "transformer."}, 1),
    "no prefix": ({}, 1),
    "ai-toolkit": ({"prefix": "diffusion_model."}, 1),
    "ComfyUI with alpha": ({"prefix": "diffusion_model.", "alpha": 2}, 2 / RANK),
    "peft's names without a config": ({"prefix": "base_model.model."}, 1),
    "OneTrainer": ({"prefix": "lora_transformer_", "flat": True, "alpha": 1, **KOHYA}, 1 / RANK),
    "LyCORIS": ({"prefix": "lycoris_", "flat": True, "alpha": 1, **KOHYA}, 1 / RANK),
    "kohya": ({"prefix": "lora_unet_", "flat": True, "alpha": RANK, **KOHYA}, 1),
    "an adapter's name": ({"prefix": "transformer.", "down": "lora_A.default", "up": "lora_B.default"}, 1),
    "old diffusers": ({"prefix": "transformer.", "down": "lora.down", "up": "lora.up"}, 1),
}


@pytest.mark.parametrize("program", NAMES)
def test_names_of_other_programs_are_the_models(policy, difference, program, tmp_path):
    names, scale = NAMES[program]
    save_file(tensors(difference, **names), tmp_path / "some.safetensors")
    for place in (tmp_path, tmp_path / "some.safetensors"):
        assert_adds(policy, place, difference, scale)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"r": RANK, "lora_alpha": 8}, 2),
        ({"r": RANK, "lora_alpha": 8, "use_rslora": True}, 4),
        ({"r": RANK, "lora_alpha": RANK}, 1),
    ],
)
def test_a_checkpoint_of_the_papers_code_has_the_scale_of_its_config(policy, difference, tmp_path, config, scale):
    folder = tmp_path / "checkpoint-60" / "lora"
    folder.mkdir(parents=True)
    save_file(tensors(difference, prefix="base_model.model."), folder / PEFT_WEIGHTS)
    with pytest.raises(ValueError, match=f"{ADAPTER_CONFIG} with its alpha is not beside it"):
        policy.load_lora(folder)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    for place in (folder, folder / PEFT_WEIGHTS, folder.parent):
        assert_adds(policy, place, difference, scale)


def test_layers_keep_their_own_ranks_and_alphas_and_are_written_with_one(policy, tmp_path):
    layers = [name for name, _ in policy.pipe.transformer.named_modules() if name.endswith(".to_q")]
    written, right = {}, {}
    for i, name in enumerate(layers):
        a, b = torch.randn(i + 1, 128), torch.randn(128, i + 1)
        written |= {f"transformer.{name}.lora_A.weight": a, f"transformer.{name}.lora_B.weight": b}
        written[f"transformer.{name}.alpha"] = torch.tensor(0.5 * i)
        right[name] = 0.5 * i / (i + 1) * b @ a
    save_file(written, tmp_path / "mixed.safetensors")
    added = loaded(policy, tmp_path / "mixed.safetensors")
    file = policy.save(tmp_path / "saved")
    assert {value.shape[0] for name, value in load_file(file).items() if "lora_A" in name} == {len(layers)}
    for result in (added, loaded(policy, file)):
        assert result.keys() == right.keys()
        for name, value in right.items():
            torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5)


def test_a_lora_of_version_0_4_keeps_the_alpha_of_its_header(policy, difference, tmp_path):
    config = {"transformer.r": RANK, "transformer.lora_alpha": 2 * RANK, "transformer.peft_type": "LORA"}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
    save_file(tensors(difference, prefix="transformer."), tmp_path / WEIGHTS, header)
    assert_adds(policy, tmp_path, difference, 2)
    found, prefix = lora_file.read_own(tmp_path / WEIGHTS)
    lora_file.write(tmp_path / "again.safetensors", found.layers, prefix, {"modelspec.title": "signs"}, found.layers)
    assert_adds(policy, tmp_path / "again.safetensors", difference, 2)
    assert all(torch.equal(b, 2 * difference[name][1]) for name, b in ups(tmp_path / "again.safetensors").items())


def ups(file: Path) -> dict[str, Tensor]:
    return {lora_file.strip_prefixes(name): layer.up for name, layer in lora_file.read(file).layers.items()}


def test_the_part_of_a_text_encoder_is_left_out_and_named(policy, difference, tmp_path):
    encoder = {"text_encoder.text_model.encoder.layers.0.self_attn.q_proj": (torch.randn(RANK, 64), torch.randn(64, RANK))}
    both = {
        **tensors(difference, prefix="transformer."),
        **tensors(encoder),
        **tensors({"x": encoder.popitem()[1]}, "lora_te2_"),
    }
    save_file(both, tmp_path / "both.safetensors")
    sentence = r"both\.safetensors also has 1 layer of lora_te2 and 1 layer of text_encoder: left out"
    with pytest.warns(UserWarning, match=sentence):
        assert_adds(policy, tmp_path / "both.safetensors", difference, 1)
    assert not getattr(policy.pipe.text_encoder, "peft_config", {})
    save_file(tensors({"x": (torch.randn(RANK, 64), torch.randn(64, RANK))}, "text_encoder."), tmp_path / "text.safetensors")
    with pytest.raises(ValueError, match="no weights for the transformer of this model: it has only layers of text_encoder"):
        policy.load_lora(tmp_path / "text.safetensors")


def test_a_command_prints_what_was_left_out(policy, difference, tmp_path, capsys):
    from rich.console import Console

    encoder = {"x": (torch.randn(RANK, 64), torch.randn(64, RANK))}
    save_file({**tensors(difference), **tensors(encoder, "text_encoder_2.")}, tmp_path / "both.safetensors")
    policy.reset_to_base()
    with show_phases(Console(stderr=True)):
        policy.load_lora(tmp_path / "both.safetensors")
    assert "also has 1 layer of text_encoder_2: left out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"transformer_blocks.9.attn.to_q": (RANK, 128)},
            "has 13 layers, of which 12 have a place in StableDiffusion3Pipeline",
        ),
        ({"transformer_blocks.0.attn2.to_q": (RANK, 128)}, r"transformer\.transformer_blocks\.0\.attn2\.to_q is the first"),
        ({"transformer_blocks.0.attn.to_k": (RANK, 256)}, r"to_k is 256 x 256 there, and 128 x 128 in StableDiff"),
    ],
)
def test_a_lora_of_which_some_layers_have_no_place_is_refused(policy, difference, tmp_path, changes, sentence):
    other = {name: (torch.randn(rank, size), torch.randn(size, rank)) for name, (rank, size) in changes.items()}
    save_file(tensors({**difference, **other}, "transformer."), tmp_path / WEIGHTS)
    policy.reset_to_base()
    with pytest.raises(ValueError, match=sentence):
        policy.load_lora(tmp_path)
    assert not policy.has_lora


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lycoris_transformer_blocks_0_attn_to_q.lokr_w1", "a LoKr"),
        ("lora_transformer_transformer_blocks_0_attn_to_q.hada_w1_a", "a LoHa"),
        ("transformer.transformer_blocks.0.attn.to_q.dora_scale", "a DoRA"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_magnitude_vector", "a DoRA"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_B.bias", "1 tensor of 25 that are no part of a LoRA"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv.diff_b", "a LyCORIS file of whole differences"),
        ("model.diffusion_model.x_embedder.proj.weight", "1 tensor of 25 that are no part of a LoRA"),
        ("transformer.transformer_blocks.0.norm1.linear.weight", "1 tensor of 25 that are no part of a LoRA"),
    ],
)
def test_other_kinds_of_adapters_are_named(policy, difference, tmp_path, name, kind):
    save_file({**tensors(difference, "transformer."), name: torch.ones(4)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=kind):
        policy.load_lora(tmp_path)


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ({"use_dora": True}, "is a DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, r"is for base weights that peft changes \(pissa"),
    ],
)
def test_a_config_of_another_kind_is_named(policy, difference, tmp_path, setting, kind):
    save_file(tensors(difference, prefix="base_model.model."), tmp_path / PEFT_WEIGHTS)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"r": RANK, "lora_alpha": 8, **setting}))
    with pytest.raises(ValueError, match=kind):
        policy.load_lora(tmp_path)


def test_several_files_in_a_folder_are_not_guessed_from(policy, difference, tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file(tensors(difference), tmp_path / name)
    with pytest.raises(ValueError, match=r"holds 2 files, a\.safetensors, b\.safetensors: give the one that is meant"):
        policy.load_lora(tmp_path)


def test_a_pickle_is_read_as_tensors_only(policy, difference, tmp_path):
    torch.save(tensors(difference), tmp_path / "pytorch_lora_weights.bin")
    assert_adds(policy, tmp_path, difference, 1)
    torch.save({"code": Path}, tmp_path / "pytorch_lora_weights.bin")
    with pytest.raises(ValueError, match=r"pytorch_lora_weights\.bin can't be read as tensors"):
        policy.load_lora(tmp_path)


@pytest.mark.parametrize("offline", [False, True])
def test_a_lora_on_the_hub_is_found_by_its_files(policy, difference, tmp_path, monkeypatch, offline):
    save_file(tensors(difference, prefix="base_model.model."), tmp_path / PEFT_WEIGHTS)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"r": RANK, "lora_alpha": 8}))

    def names(_, repo: str) -> list[str]:
        if offline:
            raise OfflineModeIsEnabled("no")
        return [PEFT_WEIGHTS, ADAPTER_CONFIG, "README.md", "samples/other.safetensors"]

    monkeypatch.setattr(lora_file.HfApi, "list_repo_files", names)
    monkeypatch.setattr(lora_file, "hub_file", lambda repo, name: str(tmp_path / name))
    monkeypatch.setattr(lora_file, "snapshot_download", lambda repo, local_files_only: str(tmp_path))
    assert lora_file.find_file("me/signs") == tmp_path / PEFT_WEIGHTS


FUSED = {  # names in which other programs have query, key and value as one layer, by family
    "flux": ("lora_unet_double_blocks_0_img_attn_qkv", 3 * 32, "transformer_blocks.0.attn.to_", {"flat": True, **KOHYA}),
    "flux2_klein": ("diffusion_model.double_blocks.0.img_attn.qkv", 3 * 32, "transformer_blocks.0.attn.to_", {}),
    "z_image": ("lora_unet_layers_0_attention_qkv", 3 * 32, "layers.0.attention.to_", {"flat": True, **KOHYA}),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_are_split_by_diffusers(name, tmp_path):
    layer, rows, start, style = FUSED[name]
    a, b = torch.randn(RANK, 32), torch.randn(rows, RANK)
    alpha = 2.0 if style else None
    save_file(tensors({layer: (a, b)}, **style, alpha=alpha), tmp_path / WEIGHTS)
    pipe = TINY[name].build()
    Lora(pipe, torch.float32, ()).load(str(tmp_path))
    parts = [pipe.transformer.get_submodule(f"{start}{part}").get_delta_weight(TRAINED) for part in "qkv"]
    torch.testing.assert_close(torch.cat(parts), (0.5 if style else 1) * b @ a)


def test_a_lora_of_the_last_layers_of_single_blocks_alone_is_read_without_a_warning(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "diffusers")
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    pipe = TINY["flux2_klein"].build()
    layer = pipe.transformer.get_submodule("single_transformer_blocks.0.attn.to_out")
    a, b = torch.randn(RANK, layer.in_features), torch.randn(layer.out_features, RANK)
    save_file(tensors({"diffusion_model.single_blocks.0.linear2": (a, b)}), tmp_path / WEIGHTS)
    Lora(pipe, torch.float32, ()).load(str(tmp_path))
    added = pipe.transformer.get_submodule("single_transformer_blocks.0.attn.to_out").get_delta_weight(TRAINED)
    torch.testing.assert_close(added, b @ a)
    assert not caplog.messages
