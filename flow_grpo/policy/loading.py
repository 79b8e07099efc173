"""Load a policy, add what a run trains, check guidance and size; save it as a complete diffusers model with its LoRA merged."""

import shutil
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils.peft_utils import recurse_remove_peft_layers

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.loading import read_json
from flow_grpo.config.sections import LoraConfig, MemoryConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy import hub
from flow_grpo.policy.devices import DTYPES, default_dtype, usable_device
from flow_grpo.policy.encoding import ENCODER_PREFIXES, EmbeddingCache
from flow_grpo.policy.families import denoisers
from flow_grpo.policy.hub import check_weight_files, load_errors, weights_variant
from flow_grpo.policy.interception import probe_prompts
from flow_grpo.policy.library_logging import quietly
from flow_grpo.policy.lora import linear_layers
from flow_grpo.policy.memory import apply_memory_settings, cast_layers, move_to_device, quantization
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.weights import write_transformer
from flow_grpo.progress import phase
from flow_grpo.rewards.downloads import downloads, hub_file
from flow_grpo.text import first_line

# transformers and diffusers set global state while they load, which two threads would leave wrong
LOADING = threading.RLock()


def load_policy(
    model: str | Path | DiffusionPipeline,
    device: str | None = None,
    dtype: str = "auto",
    lora: str | Path | None = None,
    guidance: float = 1.0,
    memory: MemoryConfig | dict[str, Any] | None = None,
    prompts: list[str] | None = None,
    **call: Any,
) -> Policy:
    """Load a policy from a diffusers folder, a hub id or the name of a bundled model (`tiny`), or make one of a loaded pipeline.

    A pipeline is changed in place: it is moved to the device, and the LoRA is added to it.

    Args:
        device: torch device; by default the accelerator if there is one, else the CPU.
        dtype: of the base weights and of autocast: fp32, bf16, fp16, or auto, which is bf16 where the device is faster in it
            and fp32 elsewhere; of a loaded pipeline auto is its own. A LoRA is always float32.
        lora: a saved LoRA, as `Policy.load_lora` takes it.
        guidance: guidance scale, whatever the pipeline's argument for it is called; 1 or less is off.
        memory: device placement, quantisation, gradient checkpointing, as in the config's section.
        prompts: all prompts that will be used. If their embeddings are all on disk, the text encoders are not loaded.
        call: arguments of every pipeline call (height, width, max_sequence_length ...).

    Raises:
        FlowGRPOError: there is no such model, it is not a flow, or an argument has a value that the setting of its name does not take.
    """
    sizes = {name: call[name] for name in ("height", "width") if name in call}
    memory = FlowGRPOConfig(dtype=dtype, guidance=guidance, memory=memory or {}, **sizes).memory
    device = usable_device(device)
    embeddings = EmbeddingCache()
    with LOADING, quietly():
        if isinstance(model, DiffusionPipeline):
            pipe = _in_dtype(model, dtype, memory)
            weights_dtype = pipe.transformer.dtype
        else:
            source = _source(str(model))
            weights_dtype = default_dtype(device) if dtype == "auto" else DTYPES[dtype]
            libraries = [version(library) for library in ("diffusers", "transformers")]
            key = [hub.fingerprint(source), str(weights_dtype), guidance > 1, sorted(call.items()), libraries]
            embeddings = EmbeddingCache(memory.embedding_cache_dir, key)
            probe = probe_prompts(hub.pipeline_class(source), call)[0]
            without_encoders = prompts is not None and embeddings.complete([probe, *prompts])
            pipe = _load_pipeline(str(model), source, weights_dtype, memory, without_encoders)
        apply_memory_settings(pipe, memory)  # before the move, so that a GPU never holds weights that are stored smaller
        move_to_device(pipe, torch.device(device), memory)
        policy = Policy(pipe, weights_dtype, guidance, embeddings, memory.offload_text_encoders, **call)
    if lora is not None:
        policy.load_lora(lora)
    return policy


def _in_dtype(pipe: DiffusionPipeline, dtype: str, memory: MemoryConfig) -> DiffusionPipeline:
    """A pipeline in memory, in that dtype. FlowGRPOError for settings that come too late for it."""
    late = {"quantize": memory.quantize == "nf4", "embedding_cache_dir": memory.embedding_cache_dir is not None}
    if setting := next((name for name, is_set in late.items() if is_set), None):
        raise FlowGRPOError(
            f"memory.{setting} is for a model that is loaded by its folder or hub id, and a pipeline was given: leave it out, or give that."
        )
    if dtype != "auto" and pipe.transformer.dtype != DTYPES[dtype]:
        pipe.to(DTYPES[dtype])
    return pipe


