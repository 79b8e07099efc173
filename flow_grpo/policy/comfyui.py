"""The names by which ComfyUI reads a LoRA or a whole transformer, from those of diffusers, and back.

ComfyUI reads the names of its own modules after `diffusion_model.`, and of many families also those of diffusers after `transformer.`. A
layer keeps its name where ComfyUI reads it; the tables have the others. In some models of ComfyUI one layer computes what several of
diffusers do, such as query, key and value. Its LoRA has their `down` one below the other, and their `up` as blocks on the diagonal.

Sources: `comfy/lora.py`, `comfy/utils.py` and `comfy/ldm/` of ComfyUI at commits 3086026 (0.19.3) and 0f1fa67 (0.33.0).
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from flow_grpo.policy.lora_file import PIPELINE_PREFIX, LoraLayer, flattened

OWN_PREFIX = "diffusion_model."


@dataclass(frozen=True)
class Place:
    """Where a layer is in ComfyUI's model.

    Attributes:
        layer: the name of ComfyUI's layer. `*` is a number and `**` the rest of a name, as in the name of the layer of diffusers.
        part: of a layer that is several of diffusers': which part of its rows, counted from 0.
        swapped: whether its rows are scale and shift, which are in the other order there.
        flat: whether it is a table, which has one dimension there.
    """

    layer: str
    part: int = 0
    swapped: bool = False
    flat: bool = False


Places = Mapping[str, str | Place]  # by the name in diffusers


@dataclass(frozen=True)
class Names:
    """The names of a family's layers in ComfyUI.

    Attributes:
        places: of the layers in a LoRA.
        keeps_others: whether ComfyUI reads diffusers' names of all other layers.
        whole: of modules and single parameters in a file of all weights, in which all others keep their names.
    """

    places: Places = field(default_factory=dict)
    keeps_others: bool = False
    whole: Places = field(default_factory=dict)

    def place(self, name: str) -> Place | None:
        """Where a layer of diffusers is; None if it has no other name there."""
        return _place(self.places, name)

    def parts(self, layer: str) -> list[str]:
        """The names in diffusers of the layers that a layer of ComfyUI is made of, in the order of its rows."""
        parts = {}
        for ours, theirs in self.places.items():
            place = theirs if isinstance(theirs, Place) else Place(theirs)
            if match := re.fullmatch(_pattern(place.layer), layer):
                parts[place.part] = _filled(ours, match.groups())
        return [parts[i] for i in sorted(parts)]


def _place(places: Places, name: str) -> Place | None:
    for ours, theirs in places.items():
        if match := re.fullmatch(_pattern(ours), name):
            found = theirs if isinstance(theirs, Place) else Place(theirs)
            return replace(found, layer=_filled(found.layer, match.groups()))
    return None


def _pattern(name: str) -> str:
    return re.escape(name).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)")


def _filled(name: str, values: Collection[str]) -> str:
    left = iter(values)
    return re.sub(r"\*+", lambda _: next(left), name)


# -- tables ---------------------------------------------------------------------------------------------------------------


def _fused(ours: str, theirs: str, parts: tuple[str, ...] = ("to_q", "to_k", "to_v")) -> dict[str, str | Place]:
    """The layers `ours`.part, which are the rows of one layer there."""
    return {f"{ours}.{part}": Place(theirs, i) for i, part in enumerate(parts)}


def _embedder(ours: str, theirs: str, ends: tuple[str, str] = ("in_layer", "out_layer")) -> dict[str, str | Place]:
    return {f"{ours}.linear_{i + 1}": f"{theirs}.{end}" for i, end in enumerate(ends)}


_WAN: dict[str, str | Place] = {
    **_embedder("condition_embedder.time_embedder", "time_embedding", ("0", "2")),
    **_embedder("condition_embedder.text_embedder", "text_embedding", ("0", "2")),
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    **{
        f"blocks.*.{ours}.{part}": f"blocks.*.{theirs}.{end}"
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for part, end in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
    },
    "blocks.*.attn2.add_k_proj": "blocks.*.cross_attn.k_img",
    "blocks.*.attn2.add_v_proj": "blocks.*.cross_attn.v_img",
    "blocks.*.ffn.net.0.proj": "blocks.*.ffn.0",
    "blocks.*.ffn.net.2": "blocks.*.ffn.2",
    "proj_out": "head.head",
    "blocks.*.norm2": "blocks.*.norm3",
    **{
        f"blocks.*.{ours}.norm_{part}": f"blocks.*.{theirs}.norm_{part}"
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for part in "qk"
    },
    "blocks.*.attn2.norm_added_k": "blocks.*.cross_attn.norm_k_img",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "blocks.*.scale_shift_table": "blocks.*.modulation",
    "scale_shift_table": "head.modulation",
}

_LTX: dict[str, str | Place] = {
    "proj_in": "patchify_proj",
    "time_embed.**": "adaln_single.**",
    "caption_projection.**": "caption_projection.**",
    **{
        f"transformer_blocks.*.attn{n}.norm_{part}": f"transformer_blocks.*.attn{n}.{part}_norm"
        for n in (1, 2)
        for part in "qk"
    },
    "transformer_blocks.**": "transformer_blocks.**",
    "proj_out": "proj_out",
}

_LUMINA2: dict[str, str | Place] = {
    "x_embedder": "x_embedder",
    **_embedder("time_caption_embed.timestep_embedder", "t_embedder.mlp", ("0", "2")),
    "time_caption_embed.caption_embedder.1": "cap_embedder.1",
    "norm_out.linear_1": "final_layer.adaLN_modulation.1",
    "norm_out.linear_2": "final_layer.linear",
    "time_caption_embed.caption_embedder.0": "cap_embedder.0",
}
for _blocks in ("noise_refiner.*", "context_refiner.*", "layers.*"):
    _LUMINA2 |= {
        **_fused(f"{_blocks}.attn", f"{_blocks}.attention.qkv"),
        f"{_blocks}.attn.to_out.0": f"{_blocks}.attention.out",
        **{f"{_blocks}.feed_forward.linear_{i}": f"{_blocks}.feed_forward.w{i}" for i in (1, 2, 3)},
        f"{_blocks}.norm1.linear": f"{_blocks}.adaLN_modulation.1",
        f"{_blocks}.norm1.norm": f"{_blocks}.attention_norm1",
        f"{_blocks}.norm1": f"{_blocks}.attention_norm1",  # in the context's refiner
        f"{_blocks}.norm2": f"{_blocks}.attention_norm2",
        **{f"{_blocks}.attn.norm_{part}": f"{_blocks}.attention.{part}_norm" for part in "qk"},
    }


def _query_key(ours: str, theirs: str, ends: tuple[str, str] = ("norm_q", "norm_k")) -> dict[str, str | Place]:
    """The norms of query and key, whose weights the published files call scale."""
    return {
        f"{ours}.{end}.weight": f"{theirs}.norm.{part}_norm.scale" for end, part in zip(ends, ("query", "key"), strict=True)
    }


_COMMON: dict[str, str | Place] = {  # to FLUX, FLUX.2 and what was made after them
    "transformer_blocks.*.norm1.linear": "double_blocks.*.img_mod.lin",
    "transformer_blocks.*.norm1_context.linear": "double_blocks.*.txt_mod.lin",
    **_fused("transformer_blocks.*.attn", "double_blocks.*.img_attn.qkv"),
    **_fused("transformer_blocks.*.attn", "double_blocks.*.txt_attn.qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
    **_query_key("transformer_blocks.*.attn", "double_blocks.*.img_attn"),
    **_query_key("transformer_blocks.*.attn", "double_blocks.*.txt_attn", ("norm_added_q", "norm_added_k")),
    "transformer_blocks.*.attn.to_out.0": "double_blocks.*.img_attn.proj",
    "transformer_blocks.*.attn.to_add_out": "double_blocks.*.txt_attn.proj",
    **_query_key("single_transformer_blocks.*.attn", "single_blocks.*"),
    "norm_out.linear": Place("final_layer.adaLN_modulation.1", swapped=True),
    "proj_out": "final_layer.linear",
}
_FLUX: dict[str, str | Place] = {
    **_COMMON,
    "transformer_blocks.*.ff.net.0.proj": "double_blocks.*.img_mlp.0",
    "transformer_blocks.*.ff.net.2": "double_blocks.*.img_mlp.2",
    "transformer_blocks.*.ff_context.net.0.proj": "double_blocks.*.txt_mlp.0",
    "transformer_blocks.*.ff_context.net.2": "double_blocks.*.txt_mlp.2",
    "single_transformer_blocks.*.norm.linear": "single_blocks.*.modulation.lin",
    **_fused("single_transformer_blocks.*", "single_blocks.*.linear1", ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
    "single_transformer_blocks.*.proj_out": "single_blocks.*.linear2",
}
_INPUTS: dict[str, str | Place] = {"x_embedder": "img_in", "context_embedder": "txt_in"}

_REFINER = ("context_embedder.token_refiner.refiner_blocks.*", "txt_in.individual_token_refiner.blocks.*")
_HUNYUAN: dict[str, str | Place] = {
    **_FLUX,
    "x_embedder.proj": "img_in.proj",
    **_embedder("context_embedder.time_text_embed.timestep_embedder", "txt_in.t_embedder"),
    **_embedder("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder"),
    "context_embedder.proj_in": "txt_in.input_embedder",
    **_fused(f"{_REFINER[0]}.attn", f"{_REFINER[1]}.self_attn.qkv"),
    f"{_REFINER[0]}.attn.to_out.0": f"{_REFINER[1]}.self_attn.proj",
    f"{_REFINER[0]}.ff.net.0.proj": f"{_REFINER[1]}.mlp.0",
    f"{_REFINER[0]}.ff.net.2": f"{_REFINER[1]}.mlp.2",
    f"{_REFINER[0]}.norm_out.linear": f"{_REFINER[1]}.adaLN_modulation.1",
    f"{_REFINER[0]}.norm1": f"{_REFINER[1]}.norm1",
    f"{_REFINER[0]}.norm2": f"{_REFINER[1]}.norm2",
}
_HUNYUAN_VIDEO: dict[str, str | Place] = {
    **_HUNYUAN,
    **_embedder("time_text_embed.timestep_embedder", "time_in"),
    **_embedder("time_text_embed.text_embedder", "vector_in"),
    **_embedder("time_text_embed.guidance_embedder", "guidance_in"),
}
_HUNYUAN_IMAGE: dict[str, str | Place] = {
    **_HUNYUAN,
    **_embedder("time_guidance_embed.timestep_embedder", "time_in"),
    **_embedder("time_guidance_embed.timestep_embedder_r", "time_r_in"),
    **_embedder("time_guidance_embed.guidance_embedder", "guidance_in"),
    "context_embedder_2.norm": "byt5_in.layernorm",
    **{f"context_embedder_2.linear_{i}": f"byt5_in.fc{i}" for i in (1, 2, 3)},
}

_FLUX2: dict[str, str | Place] = {
    **_COMMON,
    **_INPUTS,
    **_embedder("time_guidance_embed.timestep_embedder", "time_in"),
    **_embedder("time_guidance_embed.guidance_embedder", "guidance_in"),
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "transformer_blocks.*.ff.linear_in": "double_blocks.*.img_mlp.0",
    "transformer_blocks.*.ff.linear_out": "double_blocks.*.img_mlp.2",
    "transformer_blocks.*.ff_context.linear_in": "double_blocks.*.txt_mlp.0",
    "transformer_blocks.*.ff_context.linear_out": "double_blocks.*.txt_mlp.2",
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj": "single_blocks.*.linear1",
    "single_transformer_blocks.*.attn.to_out": "single_blocks.*.linear2",
}
_CHROMA = {
    **_embedder("distilled_guidance_layer.layers.*", "distilled_guidance_layer.layers.*"),
    "distilled_guidance_layer.in_proj": "distilled_guidance_layer.in_proj",
    "distilled_guidance_layer.out_proj": "distilled_guidance_layer.out_proj",
}
_CHROMA_WHOLE = {
    **_FLUX,
    **_INPUTS,
    **_CHROMA,
    "distilled_guidance_layer.norms.*.weight": "distilled_guidance_layer.norms.*.scale",
}
_LONGCAT = _embedder("time_embed.timestep_embedder", "time_in")
_LONGCAT_WHOLE = {  # in which ComfyUI does not know `scale`
    **{name: re.sub("scale$", "weight", place) if isinstance(place, str) else place for name, place in _FLUX.items()},
    **_INPUTS,
    **_LONGCAT,
}

_KREA2: dict[str, str | Place] = {
    "img_in": "first",
    **_embedder("time_embed", "tmlp", ("0", "2")),
    "time_mod_proj": "tproj.1",
    "txt_in.norm.weight": "txtmlp.0.scale",
    **_embedder("txt_in", "txtmlp", ("1", "3")),
    "text_fusion.projector": "txtfusion.projector",
    "transformer_blocks.*.scale_shift_table": Place("blocks.*.mod.lin", flat=True),
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
    "final_layer.linear": "last.linear",
}
for _ours, _theirs in (
    ("transformer_blocks.*", "blocks.*"),
    ("text_fusion.layerwise_blocks.*", "txtfusion.layerwise_blocks.*"),
    ("text_fusion.refiner_blocks.*", "txtfusion.refiner_blocks.*"),
):
    _KREA2 |= {
        **{f"{_ours}.attn.to_{part}": f"{_theirs}.attn.w{part}" for part in "qkv"},
        f"{_ours}.attn.to_gate": f"{_theirs}.attn.gate",
        f"{_ours}.attn.to_out.0": f"{_theirs}.attn.wo",
        **{f"{_ours}.attn.norm_{part}.weight": f"{_theirs}.attn.qknorm.{part}norm.scale" for part in "qk"},
        **{f"{_ours}.ff.{part}": f"{_theirs}.mlp.{part}" for part in ("gate", "up", "down")},
        f"{_ours}.norm1.weight": f"{_theirs}.prenorm.scale",
        f"{_ours}.norm2.weight": f"{_theirs}.postnorm.scale",
    }

_SAME = Names(keeps_others=True)
FAMILIES = {  # by the class of the transformer
    "AuraFlowTransformer2DModel": _SAME,
    "ChromaTransformer2DModel": Names(_CHROMA, keeps_others=True, whole=_CHROMA_WHOLE),
    "ErnieImageTransformer2DModel": Names({"**": "**"}),
    "Flux2Transformer2DModel": Names(_FLUX2, whole=_FLUX2),
    "FluxTransformer2DModel": _SAME,
    "HiDreamImageTransformer2DModel": _SAME,
    "HunyuanImageTransformer2DModel": Names(_HUNYUAN_IMAGE, whole=_HUNYUAN_IMAGE),
    "HunyuanVideoTransformer3DModel": Names(_HUNYUAN_VIDEO, whole=_HUNYUAN_VIDEO),
    "Kandinsky5Transformer3DModel": _SAME,
    "Krea2Transformer2DModel": Names(keeps_others=True, whole=_KREA2),
    "LTXVideoTransformer3DModel": Names(_LTX, whole=_LTX),
    "LongCatImageTransformer2DModel": Names(_LONGCAT, keeps_others=True, whole=_LONGCAT_WHOLE),
    "Lumina2Transformer2DModel": Names(_LUMINA2, whole=_LUMINA2),
    "QwenImageTransformer2DModel": _SAME,
    "SD3Transformer2DModel": _SAME,
    "WanTransformer3DModel": Names(_WAN, whole=_WAN),
    "ZImageTransformer2DModel": _SAME,
}


def all_weights(state: Mapping[str, torch.Tensor], places: Places) -> dict[str, torch.Tensor]:
    """The weights of a transformer by the names by which ComfyUI recognises the model."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in state.items():
        module, _, end = name.rpartition(".")
        if place := _place(places, module):
            place = replace(place, layer=f"{place.layer}.{end}")
        place = place or _place(places, name) or Place(name)
        value = torch.cat(value.chunk(2)[::-1]) if place.swapped else value
        parts.setdefault(place.layer, {})[place.part] = value.flatten() if place.flat else value
    return {
        name: torch.cat([of_name[i] for i in sorted(of_name)]) if len(of_name) > 1 else of_name[0]
        for name, of_name in parts.items()
    }


