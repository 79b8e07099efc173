"""What a model card says of using the export: its task, and the Python that loads it and generates as the run's evaluations do."""

from pathlib import Path

from safetensors import safe_open

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy import hub
from flow_grpo.policy.families import family, makes_videos, takes
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.text import plain


def task(args: FlowGRPOConfig, run: RunReader) -> str:
    """What the model does, in the hub's words: text-to-image, image-to-image or text-to-video."""
    kind = hub.pipeline_class(args.model)
    return f"{'image' if _edited_prompt(kind, run) else 'text'}-to-{'video' if makes_videos(kind) else 'image'}"


def _edited_prompt(kind: str, run: RunReader) -> str | None:
    """The first held-out prompt with an image, or another one if the pipeline needs an image; None if prompts are texts alone."""
    first = run.evaluations[0] if run.evaluations else {}
    found = (prompt for prompt, file in zip(first.get("prompts", ()), first.get("sources", ()), strict=False) if file)
    return next(found, "make it night" if family(kind).needs_image else None)


def usage_code(folder: Path, args: FlowGRPOConfig, run: RunReader, merged: bool, source: str) -> str:
    """Python that loads the export and generates an image as the run's evaluations do."""
    kind = hub.pipeline_class(args.model)
    differs = family(kind)
    evaluated = args.evaluation_call_kwargs()
    call = {"num_inference_steps": args.evaluation.steps, **differs.call_kwargs}
    if differs.guidance:
        call[differs.guidance] = evaluated["guidance"] if evaluated["guidance"] > 1 else differs.no_guidance_value
    call |= {key: value for key, value in evaluated.items() if key != "guidance"}
    if takes(kind, "max_area") and {"height", "width"} <= call.keys():  # which would enlarge the image
        call.setdefault("max_area", call["height"] * call["width"])
    edited = _edited_prompt(kind, run)
    prompt = edited or (run.evaluations[0]["prompts"][0] if run.evaluations else "a photo of a cat")
    base = f"resolve_model({args.model!r})" if args.model in hub.BUNDLED_MODELS else repr(args.model)
    lines = ["import torch", f"from diffusers import {kind}"]
    lines += (
        ["from flow_grpo.policy.hub import resolve_model  # finds the embedded model"]
        if args.model in hub.BUNDLED_MODELS and not merged
        else []
    )
    lines += [] if merged or not (folder / hub.PEFT_WEIGHTS).is_file() else ["from peft import PeftModel"]
    dtype = run.machine.get("dtype", "bfloat16")
    lines += ["", 'device = "cuda" if torch.cuda.is_available() else "cpu"']
    lines += [f"pipe = {kind}.from_pretrained({repr(source) if merged else base}, torch_dtype=torch.{dtype}).to(device)"]
    lines += [] if merged else _loading(folder, source)
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


def _loading(folder: Path, source: str) -> list[str]:
    """Lines that load a LoRA of this format, with its scale."""
    if (folder / hub.PEFT_WEIGHTS).is_file():
        return [f"PeftModel.from_pretrained(pipe.transformer, {source!r})  # diffusers has no loader for this pipeline"]
    with safe_open(folder / hub.WEIGHTS, "np") as file:
        for_pipeline = all(name.startswith("transformer.") for name in list(file.keys()))
    if for_pipeline:
        loads = [f'pipe.load_lora_weights({source!r}, weight_name="{hub.WEIGHTS}", adapter_name="flow_grpo")']
        for file in sorted(folder.glob(hub.expert_weights("*"))):
            expert = file.stem.removeprefix(Path(hub.WEIGHTS).stem + "_")
            arguments = f'weight_name="{file.name}", adapter_name="flow_grpo", load_into_{expert}=True'
            loads.append(f"pipe.load_lora_weights(\n    {source!r}, {arguments}\n)")
        return [*loads, 'pipe.set_adapters("flow_grpo", 1.0)  # the LoRA\'s scale; 0 is the base model']
    load = f'pipe.transformer.load_lora_adapter(\n    {source!r}, weight_name="{hub.WEIGHTS}", prefix=None, adapter_name="flow_grpo"\n)'
    return [load, 'pipe.transformer.set_adapters("flow_grpo", 1.0)  # the LoRA\'s scale; 0 is the base model']
