"""The model card of an export: results, reward hacking, usage, training and licences.

Prompts, names and settings are untrusted text: YAML quotes them in the front matter, and in Markdown they are code, where no mark
means anything, or have all marks escaped.
"""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader
from PIL import Image
from safetensors import SafetensorError, safe_open

from flow_grpo import rewards
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import FROM_PYTHON, LoraConfig
from flow_grpo.data.grid import SMALLEST_CELL, open_image
from flow_grpo.evaluation import hacking
from flow_grpo.evaluation.significance import MIN_PROMPTS_FOR_INTERVAL
from flow_grpo.evaluation.targets import unnamed_rewards
from flow_grpo.policy import hub
from flow_grpo.policy.families import family, has_lora_loader, makes_videos, takes
from flow_grpo.policy.lora_file import HEADER_CONFIG, PIPELINE_PREFIX
from flow_grpo.report import summary
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader, value_of
from flow_grpo.text import code_block, escape_markdown, inline_code, link, markdown_table, number, plain, short_name

TEMPLATES = Path(__file__).parent / "templates"
CARD, PICTURES = "README.md", "pictures"
DIFFUSERS_AND_PEFT = (Path(hub.WEIGHTS).stem, Path(hub.PEFT_WEIGHTS).stem)
MAX_PROMPTS = 8  # with images
HUB = "https://huggingface.co"
# Licences of the models in our presets, as their pages state them: the licence, and for `other` its name and file.
LICENCES: dict[str, tuple[str, ...]] = {
    "tiny": ("apache-2.0",),
    "tiny_shapes": ("apache-2.0",),
    "stabilityai/stable-diffusion-3.5-medium": ("other", "stabilityai-ai-community", "LICENSE.md"),
    "stabilityai/stable-diffusion-3.5-large": ("other", "stabilityai-ai-community", "LICENSE.md"),
    "black-forest-labs/FLUX.1-dev": ("other", "flux-1-dev-non-commercial-license", "LICENSE.md"),
    "black-forest-labs/FLUX.2-klein-base-4B": ("apache-2.0",),
    "Qwen/Qwen-Image": ("apache-2.0",),
    "Tongyi-MAI/Z-Image": ("apache-2.0",),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("apache-2.0",),
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": ("other", "nscl-v2-custom", "LICENSE.txt"),
}
LICENCE_KEYS = ("license", "license_name", "license_link")


def write(folder: Path, run: RunReader, args: FlowGRPOConfig, *, step: int, merged: bool, source: str) -> None:
    """Write README.md and its images into an export that has its weights already.

    Args:
        run: the run up to the step of the weights.
        source: what the card's code loads: the export's name on the hub, or its folder.
    """
    images, licence, name = gallery(folder, run), base_licence(args.model), source.rpartition("/")[2]
    lora = rank_and_alpha(args.lora, [folder, run.folder / layout.LORA, run.folder / layout.BEST])
    context = {
        "code": inline_code,
        "escape": escape_markdown,
        "link": link,
        "code_block": code_block,
        "short": short_name,
        "name": name,
        "step": step,
        "merged": merged,
        "args": args,
        "lora": lora,
        "scaled": lora and args.lora and not args.lora.init_from and lora["alpha"] != args.lora.alpha,
        "stages": [stage for _, stage in args.resolved_stages()],
        "comfyui": comfyui_files(folder),
        "usage_code": usage_code(folder, args, run, merged, source),
        "base_page": f"{HUB}/{args.model}" if _on_hub(args.model) else None,
        "licence": licence,
        "config": run.config_text,
        "lacks_prompts": args.prompts == FROM_PYTHON,
        **_results(run, images),
        **_about_rewards(run, args),
    }
    if (folder / layout.CURVES).is_file():
        context["curves"] = layout.CURVES
    data = front_matter(run, args, merged=merged, licence=licence, name=name, images=images)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("card.md.jinja").render(card_data=data.to_yaml(), **context)
    ModelCard(text).save(folder / CARD)