# -- layers ---------------------------------------------------------------------------------------------------------------


def to_comfyui(
    layers: Mapping[str, LoraLayer], names: Names, rows: Callable[[str], int]
) -> tuple[dict[str, LoraLayer], list[str]]:
    """A LoRA by the names that ComfyUI reads, and the names of the layers that have none there.

    Args:
        layers: by diffusers' names.
        rows: of a layer of the model that the LoRA has no weights for.
    """
    places = {name: place for name in layers if (place := names.place(name))}
    others = [name for name in layers if name not in places]
    named = {PIPELINE_PREFIX + name: layers[name].folded() for name in others} if names.keeps_others else {}
    for layer in dict.fromkeys(place.layer for place in places.values()):
        parts = [
            (_swapped(layers[name]) if places[name].swapped else layers[name]).folded() if name in layers else rows(name)
            for name in names.parts(layer)
        ]
        named[OWN_PREFIX + layer] = _fuse(parts)
    return named, [] if names.keeps_others else others


def from_comfyui(
    layers: Mapping[str, LoraLayer], names: Names, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, LoraLayer]:
    """The layers of a LoRA that have ComfyUI's names, by diffusers'; the others as they are.

    Args:
        shapes: (out, in) of the model's layers by diffusers' names.
    """
    places = {name: place for name in shapes if (place := names.place(name))}
    by_layer: dict[str, list[str]] = {}
    for name in sorted(places, key=lambda name: places[name].part):
        by_layer.setdefault(places[name].layer.replace(".", "_"), []).append(name)
    found: dict[str, LoraLayer] = {}
    for name, layer in layers.items():
        parts = by_layer.get(flattened(name), [])
        sizes = [shapes[part][0] for part in parts]
        if sum(sizes) != layer.shape[0]:
            found[name] = layer
            continue
        for part, up in zip(parts, layer.up.split(sizes), strict=True):
            own = LoraLayer(layer.down, up, layer.alpha)
            found[part] = _swapped(own) if places[part].swapped else own
    return found


def _swapped(layer: LoraLayer) -> LoraLayer:
    first, second = layer.up.chunk(2)
    return LoraLayer(layer.down, torch.cat([second, first]), layer.alpha)


def _fuse(parts: list[LoraLayer | int]) -> LoraLayer:
    """One layer of several, whose rows follow one another; a number is rows that do not change."""
    layers = [part for part in parts if isinstance(part, LoraLayer)]
    blocks = [part.up if isinstance(part, LoraLayer) else layers[0].up.new_zeros(part, 0) for part in parts]
    down = torch.cat([layer.down for layer in layers])
    return LoraLayer(down, torch.block_diag(*blocks), down.shape[0])
