"""The model card of an export: what was trained, how, what came of it, what to watch, how to load it, and under which licences.

Prompts, names and settings are untrusted text: the front matter goes through YAML, and in Markdown they stand in code, where nothing
is markup, or with every mark escaped.
"""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load, try_to_load_from_cache
from jinja2 import Environment, FileSystemLoader
from PIL import Image
from safetensors import safe_open
from yaml import YAMLError

import rewards
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import SMALLEST_CELL, open_image
from flow_grpo.evaluation import hacking
from flow_grpo.policy import hub
from flow_grpo.policy.families import family
from flow_grpo.report import summary
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import code_block, escape_markdown, inline_code, link, markdown_table, number, plain, short_name

TEMPLATES = Path(__file__).parent / "templates"
CARD, PICTURES = "README.md", "pictures"
MAX_PROMPTS = 8  # prompts with pictures
HUB = "https://huggingface.co"
# Licences of the models that our presets name, as their pages state them: licence, and name and file of one of their own.
LICENCES: dict[str, tuple[str, ...]] = {
    "tiny": ("apache-2.0",),
    "stabilityai/stable-diffusion-3.5-medium": ("other", "stabilityai-ai-community", "LICENSE.md"),
    "stabilityai/stable-diffusion-3.5-large": ("other", "stabilityai-ai-community", "LICENSE.md"),
    "black-forest-labs/FLUX.1-dev": ("other", "flux-1-dev-non-commercial-license", "LICENSE.md"),
    "black-forest-labs/FLUX.2-klein-base-4B": ("apache-2.0",),
    "Qwen/Qwen-Image": ("apache-2.0",),
    "Tongyi-MAI/Z-Image": ("apache-2.0",),
    "Efficient-Large-Model/Sana_1600M_512px_diffusers": ("other", "nscl-v2-custom", "LICENSE.txt"),
}
LICENCE_KEYS = ("license", "license_name", "license_link")


def write(folder: Path, run: RunReader, args: FlowGRPOConfig, step: int, merged: bool, source: str) -> None:
    """Writes README.md and the pictures it shows into an export whose weights lie there already.

    Args:
        run: the run up to the step of the weights.
        source: what the code of the card loads: the hub's name of the export, or its folder.
    """
    shown = gallery(folder, run)
    licence = base_licence(args.model)
    trained, measured = run.trained, [name for name in run.metrics if name != "reward"]
    ends = [run.held_out[0]["step"], run.held_out[-1]["step"]] if len(run.held_out) > 1 else []
    prompts = run.evaluations[-1]["prompts"] if run.evaluations else []
    content = {
        "code": inline_code,
        "escape": escape_markdown,
        "link": link,
        "code_block": code_block,
        "short": short_name,
        "name": source.rpartition("/")[2],
        "sentence": summary.headline(run),
        "others": summary.untrained_metrics(run),
        "merged": merged,
        "step": step,
        "steps": args.steps,
        "scores": scores_table(run, ends, len(prompts)) if ends else None,
        "curves": layout.CURVES if (folder / layout.CURVES).is_file() else None,
        "gallery": gallery_table(shown, ends) if shown else None,
        "warnings": [(row["step"], row["warning"]) for row in run.warnings],
        "watched": bool(ends) and len(prompts) >= hacking.MIN_PROMPTS,
        "limits": hacking.limits(),
        "gamed": {name: _sentence(name, "Gamed") for name in trained},
        "usage_code": usage_code(folder, args, run, merged, source),
        "options": {name: reward.options for name, reward in {**args.evaluation.rewards, **args.rewards}.items()},
        "base": args.model,
        "base_page": f"{HUB}/{args.model}" if _on_hub(args.model) else None,
        "licence": licence,
        "reward_licences": {name: _sentence(name, "Weights", "No weights") for name in dict.fromkeys([*trained, *measured])},
        "args": args,
        "parts": [part for _, part in args.resolved_stages()],
        "facts": summary.cost(run)["facts"],
        "config": run.source,
    }
    data = front_matter(run, args, merged, licence, content["name"], shown)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("card.md.jinja").render(card_data=data.to_yaml(), **content)
    ModelCard(text).save(folder / CARD)