def _results(run: RunReader, images: list[dict[str, Any]]) -> dict[str, Any]:
    """The card's section on the evaluations."""
    ends = [run.evaluation_rows[0]["step"], run.evaluation_rows[-1]["step"]] if len(run.evaluation_rows) > 1 else []
    prompts = len(run.evaluations[-1]["prompts"]) if run.evaluations else 0
    return {
        "headline": summary.headline(run),
        "untrained": summary.untrained_metrics(run),
        "scores": scores_table(run, ends, prompts) if ends else None,
        "gallery": gallery_table(images, ends) if images else None,
        "warnings": [(row["step"], row["warning"]) for row in run.warnings],
        "monitored": bool(ends) and prompts >= MIN_PROMPTS_FOR_INTERVAL,
        "limits": hacking.limits(),
        "facts": summary.cost(run)["facts"],
    }


def _about_rewards(run: RunReader, args: FlowGRPOConfig) -> dict[str, Any]:
    """The sentences of the rewards' docstrings on how they are gamed, and on their licences."""
    names = dict.fromkeys([*run.trained, *(name for name in run.score_names if name != "reward")])
    return {
        "gamed": {name: _sentence(name, "Gamed") for name in run.trained},
        "reward_licences": {name: _sentence(name, "Weights", "No weights") for name in names},
        "trained": run.trained,
        "unnamed": unnamed_rewards(run, args),
        "options": {name: reward.options for name, reward in {**args.evaluation.rewards, **args.rewards}.items()},
    }


def front_matter(
    run: RunReader,
    args: FlowGRPOConfig,
    *,
    merged: bool,
    licence: dict[str, str],
    name: str,
    images: list[dict[str, Any]],
) -> ModelCardData:
    """The card's metadata for the hub."""
    kind, results = task(args, run), []
    if len(run.evaluation_rows) > 1 and args.evaluation.prompts is not None:
        sets = args.evaluation.prompts
        data_set = Path(sets).stem if isinstance(sets, str) else ", ".join(prompt_set.label for prompt_set in sets)
        results = [
            EvalResult(kind, data_set, data_set, plain(short_name(m)), round(summary.change(run, m)["last"], 4))
            for m in run.score_names
        ]
    tags = [kind, "diffusers", "flow-grpo", "reinforcement-learning"]
    return ModelCardData(
        base_model=args.model if _on_hub(args.model) else None,
        base_model_relation="finetune" if merged else "adapter",
        pipeline_tag=kind,
        library_name="diffusers",
        tags=tags if merged else [*tags, "lora", "template:sd-lora"],
        widget=[{"text": plain(row["prompt"]), "output": {"url": row["after"]}} for row in images] or None,
        model_name=plain(name),
        eval_results=results or None,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )


