"""Exports a run, its LoRA as diffusers loads it or the whole model, with a model card; uploads it to the Hugging Face hub.

The export is written to a temporary folder, which replaces an earlier export when it is complete. It has a list of its own files, which
tells a later export what it may replace.
"""

import glob
import json
import shutil
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars
from safetensors.torch import load_file, save_file

from flow_grpo import __version__
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError, RetryableError
from flow_grpo.export import model_card
from flow_grpo.figures import draw_or_warn
from flow_grpo.files import (
    CHECKSUM,
    DATA_HASH,
    MAX_JSON,
    UNKNOWN_HASH,
    finish_files,
    new_files,
    regular_bytes,
    seal_safetensors,
)
from flow_grpo.policy import comfyui, hub, lora_file
from flow_grpo.policy.devices import DTYPES
from flow_grpo.policy.families import lora_header
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.loading import layer_shapes, load_policy, save_merged, save_transformers
from flow_grpo.policy.lora import TRANSFORMER
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader, check_links
from flow_grpo.run_folder.weights import load_trained_weights
from flow_grpo.text import counted, first_line, plain
from flow_grpo.tracking.tracker import plot_curves

RESULT = "export"
HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]  # of the HTTP library of huggingface_hub, which its major versions change
Format = Literal["diffusers", "peft", "comfyui"]
EXAMPLES = 4  # prompts in the header
EXPERTS = {TRANSFORMER: lora_file.HIGH, "transformer_2": lora_file.LOW}  # of Wan 2.2, whose files people know by these names


def export(
    folder: Path,
    out: Path,
    best: bool = False,
    checkpoint: int | None = None,
    merge: bool = False,
    repo: str | None = None,
    form: Format = "diffusers",
    dtype: str | None = None,
) -> list[str]:
    """Write the export of the run in `folder` to `out`; returns messages for the user.

    Args:
        best: export the LoRA of the best evaluation instead of the last one.
        checkpoint: export the LoRA of that step's checkpoint.
        merge: export the whole model with the LoRA added to its weights.
        repo: the export's name on the hub, user/name, for the card.
        form: the program whose names and files the LoRA has.
        dtype: fp32 or bf16; by default fp32 for a LoRA, and that of the run for a whole model.

    Raises:
        FlowGRPOError: there is no such run or LoRA, the base model is missing, the format can't hold it, or `out` holds other files.
    """
    run = RunReader(folder)
    check_links(folder)
    source, step = select_weights(run, best, checkpoint)
    previous, replaced = _previous_files(out)
    args = FlowGRPOConfig.from_yaml(folder / layout.CONFIG)
    merge = merge or args.lora is None  # all weights were trained
    if form == "peft" and merge:
        raise FlowGRPOError("--format peft is for a LoRA, and this exports the whole model: leave it out.")
    if form == "comfyui":
        comfyui_names(args.model)
    name = repo or out.resolve().name
    title = name.rpartition("/")[2]
    with new_files(out, RESULT, previous) as new_folder:
        notes = (
            _write_merged(args, run, source, new_folder, title=title, form=form, dtype=dtype)
            if merge
            else _write_lora(args, run, source, new_folder, title=title, form=form, dtype=dtype or "fp32")
        )
        (new_folder / layout.CONFIG).write_text(run.config_text, encoding="utf-8")
        curve = draw_or_warn(lambda: plot_curves(folder), folder / layout.CURVES, notes.append)
        if curve is not None:
            shutil.copy(curve, new_folder / layout.CURVES)
        model_card.write(new_folder, run.up_to_step(step), args, step=step, merged=merge, source=name)
        if form == "comfyui":
            _write_preview(new_folder)
        files = sorted(str(file.relative_to(new_folder)) for file in new_folder.rglob("*") if file.is_file())
        content = {"flow_grpo": __version__, "run": run.name, "step": step, "merged": merge}
        content["files"] = [*files, layout.EXPORT_MANIFEST]
        (new_folder / layout.EXPORT_MANIFEST).write_text(json.dumps(content, indent=1))
    what = "the whole model" if merge else "LoRA"
    weights = sorted(str(out / name) for name in files if "/" not in name and name.endswith(".safetensors")) or [str(out)]
    return [*notes, *replaced, f"{what} of step {step}: {', '.join(weights)}", f"model card: {out / model_card.CARD}"]