def front_matter(
    run: RunReader, args: FlowGRPOConfig, merged: bool, licence: dict[str, str], name: str, shown: list[dict[str, Any]]
) -> ModelCardData:
    """What the hub reads of the card."""
    results = []
    if len(run.held_out) > 1 and args.evaluation.prompts is not None:
        data_set = Path(args.evaluation.prompts).stem
        results = [
            EvalResult("text-to-image", data_set, data_set, plain(short_name(m)), summary.change(run, m)["last"])
            for m in run.metrics
        ]
    tags = ["text-to-image", "diffusers", "flow-grpo", "reinforcement-learning"]
    return ModelCardData(
        base_model=args.model if _on_hub(args.model) else None,
        base_model_relation="finetune" if merged else "adapter",
        pipeline_tag="text-to-image",
        library_name="diffusers",
        tags=tags if merged else [*tags, "lora", "template:sd-lora"],
        widget=[{"text": plain(one["prompt"]), "output": {"url": one["after"]}} for one in shown] or None,
        model_name=plain(name),
        eval_results=results or None,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )


def gallery(folder: Path, run: RunReader) -> list[dict[str, Any]]:
    """The first held-out prompts before and after, their pictures written into `folder` as PNG; small ones are enlarged."""
    if not run.evaluations:
        return []
    ends, measure = (run.evaluations[0], run.evaluations[-1]), run.metrics[0]
    found = []
    for place, prompt in enumerate(ends[0]["prompts"][:MAX_PROMPTS]):
        files = [end["folder"] / layout.prompt_image(place) for end in ends]
        if not all(file.is_file() for file in files):
            break
        values = [end["values"][measure][place] for end in ends]
        one: dict[str, Any] = {"prompt": prompt, "values": dict(zip(("before", "after"), values, strict=True))}
        try:
            pictures = [open_image(file) for file in files]
        except ValueError:
            break
        for when, picture in zip(("before", "after"), pictures, strict=True):
            scale = max(1, -(-SMALLEST_CELL // picture.width))
            one[when] = f"{PICTURES}/{place}_{when}.png"
            (folder / PICTURES).mkdir(exist_ok=True)
            picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(
                folder / one[when]
            )
        found.append(one)
    return found


def base_licence(model: str) -> dict[str, str]:
    """The base model's licence as a card states it: from its own card, where that is at hand, or as we know it; else empty."""
    cached = try_to_load_from_cache(model, CARD) if _on_hub(model) else str(Path(model) / CARD)
    known = dict(zip(LICENCE_KEYS, LICENCES.get(model, ()), strict=False))
    if isinstance(cached, str) and Path(cached).is_file():
        stated = _metadata(Path(cached))
        own = {key: plain(value) for key in LICENCE_KEYS if isinstance(value := stated.get(key), str) and value}
        known = own if "license" in own else known
    link = known.get("license_link", "")
    if link and "://" not in link and _on_hub(model):
        known["license_link"] = f"{HUB}/{model}/blob/main/{link}"
    return known


def _metadata(card: Path) -> dict[str, Any]:
    """The front matter of somebody's card, whatever its names are; empty where it can't be read."""
    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, YAMLError, RecursionError):
        return {}


def usage_code(folder: Path, args: FlowGRPOConfig, run: RunReader, merged: bool, source: str) -> str:
    """Python that loads the export and draws a picture as the run's evaluations do."""
    kind = hub.pipeline_class(args.model)
    differs = family(kind)
    call = {"num_inference_steps": args.evaluation.steps, **differs.call_kwargs}
    if differs.guidance:
        call[differs.guidance] = args.guidance if args.guidance > 1 else differs.no_guidance_value
    call |= {key: value for key, value in args.pipeline_call_kwargs().items() if key != "guidance"}
    prompt = plain(run.evaluations[0]["prompts"][0]) if run.evaluations else "a photo of a cat"
    base = f"resolve_model({args.model!r})" if args.model in hub.BUNDLED_MODELS else repr(args.model)
    lines = ["import torch", f"from diffusers import {kind}"]
    lines += (
        ["from flow_grpo.policy.hub import locate  # where the embedded model lies"]
        if args.model in hub.BUNDLED_MODELS and not merged
        else []
    )
    lines += [] if merged or not (folder / hub.PEFT_WEIGHTS).is_file() else ["from peft import PeftModel"]
    dtype = run.machine.get("dtype", "bfloat16")
    lines += ["", 'device = "cuda" if torch.cuda.is_available() else "cpu"']
    lines += [f"pipe = {kind}.from_pretrained({repr(source) if merged else base}, torch_dtype=torch.{dtype}).to(device)"]
    lines += [] if merged else _loading(folder, source)
    arguments = "".join(f"\n    {key}={value!r}," for key, value in call.items())
    seed = "\n    generator=torch.Generator().manual_seed(0),"
    return "\n".join([*lines, f"image = pipe(\n    {prompt!r},{arguments}{seed}\n).images[0]", 'image.save("picture.png")'])


def _loading(folder: Path, source: str) -> list[str]:
    """How a LoRA of this format is loaded, with its scale."""
    if (folder / hub.PEFT_WEIGHTS).is_file():
        return [f"PeftModel.from_pretrained(pipe.transformer, {source!r})  # diffusers has no loader for this pipeline"]
    with safe_open(folder / hub.WEIGHTS, "np") as file:
        for_pipeline = all(name.startswith("transformer.") for name in list(file.keys()))
    if for_pipeline:
        loads = f'pipe.load_lora_weights({source!r}, weight_name="{hub.WEIGHTS}", adapter_name="flow_grpo")'
        return [loads, 'pipe.set_adapters("flow_grpo", 1.0)  # the LoRA\'s scale; 0 is the base model']
    loads = f'pipe.transformer.load_lora_adapter(\n    {source!r}, weight_name="{hub.WEIGHTS}", prefix=None, adapter_name="flow_grpo"\n)'
    return [loads, 'pipe.transformer.set_adapters("flow_grpo", 1.0)  # the LoRA\'s scale; 0 is the base model']


def scores_table(run: RunReader, ends: list[int], prompts: int) -> str:
    """The held-out scores at the first and the last evaluation, and their change."""
    rows = []
    for name in run.metrics:
        change = summary.change(run, name)
        error = "" if change["error"] is None else f" ± {number(change['error'])}"
        told = "the sum of the rewards" if name == "reward" else inline_code(short_name(name))
        trained = "yes" if name in run.trained or name == "reward" else "no"
        numbers = (number(change["first"]), number(change["last"]), number(change["by"], sign=True) + error)
        rows.append((told, trained, *numbers))
    heading = (f"{prompts or ''} held-out prompts".strip(), "trained on", f"step {ends[0]}", f"step {ends[1]}", "change")
    return markdown_table(heading, rows, left=2)


def gallery_table(shown: list[dict[str, Any]], ends: list[int]) -> str:
    """The first held-out prompts with their images and scores before and after."""
    first, last = ends or (0, 0)
    rows = [
        (inline_code(one["prompt"]), *(f"![{when}]({one[when]}) {number(value)}" for when, value in one["values"].items()))
        for one in shown
    ]
    return markdown_table(("prompt", f"step {first}", f"step {last}"), rows)


def _sentence(reward: str, *beginnings: str) -> str:
    """The sentence of a reward's docstring that begins so; "" where there is none."""
    said = " ".join(rewards.docstring(reward).split())
    found = re.search(rf"(?:^|(?<=[.:;] ))(?:{'|'.join(beginnings)})\b.*?\.(?=\s+[A-Z]|$)", said)
    return found.group() if found else ""


def _on_hub(model: str) -> bool:
    return model not in hub.BUNDLED_MODELS and not Path(model).exists() and hub.looks_like_hub_id(model)
