"""LoRAs by the names of ComfyUI: diffusers' converters read them, every layer arrives, and each adds what it did."""

from collections.abc import Callable

import diffusers as d
import pytest
import torch
from diffusers.loaders import lora_conversion_utils, single_file_utils
from safetensors.torch import load_file
from support.families import TINY
from torch import Tensor

from flow_grpo.files import WriteError
from flow_grpo.policy import comfyui, lora_file
from flow_grpo.policy.comfyui import FAMILIES, OWN_PREFIX, all_weights, from_comfyui, to_comfyui
from flow_grpo.policy.families import family
from flow_grpo.policy.lora import Lora, linear_layers
from flow_grpo.policy.lora_file import LoraLayer

RANK = 2
Layers = dict[str, LoraLayer]
Shapes = dict[str, tuple[int, int]]
# of the published width where a converter of diffusers knows no other
TRANSFORMERS: dict[str, Callable[[], torch.nn.Module]] = {
    "lumina2": lambda: d.Lumina2Transformer2DModel(num_layers=1, num_refiner_layers=1),
    "hunyuan_video": lambda: d.HunyuanVideoTransformer3DModel(num_layers=1, num_single_layers=1, num_refiner_layers=1),
    "hunyuan_image": lambda: TINY["hunyuan_image"].build().transformer,
    "wan": lambda: d.WanTransformer3DModel(num_layers=1, image_dim=32, added_kv_proj_dim=5120),
    "ltx": lambda: d.LTXVideoTransformer3DModel(num_layers=1),
    "flux2": lambda: d.Flux2Transformer2DModel(num_layers=1, num_single_layers=1),
    "chroma": lambda: d.ChromaTransformer2DModel(num_layers=1, num_single_layers=1),
    "krea2": lambda: TINY["krea2"].build().transformer,
    "ernie": lambda: TINY["ernie"].build().transformer,
    "longcat": lambda: TINY["longcat"].build().transformer,
}


def shapes_of(name: str) -> tuple[Shapes, comfyui.Names]:
    with torch.device("meta"):
        transformer = TRANSFORMERS[name]()
    layers = linear_layers(transformer)
    return {layer: (one.out_features, one.in_features) for layer, one in layers.items()}, FAMILIES[
        type(transformer).__name__
    ]


def lora_on(shapes: Shapes, targets: tuple[str, ...] = ("",)) -> Layers:
    """A random LoRA with a scale of a half."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: LoraLayer(torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator), 1.0)
        for name, (rows, columns) in shapes.items()
        if name.endswith(targets)
    }


def tensors(layers: Layers) -> dict[str, Tensor]:
    parts = {name: layer.folded() for name, layer in layers.items()}
    down = {f"{name}.lora_A.weight": layer.down for name, layer in parts.items()}
    return down | {f"{name}.lora_B.weight": layer.up for name, layer in parts.items()}


def layers_of(tensors: dict[str, Tensor]) -> Layers:
    """A LoRA of diffusers' tensors, whose scale is 1."""
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    assert 2 * len(names) == len(tensors)
    pairs = {name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]) for name in names}
    return {name.removeprefix("transformer."): LoraLayer(down, up, down.shape[0]) for name, (down, up) in pairs.items()}


def added(layer: LoraLayer) -> Tensor:
    """What a layer adds to the outputs of eight inputs."""
    x = torch.randn(layer.down.shape[1], 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return layer.alpha / layer.rank * layer.up.double() @ (layer.down.double() @ x)


def assert_same(found: Layers, right: Layers) -> None:
    assert found.keys() >= right.keys()
    for name, layer in found.items():
        if name in right:
            torch.testing.assert_close(added(layer), added(right[name]), rtol=1e-6, atol=1e-6)
        else:  # a part of a fused layer, which was not trained
            assert not added(layer).any(), name


def sizes(shapes: Shapes) -> Callable[[str], int]:
    return lambda name: shapes[name][0]


@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_layer_has_a_name_and_comes_back(name, targets):
    shapes, names = shapes_of(name)
    lora = lora_on(shapes, ("",) if targets == "all" else family("").lora_targets)
    named, left_out = to_comfyui(lora, names, sizes(shapes))
    assert not left_out
    assert_same(layers_of(tensors(from_comfyui(named, names, shapes))), lora)


def original_hunyuan(name: str) -> str:
    """The names of the published checkpoint, which ComfyUI renames when it loads it and diffusers' converter expects."""
    changes = (
        ("_attn.qkv", "_attn_qkv"),
        ("_attn.proj", "_attn_proj"),
        ("mlp.0", "mlp.fc1"),
        ("mlp.2", "mlp.fc2"),
        (".lin.", ".linear."),
    )
    embedders = [
        (f"{one}.{a}", f"{one}.mlp.{b}")
        for one in ("time_in", "guidance_in", "t_embedder")
        for a, b in (("in_layer", 0), ("out_layer", 2))
    ]
    more = [("c_embedder.in_layer", "c_embedder.linear_1"), ("c_embedder.out_layer", "c_embedder.linear_2")]
    norms = [
        (f"{ours}norm.{part}_norm.scale", f"{theirs}{part[0]}_norm.weight")
        for ours, theirs in (("_attn.", "_attn_"), (".", "."))
        for part in ("query", "key")
    ]
    for theirs, original in (*changes, *embedders, *more, *norms):
        name = name.replace(theirs, original)
    return name


CONVERTERS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "wan": lora_conversion_utils._convert_non_diffusers_wan_lora_to_diffusers,
    "lumina2": lora_conversion_utils._convert_non_diffusers_lumina2_lora_to_diffusers,
    "hunyuan_video": lambda tensors: lora_conversion_utils._convert_hunyuan_video_lora_to_diffusers(
        {original_hunyuan(name): value for name, value in tensors.items()}
    ),
    "flux2": lora_conversion_utils._convert_non_diffusers_flux2_lora_to_diffusers,
}
UNKNOWN = {  # layers that these converters do not know, or of which they split the first matrix or leave the halves in their order
    "flux2": ("norm_out",),
    "lumina2": ("x_embedder", "time_caption_embed", "norm_out"),
    "hunyuan_video": ("context_embedder.token_refiner", "norm_out"),
}