def select_weights(run: RunReader, best: bool, checkpoint: int | None) -> tuple[Path, int]:
    """The folder of the LoRA or transformer to export, and its step. FlowGRPOError if it is missing."""
    folder = run.folder
    if best and checkpoint is not None:
        raise FlowGRPOError("--best and --checkpoint name two LoRAs: give one of them.")
    if checkpoint is not None:
        step_folder = layout.step_folder(folder / layout.CHECKPOINTS, checkpoint)
        if not step_folder.is_dir():
            steps = [str(step) for step, _ in layout.step_folders(step_folder.parent)]
            kept = f"those of steps {', '.join(steps)}" if steps else "none"
            raise FlowGRPOError(f"{folder} keeps no checkpoint of step {checkpoint}; it has {kept}.")
        return step_folder, checkpoint
    if best:
        if run.best_step is None or not (folder / layout.BEST).is_dir():
            raise FlowGRPOError(
                f"{folder} has no best/: nothing was evaluated, or not since it was resumed. Export a --checkpoint."
            )
        return folder / layout.BEST, run.best_step
    weights = layout.trained_weights(folder)
    if weights is None:
        raise FlowGRPOError(f"{folder} is not finished, so it has no lora/: export --best, or a --checkpoint.")
    return weights, max([row["step"] for row in run.step_rows], default=0)


def _write_lora(
    args: FlowGRPOConfig, run: RunReader, source: Path, folder: Path, *, title: str, form: Format, dtype: str
) -> list[str]:
    """Write the LoRA; returns notes for the user. The model is loaded if the LoRA is in a checkpoint."""
    if source.parent.name != layout.CHECKPOINTS:
        return write_lora(source, folder, args, run, title=title, form=form, dtype=DTYPES[dtype])
    policy = _trained_policy(args, run, source)
    with TemporaryDirectory(dir=folder) as saved:
        policy.lora.save(Path(saved))
        return write_lora(Path(saved), folder, args, run, title=title, form=form, dtype=DTYPES[dtype])


def _write_merged(
    args: FlowGRPOConfig, run: RunReader, source: Path, folder: Path, *, title: str, form: Format, dtype: str | None
) -> list[str]:
    """Write the whole model, or for ComfyUI its transformer; returns notes for the user."""
    policy = _trained_policy(args, run, source, dtype)
    if form == "comfyui":
        with TemporaryDirectory(dir=folder) as saved:
            save_transformers(policy, Path(saved))
            write_whole(Path(saved), folder, args, run, title)
    else:
        save_merged(policy, folder, args.model)
        _strip_local_paths(folder)
    if args.memory.quantize is None:
        return []
    return [
        f"trained on base weights in {args.memory.quantize}, merged into the unquantised ones: images may differ a little."
    ]


def _trained_policy(args: FlowGRPOConfig, run: RunReader, source: Path, dtype: str | None = None) -> Any:
    quiet_libraries()
    names = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    policy = load_policy(args.model, "cpu", dtype or names[run.machine.get("dtype", "float32")])
    load_trained_weights(policy, str(source))
    return policy


def _write_preview(folder: Path) -> None:
    """The first image after training beside each LoRA, by its name, as programs that list LoRAs show it."""
    picture = folder / model_card.PICTURES / "0_after.png"
    for file in folder.glob("*.safetensors") if picture.is_file() else ():
        shutil.copy(picture, file.with_suffix(".png"))


def _strip_local_paths(folder: Path) -> None:
    """Remove the base model's path on this machine from a saved pipeline's configs."""
    for file in folder.rglob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _previous_files(out: Path) -> tuple[list[str], list[str]]:
    """The files of an earlier export in `out`, and a message about it. FlowGRPOError if `out` holds other files."""
    if not out.exists():
        return [], []
    if not out.is_dir():
        raise FlowGRPOError(f"{out} is a file: give a folder by --out.")
    finish_files(out, RESULT)
    if not any(out.iterdir()):
        return [], []
    try:
        content = json.loads(regular_bytes(out / layout.EXPORT_MANIFEST, MAX_JSON))
        files, earlier = [str(name) for name in content["files"]], f"step {content['step']} of the run {content['run']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FlowGRPOError(f"{out} holds files that no export wrote: give an empty or new folder by --out.") from error
    return files, [f"replaced: the earlier export of {earlier} in {out}"]