def gallery(folder: Path, run: RunReader) -> list[dict[str, Any]]:
    """The first held-out prompts with scores before and after. Writes their images into `folder` as PNG, small ones enlarged."""
    if not run.evaluations:
        return []
    ends, metric = (run.evaluations[0], run.evaluations[-1]), run.main_metric
    rows = []
    for i, prompt in enumerate(ends[0]["prompts"][:MAX_PROMPTS]):
        files = [layout.still_image(end["folder"], layout.prompt_image(i)) for end in ends]
        if not all(file.is_file() for file in files):
            break
        values = [value_of(end, metric, i) for end in ends]
        row: dict[str, Any] = {"prompt": prompt, "values": dict(zip(("before", "after"), values, strict=True))}
        try:
            images = [open_image(file) for file in files]
        except ValueError:
            break
        for when, image in zip(("before", "after"), images, strict=True):
            scale = max(1, -(-SMALLEST_CELL // image.width))
            row[when] = f"{PICTURES}/{i}_{when}.png"
            (folder / PICTURES).mkdir(exist_ok=True)
            image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(folder / row[when])
        rows.append(row)
    return rows


def base_licence(model: str) -> dict[str, str]:
    """The base model's licence for the front matter, from LICENCES; empty if it is not known."""
    known = dict(zip(LICENCE_KEYS, LICENCES.get(model, ()), strict=False))
    if "license_link" in known:
        known["license_link"] = f"{HUB}/{model}/blob/main/{known['license_link']}"
    return known


def rank_and_alpha(settings: LoraConfig | None, folders: list[Path]) -> dict[str, float] | None:
    """`rank` and `alpha` of the LoRA in the first of these folders that has one; None if all weights were trained.

    The settings are for a LoRA whose file does not say: one that a run began with keeps its own rank and alpha.
    """
    if settings is None:
        return None
    stored = next((found for found in map(_stored_settings, folders) if found), {})
    known = {"rank": stored.get("r"), "alpha": stored.get("lora_alpha")}
    return {name: value if isinstance(value, int | float) else getattr(settings, name) for name, value in known.items()}


def _stored_settings(folder: Path) -> dict[str, Any]:
    """The settings of the LoRA in a folder, in peft's names; {} if there is none, or it does not say."""
    try:
        if (folder / hub.ADAPTER_CONFIG).is_file():
            return dict(json.loads((folder / hub.ADAPTER_CONFIG).read_text(encoding="utf-8")))
        with safe_open(folder / hub.WEIGHTS, "np") as file:
            packed = dict(json.loads(file.metadata()[HEADER_CONFIG]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {name.removeprefix(PIPELINE_PREFIX): value for name, value in packed.items()}


def scores_table(run: RunReader, ends: list[int], prompts: int) -> str:
    """The held-out scores at the first and the last evaluation, and their change."""
    rows = []
    for name in run.score_names:
        change = summary.change(run, name)
        title = "the sum of the rewards" if name == "reward" else inline_code(short_name(name))
        trained = "yes" if name in run.trained or name == "reward" else "no"
        numbers = (number(change["first"]), number(change["last"]), summary.change_text(change))
        rows.append((title, trained, *numbers))
    heading = (f"{prompts or ''} held-out prompts".strip(), "trained on", f"step {ends[0]}", f"step {ends[1]}", "change")
    return markdown_table(heading, rows, left=2)


def gallery_table(images: list[dict[str, Any]], ends: list[int]) -> str:
    """The first held-out prompts with their images and scores before and after."""
    first, last = ends or (0, 0)
    rows = [
        (inline_code(row["prompt"]), *(f"![{when}]({row[when]}) {number(value)}" for when, value in row["values"].items()))
        for row in images
    ]
    return markdown_table(("prompt", f"step {first}", f"step {last}"), rows)


def _sentence(reward: str, *beginnings: str) -> str:
    """The sentence of a reward's docstring that begins with one of these words; "" if there is none."""
    text = " ".join(rewards.docstring(reward).split())
    match = re.search(rf"(?:^|(?<=[.:;] ))(?:{'|'.join(beginnings)})\b.*?\.(?=\s+[A-Z]|$)", text)
    return match.group() if match else ""


def _on_hub(model: str) -> bool:
    return model not in hub.BUNDLED_MODELS and not Path(model).exists() and hub.looks_like_hub_id(model)


def task(args: FlowGRPOConfig, run: RunReader) -> str:
    """The model's task, in the hub's words: text-to-image, image-to-image or text-to-video."""
    kind = hub.pipeline_class(args.model)
    return f"{'image' if _edited_prompt(kind, run) else 'text'}-to-{'video' if makes_videos(kind) else 'image'}"


def _edited_prompt(kind: str, run: RunReader) -> str | None:
    """The first held-out prompt with an image, or another one if the pipeline needs an image; None if prompts are texts alone."""
    first = run.evaluations[0] if run.evaluations else {}
    found = (prompt for prompt, file in zip(first.get("prompts", ()), first.get("sources", ()), strict=False) if file)
    return next(found, "make it night" if family(kind).needs_image else None)


def comfyui_files(folder: Path) -> list[str]:
    """The files in an export that are for ComfyUI, as their names are those of no other program."""
    return sorted(file.name for file in folder.glob("*.safetensors") if not file.name.startswith(DIFFUSERS_AND_PEFT))


def usage_code(folder: Path, args: FlowGRPOConfig, run: RunReader, merged: bool, source: str) -> str | None:
    """Python that loads the export and generates an image as the run's evaluations do; None if only ComfyUI reads it."""
    kind = hub.pipeline_class(args.model)
    loading = _loading(folder, source, kind, merged)
    if loading is None:
        return None
    differs = family(kind)
    evaluated = args.evaluation_call_kwargs()
    call = {"num_inference_steps": args.evaluation.steps, **differs.call_kwargs}
    if differs.guidance:
        call[differs.guidance] = evaluated["guidance"] if evaluated["guidance"] > 1 else differs.no_guidance_value
    call |= {key: value for key, value in evaluated.items() if key != "guidance"}
    if takes(kind, "max_area") and {"height", "width"} <= call.keys():  # else `max_area` would enlarge the image
        call.setdefault("max_area", call["height"] * call["width"])
    edited = _edited_prompt(kind, run)
    prompt = edited or (run.evaluations[0]["prompts"][0] if run.evaluations else "a photo of a cat")
    base = f"resolve_model({args.model!r})" if args.model in hub.BUNDLED_MODELS else repr(args.model)
    lines = ["import torch", f"from diffusers import {kind}"]
    file = hub.single_file(args.model)
    if file and not merged:
        transformer = hub.component_class(args.model, "transformer")
        lines[1] += f", {transformer}"
        config = f'config={str(file.parent)!r}, subfolder="transformer"'
        base = f"\n    {str(file.parent)!r}, transformer={transformer}.from_single_file({str(file)!r}, {config})"
    if args.model in hub.BUNDLED_MODELS and not merged:
        lines.append("from flow_grpo.policy.hub import resolve_model  # finds the embedded model")
    if (folder / hub.PEFT_WEIGHTS).is_file() and not merged:
        lines.append("from peft import PeftModel")
    weights = folder if merged else (file.parent if file else Path(args.model))
    variant = hub.weights_variant(weights) if weights.is_dir() else None  # of the base model, or of what was copied from it
    options = f"torch_dtype=torch.{run.machine.get('dtype', 'bfloat16')}" + (f", variant={variant!r}" if variant else "")
    lines += ["", 'device = "cuda" if torch.cuda.is_available() else "cpu"']
    lines += [f"pipe = {kind}.from_pretrained({repr(source) if merged else base}, {options}).to(device)"]
    lines += loading
    source_image = f'\n    {differs.image}=load_image("source.png"),' if edited else ""
    arguments = source_image + "".join(f"\n    {key}={value!r}," for key, value in call.items())
    seed = "\n    generator=torch.Generator().manual_seed(0),"
    call_lines = f"pipe(\n    prompt={plain(prompt)!r},{arguments}{seed}\n)"
    needed = ["export_to_video"] * makes_videos(kind) + ["load_image"] * bool(edited)
    if needed:
        lines.insert(2, f"from diffusers.utils import {', '.join(needed)}")
    if makes_videos(kind):
        return "\n".join([*lines, f"frames = {call_lines}.frames[0]", 'export_to_video(frames, "video.mp4", fps=16)'])
    return "\n".join([*lines, f"image = {call_lines}.images[0]", 'image.save("picture.png")'])


def _loading(folder: Path, source: str, kind: str, merged: bool) -> list[str] | None:
    """Lines that load a LoRA of this format, with its scale, none for a whole model; None if diffusers does not read it."""
    if merged:
        return None if comfyui_files(folder) else []
    if (folder / hub.PEFT_WEIGHTS).is_file():
        return [f"PeftModel.from_pretrained(pipe.transformer, {source!r})"]
    files = comfyui_files(folder)
    weights = files[0] if files else hub.WEIGHTS
    with safe_open(folder / weights, "np") as file:
        for_pipeline = all(name.startswith(PIPELINE_PREFIX) for name in list(file.keys()))
    if files and not (for_pipeline and has_lora_loader(kind)):
        return None
    if for_pipeline:
        loads = [f'pipe.load_lora_weights({source!r}, weight_name="{weights}", adapter_name="flow_grpo")']
        for file in sorted(folder.glob(hub.expert_weights("*"))):
            expert = file.stem.removeprefix(Path(hub.WEIGHTS).stem + "_")
            arguments = f'weight_name="{file.name}", adapter_name="flow_grpo", load_into_{expert}=True'
            loads.append(f"pipe.load_lora_weights(\n    {source!r}, {arguments}\n)")
        return [*loads, 'pipe.set_adapters("flow_grpo", 1.0)  # the LoRA\'s scale; 0 is the base model']
    load = f'pipe.transformer.load_lora_adapter(\n    {source!r}, weight_name="{weights}", prefix=None, adapter_name="flow_grpo"\n)'
    return [load, 'pipe.transformer.set_adapters("flow_grpo", 1.0)  # the LoRA\'s scale; 0 is the base model']