@pytest.mark.parametrize("name", CONVERTERS)
def test_diffusers_converters_of_loras_find_the_same_layers(name):
    shapes, names = shapes_of(name)
    lora = lora_on(
        {one: shape for one, shape in shapes.items() if names.place(one) and not one.startswith(UNKNOWN.get(name, "?"))}
    )
    named, _ = to_comfyui(lora, names, sizes(shapes))
    assert all(layer.startswith(OWN_PREFIX) for layer in named)
    found = layers_of(CONVERTERS[name](tensors(named)))
    assert found.keys() == lora.keys()
    assert_same(found, lora)


CHECKPOINTS = {  # and the layers for which the converter knows the published width alone
    "ltx": (single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers, "?"),
    "wan": (single_file_utils.convert_wan_transformer_to_diffusers, "?"),
    "lumina2": (single_file_utils.convert_lumina2_to_diffusers, ".attn.to_"),
    "hunyuan_video": (single_file_utils.convert_hunyuan_video_transformer_to_diffusers, "single_transformer"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_diffusers_converters_of_checkpoints_find_the_same_differences(name):
    convert, unknown = CHECKPOINTS[name]
    transformer = TINY[name].build().transformer
    layers = linear_layers(transformer)
    shapes = {layer: (one.out_features, one.in_features) for layer, one in layers.items() if unknown not in layer}
    lora = lora_on(shapes)
    named, _ = to_comfyui(lora, FAMILIES[type(transformer).__name__], sizes(shapes))
    rename = original_hunyuan if name == "hunyuan_video" else str
    checkpoint = {rename(f"{layer.removeprefix(OWN_PREFIX)}.weight"): one.up @ one.down for layer, one in named.items()}
    differences = convert(checkpoint)
    assert differences.keys() == {f"{layer}.weight" for layer in shapes}
    for layer, right in lora.items():
        torch.testing.assert_close(differences[f"{layer}.weight"], 0.5 * right.up @ right.down, rtol=1e-6, atol=1e-6)


WHOLE = {
    "ltx": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    "wan": single_file_utils.convert_wan_transformer_to_diffusers,
    "lumina2": single_file_utils.convert_lumina2_to_diffusers,
    "flux2": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    "chroma": single_file_utils.convert_chroma_transformer_checkpoint_to_diffusers,
    "krea2": single_file_utils.convert_krea2_transformer_checkpoint_to_diffusers,
    "hunyuan_video": lambda state: single_file_utils.convert_hunyuan_video_transformer_to_diffusers(
        {original_hunyuan(name): value for name, value in state.items()}
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_diffusers_converters_of_checkpoints_find_all_weights(name):
    """Converters move rows, so each weight has one column, in which all numbers differ."""
    with torch.device("meta"):
        transformer = TRANSFORMERS[name]()
    state = {
        key: i * 2**20 + torch.arange(len(value)).view(-1, *[1] * (value.ndim - 1))
        for i, (key, value) in enumerate(transformer.state_dict().items())
    }
    named = all_weights(state, FAMILIES[type(transformer).__name__].whole)
    found = WHOLE[name](dict(named))
    assert found.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in found.items())


KEPT = [
    name for name in TINY if name in ("sd3", "flux", "qwen_image", "z_image", "aura_flow", "hidream", "kandinsky5", "krea2")
]


@pytest.mark.parametrize("name", KEPT)
def test_where_comfyui_reads_diffusers_names_they_stay(name, tmp_path):
    pipe = TINY[name].build()
    shapes = {layer: (one.out_features, one.in_features) for layer, one in linear_layers(pipe.transformer).items()}
    lora = lora_on(shapes)
    named, left_out = to_comfyui(lora, FAMILIES[type(pipe.transformer).__name__], sizes(shapes))
    assert not left_out
    assert named.keys() == {f"transformer.{layer}" for layer in shapes}
    lora_file.write_named(tmp_path / "signs.safetensors", named, {}, torch.float32)
    state = type(pipe).lora_state_dict(str(tmp_path), weight_name="signs.safetensors")
    assert_same(layers_of(state), lora)


@pytest.mark.parametrize("name", ["wan", "ltx", "lumina2", "hunyuan_video", "hunyuan_image", "flux2", "chroma", "ernie"])
def test_a_file_for_comfyui_is_read_whole(name, tmp_path):
    pipe = TINY[name].build()
    shapes = {layer: (one.out_features, one.in_features) for layer, one in linear_layers(pipe.transformer).items()}
    lora = lora_on(shapes)
    named, _ = to_comfyui(lora, FAMILIES[type(pipe.transformer).__name__], sizes(shapes))
    lora_file.write_named(tmp_path / "signs.safetensors", named, {}, torch.float32)
    assert not [key for key in load_file(tmp_path / "signs.safetensors") if key.endswith("alpha")]
    reader = Lora(pipe, torch.float32, (), [one for one in ("transformer_2",) if getattr(pipe, one, None) is not None])
    reader.load(str(tmp_path))
    modules = dict(pipe.transformer.named_modules())
    for layer, right in lora.items():
        delta = modules[layer].get_delta_weight("default")
        torch.testing.assert_close(delta, 0.5 * right.up @ right.down, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["chroma", "krea2", "longcat"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_lora_by_the_names_of_the_models_authors_is_read_whole(name, flat, tmp_path):
    """As kohya's scripts and ai-toolkit write it, also where diffusers converts only a part of the layers."""
    pipe = TINY[name].build()
    shapes = {layer: (one.out_features, one.in_features) for layer, one in linear_layers(pipe.transformer).items()}
    lora = lora_on(shapes)
    whole = comfyui.Names(FAMILIES[type(pipe.transformer).__name__].whole, keeps_others=True)
    named, _ = to_comfyui(lora, whole, sizes(shapes))
    short = {lora_file.strip_prefixes(layer): one for layer, one in named.items()}
    start = "lora_unet_" if flat else OWN_PREFIX
    written = {start + (layer.replace(".", "_") if flat else layer): one for layer, one in short.items()}
    lora_file.write_named(tmp_path / "signs.safetensors", written, {}, torch.float32)
    Lora(pipe, torch.float32, ()).load(str(tmp_path))
    modules = dict(pipe.transformer.named_modules())
    for layer, right in lora.items():
        delta = modules[layer].get_delta_weight("default")
        torch.testing.assert_close(delta, 0.5 * right.up @ right.down, rtol=1e-5, atol=1e-5)


def test_layers_without_a_name_are_named():
    names = FAMILIES["WanTransformer3DModel"]
    lora = lora_on({"blocks.0.attn1.to_q": (4, 4), "vace_blocks.0.attn1.to_q": (4, 4)})
    named, left_out = to_comfyui(lora, names, lambda name: 0)
    assert list(named) == ["diffusion_model.blocks.0.self_attn.q"]
    assert left_out == ["vace_blocks.0.attn1.to_q"]


def test_parts_that_were_not_trained_are_rows_of_zeros():
    names = FAMILIES["HunyuanVideoTransformer3DModel"]
    lora = lora_on({f"single_transformer_blocks.3.attn.to_{part}": (4, 6) for part in "qv"})
    named, _ = to_comfyui(lora, names, lambda name: {"single_transformer_blocks.3.attn.to_k": 4}.get(name, 16))
    assert list(named) == ["diffusion_model.single_blocks.3.linear1"]
    fused = named["diffusion_model.single_blocks.3.linear1"]
    assert fused.shape == (28, 6)
    assert fused.rank == 2 * RANK
    rows = (fused.up @ fused.down).split([4, 4, 4, 16])
    torch.testing.assert_close(
        rows[0], 0.5 * lora["single_transformer_blocks.3.attn.to_q"].up @ lora["single_transformer_blocks.3.attn.to_q"].down
    )
    assert not rows[1].any()
    assert not rows[3].any()


def test_a_lora_that_can_not_be_written_is_one_sentence(tmp_path):
    """As on a full disk; also in the folders of checks, which nothing else watches."""
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"signs.safetensors could not be written: "):
        lora_file.write_named(tmp_path / "file" / "signs.safetensors", lora_on({"to_q": (4, 4)}), {}, torch.float32)