def check_push(repo: str) -> None:
    """FlowGRPOError if pushing can't work: the name is not user/name, or there is no token."""
    if not hub.is_hub_id(repo):
        raise FlowGRPOError(f"{repo!r} is no name for the hub: give user/name.")
    if get_token() is None:
        raise FlowGRPOError("pushing to the hub needs a token: log in by `hf auth login`, or set HF_TOKEN.")


def push_export(folder: Path, repo: str, private: bool) -> str:
    """Upload an export, creating the repository if needed; returns the address of its page.

    Raises:
        FlowGRPOError: the hub refuses or can't be reached.
    """
    api, content = HfApi(), json.loads((folder / layout.EXPORT_MANIFEST).read_text())
    disable_progress_bars()
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(url.repo_id).private:  # it existed before
            raise FlowGRPOError("the repository is public: make it private on its page, or push to another one.")
        message = f"{content['run']}, step {content['step']}, by flow-grpo {content['flow_grpo']}"
        patterns = {
            "allow_patterns": content["files"],
            "delete_patterns": _files_to_delete(api, url.repo_id, content["files"]),
        }
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message, **patterns)
    except (OSError, ValueError, HTTP_ERROR) as error:
        is_refused = isinstance(error, HfHubHTTPError | ValueError) or constants.HF_HUB_OFFLINE
        kind = FlowGRPOError if is_refused else RetryableError
        raise kind(f"the export is in {folder}, but the hub did not take it as {repo}: {first_line(error)}") from error
    return str(url)


def export_and_push(run: Path, repo: str, private: bool = False, best: bool = False) -> str:
    """Export a finished run into RUN/export and upload it; returns the page's address.

    Raises:
        FlowGRPOError: the run is not finished, there is no token, or the hub refuses.
    """
    check_push(repo)
    out = run / layout.EXPORT
    export(run, out, best=best, repo=repo)
    return push_export(out, repo, private)


def _files_to_delete(api: HfApi, repo: str, files: list[str]) -> list[str]:
    """Patterns of the files that an earlier export has pushed and this one does not replace, such as a merged model's weights."""
    if not api.file_exists(repo, layout.EXPORT_MANIFEST):
        return []
    with TemporaryDirectory() as folder:
        previous = Path(api.hf_hub_download(repo, layout.EXPORT_MANIFEST, local_dir=folder)).read_text()
    try:
        return [glob.escape(name) for name in json.loads(previous)["files"] if name not in files]
    except (ValueError, KeyError, TypeError):  # a file of that name which no export wrote
        return []


def write_lora(
    source: Path, folder: Path, args: FlowGRPOConfig, run: RunReader, *, title: str, form: Format, dtype: torch.dtype
) -> list[str]:
    """Write the LoRA in `source`, which this package wrote, to `folder`; returns notes for the user.

    The files have the names by which diffusers and peft find them; ComfyUI, which lists files, has one named after the title.

    Args:
        title: of the LoRA, in the header.

    Raises:
        FlowGRPOError: there is no LoRA, its values are not finite, or the format can't hold it.
    """
    first = next((source / name for name in (hub.WEIGHTS, hub.PEFT_WEIGHTS) if (source / name).is_file()), None)
    if first is None:
        raise FlowGRPOError(f"{source} holds no LoRA: neither {hub.WEIGHTS} nor {hub.PEFT_WEIGHTS} is in it.")
    others = sorted(source.glob(hub.expert_weights("*")))
    files = {TRANSFORMER: first, **{file.stem.removeprefix(f"{first.stem}_"): file for file in others}}
    if form == "peft" and len(files) > 1:
        raise FlowGRPOError(
            f"peft's format holds the LoRA of one transformer, and this model has {len(files)}: leave out --format."
        )
    header, notes = _header(args, run, title), []
    for component, file in files.items():
        found, prefix = lora_file.read_own(file)
        header["modelspec.date"] = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        if form == "comfyui":
            target = folder / comfyui_file(title, component if len(files) > 1 else None)
            notes += _write_for_comfyui(target, found, args.model, component, header=header, dtype=dtype)
            continue
        target = folder / (hub.PEFT_WEIGHTS if form == "peft" else file.name)
        prefix = lora_file.PEFT_PREFIX if form == "peft" else prefix
        targets = found.config.get("target_modules") or list(found.layers)
        lora_file.write(target, found.layers, prefix, header, targets, dtype=dtype)
    return notes