def _source(model: str) -> str:
    """The folder or hub id of a model. On the hub, its index is downloaded, which tells the commit and the pipeline's class."""
    source = hub.resolve_model(model)
    if not Path(source).is_dir():
        with load_errors(model):
            hub_file(source, hub.INDEX)
    return source


def _load_pipeline(
    model: str, source: str, dtype: torch.dtype, memory: MemoryConfig, without_encoders: bool
) -> DiffusionPipeline:
    """Check the files of a folder, and load its pipeline. FlowGRPOError for what can't be loaded."""
    left_out = hub.component_names(source, ENCODER_PREFIXES) if without_encoders else []
    options: dict[str, Any] = dict.fromkeys(left_out)
    quantization_config = quantization(dtype, hub.pipeline_class(source)) if memory.quantize == "nf4" else None
    file = hub.single_file(model)
    if Path(source).is_dir():
        check_weight_files(source, left_out, file)
        options["variant"] = weights_variant(source)
    if file is not None:
        of_transformer = quantization_config.quant_mapping["transformer"] if quantization_config else None
        options["transformer"] = _transformer_of(file, source, dtype, of_transformer)
    with phase(f"loading {model}"), load_errors(model), downloads(source):
        return DiffusionPipeline.from_pretrained(
            source, torch_dtype=dtype, quantization_config=quantization_config, **options
        )


def pipeline_of(model: object) -> DiffusionPipeline | None:
    """The pipeline that was given as a model, or that of a policy; None for a name. FlowGRPOError for anything else."""
    if model is None or isinstance(model, str | Path):
        return None
    pipe = model.pipe if isinstance(model, Policy) else model
    if not isinstance(pipe, DiffusionPipeline):
        raise FlowGRPOError(
            f"model is of type {type(model).__name__}: give a diffusers folder, a hub id, the name of a bundled model, a pipeline of "
            "diffusers or a flow_grpo.Policy."
        )
    return pipe


def _transformer_of(file: Path, source: str, dtype: torch.dtype, quantized: Any) -> torch.nn.Module:
    """The transformer in a file of one or more parts, by names of its authors or of diffusers. FlowGRPOError if diffusers can't read it."""
    name = hub.component_class(source, "transformer") or ""
    part_class = getattr(diffusers, name, None)
    if not hasattr(part_class, "from_single_file"):
        raise FlowGRPOError(f"diffusers reads no single files of {name}: give a model's folder.")
    with load_errors(file), quietly():
        try:
            return part_class.from_single_file(  # type: ignore[union-attr]
                str(file),
                config=source,
                subfolder="transformer",
                torch_dtype=dtype,
                local_files_only=True,
                quantization_config=quantized,
            )
        # a converter raises the first two; the last is of weights that stay on the meta device
        except (KeyError, IndexError, NotImplementedError) as error:
            raise FlowGRPOError(f"it holds no whole {name} by names that diffusers knows") from error


def add_trainable_weights(policy: Policy, lora: LoraConfig | None, seed: int) -> None:
    """Add a LoRA, its weights drawn from `seed`; or train all weights if `lora` is None. A LoRA that the policy already has stays.

    Raises:
        FlowGRPOError: the policy carries what the settings do not ask for.
    """
    if lora is None and policy.has_lora:
        raise FlowGRPOError("lora=null trains all weights, but the policy that was given carries a LoRA: give one without.")
    if lora is None:
        policy.enable_full_finetuning()
        return
    if policy.is_full_finetuning and lora.init_from is None:
        raise FlowGRPOError("the policy that was given trains all weights: set lora=null, or give one that does not.")
    if policy.is_full_finetuning:
        raise FlowGRPOError(
            f"lora.init_from={lora.init_from} holds a whole transformer: merge it into a model by `flow-grpo export`, and set model."
        )
    if not policy.has_lora:
        policy.add_lora(lora.rank, lora.alpha, lora.targets, seed)


def check_guidance(policy: Policy, guidance: float, hint: str) -> None:
    """Raise FlowGRPOError if the pipeline has no guidance: its velocity is the same with that scale and with none.

    It also tries whether a call with that scale can have a timestep per row. Call it before weights are sharded.

    Args:
        hint: what to do then, the end of the message.
    """
    if _same_velocity(policy.with_guidance(guidance), policy.with_guidance(1.0)) and guidance > 1:
        raise FlowGRPOError(f"{type(policy.pipe).__name__} has no guidance: {hint}")