def comfyui_file(title: str, component: str | None = None) -> str:
    """The name of a LoRA's file for ComfyUI; of several transformers, with that of the component."""
    return f"{title}.safetensors" if component is None else f"{title}_{EXPERTS.get(component, component)}.safetensors"


def write_whole(source: Path, folder: Path, args: FlowGRPOConfig, run: RunReader, title: str) -> None:
    """Write each transformer in `source` as one file, by the names by which ComfyUI recognises the model."""
    components = sorted(path.name for path in source.iterdir())
    header = _header(args, run, title)
    if "modelspec.architecture" in header:
        header["modelspec.architecture"] = header["modelspec.architecture"].removesuffix("/lora")
    for component in components:
        state = {
            name: value
            for file in sorted((source / component).glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        named = comfyui.all_weights(state, comfyui_names(args.model, component).whole)
        target = folder / comfyui_file(title, component if len(components) > 1 else None)
        hashes = {DATA_HASH: UNKNOWN_HASH, CHECKSUM: UNKNOWN_HASH}
        save_file({name: value.contiguous() for name, value in named.items()}, target, {"format": "pt", **header, **hashes})
        seal_safetensors(target)


def comfyui_names(model: str, component: str = TRANSFORMER) -> comfyui.Names:
    """The names of a model's layers in ComfyUI. FlowGRPOError if they are not known."""
    transformer = hub.component_class(model, component)
    if transformer is None:
        raise FlowGRPOError(
            f"the {hub.INDEX} of {model} is not on this machine, which says what its layers are called in ComfyUI."
        )
    if transformer not in comfyui.FAMILIES:
        raise FlowGRPOError(
            f"--format comfyui: ComfyUI has no model of the kind {transformer}, or its names are not known here: leave out --format."
        )
    return comfyui.FAMILIES[transformer]


def _write_for_comfyui(
    file: Path, found: lora_file.LoraFile, model: str, component: str, *, header: dict[str, str], dtype: torch.dtype
) -> list[str]:
    """Write the layers by the names that ComfyUI reads; returns a note on those that have none."""
    shapes = cache(lambda: layer_shapes(model, component))  # reads the model's config when the first is asked for
    layers, left_out = comfyui.to_comfyui(found.layers, comfyui_names(model, component), lambda name: shapes()[name][0])
    if not layers:
        raise FlowGRPOError(f"--format comfyui: no layer of this LoRA has a name in ComfyUI, {left_out[0]} for one.")
    rank = str(max(layer.rank for layer in found.layers.values()))  # fused layers have a larger one
    lora_file.write_named(file, layers, {**header, "ss_network_dim": rank, "ss_network_alpha": rank}, dtype)
    number = f"{counted(len(left_out), 'layer')} of {len(found.layers)}"
    return [f"left out: {number}, which ComfyUI has no names for; {left_out[0]} is the first."] if left_out else []


def _header(args: FlowGRPOConfig, run: RunReader, title: str) -> dict[str, str]:
    prompts = [plain(prompt) for prompt in (run.evaluations[0]["prompts"][:EXAMPLES] if run.evaluations else [])]
    call = args.evaluation_call_kwargs()
    size = {"modelspec.resolution": f"{call['width']}x{call['height']}"} if {"width", "height"} <= call.keys() else {}
    return {
        **lora_header(hub.pipeline_class(args.model)),
        **size,
        "modelspec.title": title,
        "modelspec.description": f"Prompts: {'; '.join(prompts)}" if prompts else "",
        "ss_output_name": title,
        "ss_sd_model_name": Path(args.model).name if Path(args.model).exists() else args.model,
    }