@quietly()  # diffusers warns that the long probe prompt is truncated
@torch.no_grad()
def _same_velocity(guided: FlowPipeline, unguided: FlowPipeline) -> bool:
    schedule, shape = guided.schedule(2)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    rows, velocities = torch.arange(2), []
    for model in (guided, unguided):
        conditioning = model.encode([model.probe_prompts[1]] * 2)
        model.accepts_per_sample_timesteps(x, schedule.timesteps, conditioning, rows)  # while all processes compute alike
        velocities.append(model.velocity(x, schedule.timesteps[0], conditioning, rows))
    return torch.equal(*velocities)


@torch.no_grad()
def check_size(model: FlowPipeline, height: int | None, width: int | None) -> None:
    """Compute one velocity and decode a latent of zeros. FlowGRPOError if that fails or the image has another size.

    Args:
        height, width: as the pipeline is called, None for its own size.
    """
    name, row = type(model.pipe).__name__, torch.zeros(1, dtype=torch.long)
    try:
        schedule, shape = model.schedule(2)
        x = torch.zeros(1, *shape)
        model.velocity(x, schedule.timesteps[0], model.encode(model.probe_prompts[:1]), row)
        size = model.decode(x).shape[-2:]
    except (torch.OutOfMemoryError, FlowGRPOError):  # the latter says what the pipeline can't be called with
        raise
    except Exception as error:  # each pipeline has its own
        raise FlowGRPOError(
            f"height and width: {name} can't generate {height} x {width} pixels: {first_line(error)}"
        ) from error
    check_generated(name, (height, width), size)


def check_generated(name: str, asked: tuple[int | None, int | None], size: torch.Size) -> None:
    """Raise FlowGRPOError if the pipeline `name` generates another size than `asked`, (height, width); None is any."""
    height, width = (side or own for side, own in zip(asked, size, strict=True))
    if tuple(size) != (height, width):
        raise FlowGRPOError(
            f"height and width: {name} generates {size[0]} x {size[1]} pixels, not {height} x {width}: set that size."
        )


def layer_shapes(model: str, component: str) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of a model's transformer by name, from its config alone."""
    source = hub.resolve_model(model)
    part_class = getattr(diffusers, hub.component_class(model, component) or "", None)
    with load_errors(model, component), torch.device("meta"):
        name = f"{component}/config.json"
        file = Path(source) / name if Path(source).is_dir() else Path(hub_file(source, name))
        layers = linear_layers(part_class.from_config(read_json(file)))  # type: ignore[union-attr]  # an error of its own
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def save_merged(policy: Policy, folder: Path, base: str) -> None:
    """Write the policy's pipeline to `folder` as `from_pretrained` reads it. A LoRA is merged and removed from the policy.

    The other parts are copied from `base`, the model that the pipeline was loaded from, as diffusers does not save all parts as it loads
    them. FlowGRPOError if a LoRA is on quantised weights.
    """
    save_transformers(policy, folder)
    source = hub.resolve_model(base)
    with downloads(source):
        base_folder = Path(source if Path(source).is_dir() else DiffusionPipeline.download(source))
    shutil.copyfile(base_folder / hub.INDEX, folder / hub.INDEX)
    for part in hub.component_names(str(base_folder)):
        if part not in denoisers(policy.pipe) and (base_folder / part).is_dir():
            shutil.copytree(base_folder / part, folder / part, copy_function=shutil.copyfile)


def save_transformers(policy: Policy, folder: Path) -> None:
    """Write the transformers of a policy to folders by their names, as diffusers reads them. A LoRA is merged, as in `save_merged`."""
    if policy.is_full_finetuning:
        policy.save(folder / "transformer")
        return
    merge(policy)
    for name in denoisers(policy.pipe):
        transformer = getattr(policy.pipe, name)
        write_transformer(transformer, type(transformer).__name__, transformer.state_dict(), folder / name)


def merge(policy: Policy) -> None:
    """Add the LoRA to the base weights, with one rounding to their dtype."""
    transformers = policy.lora.transformers.values()
    quantised = policy.pipe.transformer.config.get("quantization_config") is not None
    if quantised or cast_layers(policy.pipe.transformer):
        raise FlowGRPOError(
            "the base weights are quantised, and a LoRA can't be added to them: export the LoRA without merging."
        )
    for layer in policy.lora.lora_layers():
        linear = layer.get_base_layer()
        dtype = linear.weight.dtype
        linear.float()
        layer.merge(safe_merge=True)
        linear.to(dtype)
    for transformer in transformers:
        recurse_remove_peft_layers(transformer)
        del transformer.peft_config
        transformer._hf_peft_config_loaded = False  # else diffusers would save an adapter
