"""Run folders as training leaves them, made without a model: every number and picture of them is known."""

import json
import random
from pathlib import Path

import yaml
from PIL import Image, ImageDraw

from flow_grpo.config import FlowGRPOConfig

SIZE = (240, 160)
PROMPTS = [f'red text "WORD{i}" on a blue background' for i in range(20)]
REWARDS = [0.2, 0.9, 0.5, 0.8]  # of a group's images, in the order they were drawn
BEFORE, AFTER = (200, 30, 30), (30, 60, 200)


def synthetic_run(
    folder: Path,
    steps: int = 40,
    every: int = 10,
    prompts: list[str] = PROMPTS,
    rise: float = 0.1,
    reward: str = "ocr",
    warning: str | None = None,
    pictures: bool = True,
    last: int | None = None,
) -> Path:
    """A run whose reward rises by `rise` for every prompt alike, from about 0.5, while clip stays where it is.

    Pictures go from red to blue; prompt i scores 0.01 i above the first. After step `last`, of `steps`, the run has written nothing more.
    """
    folder.mkdir(parents=True)
    config = FlowGRPOConfig.from_yaml(
        "tiny_ocr", [f"steps={steps}", f"evaluation.every={every}", f"rewards={{'{reward}': 1.0}}"]
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    machine = {"device": "A CPU", "cores": 2, "processes": 1, "dtype": "float32", "flow_grpo": "0", "torch": "2"}
    (folder / "machine.json").write_text(json.dumps(machine))
    rows, noise = [], random.Random(0)
    for step in range((steps if last is None else last) + 1):
        share = step / steps
        if step:
            rows.append(training_row(step, 0.5 + rise * share + noise.uniform(-0.02, 0.02)))
        if step % every == 0:
            values = evaluation(folder, step, share, prompts, rise, reward, pictures)
            means = {f"eval/{name}": sum(v) / len(v) for name, v in values.items()}
            rows.append({"step": step, **means, "monitor/high_frequency_power": 0.05 - 0.01 * share, "time/evaluation": 1.0})
            rows[-1] |= {"monitor/diversity": 0.2 + 0.001 * step, "monitor/best_step": step}
        if pictures and (step == 1 or (step and step % every == 0)):
            groups(folder, step, prompts, reward)
    if warning:
        rows.append({"step": steps, "warning": warning, "fallen": "clip"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def training_row(step: int, reward: float) -> dict:
    return {
        "step": step,
        "reward": reward,
        "reward_std": 0.05,
        "frac_reward_zero_std": max(0.0, step / 100 - 0.1),
        "images": 32.0,
        "loss": 0.1,
        "kl": step / 1000,
        "ratio/max_deviation": 0.0,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "grad_norm": 0.5,
        "time/rollout": 1.0,
        "time/decode": 0.2,
        "time/reward": 0.3,
        "time/update": 0.5,
        "time/step": 2.0,
    }


def evaluation(
    folder: Path, step: int, share: float, prompts: list[str], rise: float, reward: str, pictures: bool
) -> dict[str, list[float]]:
    place = folder / "pictures" / f"step_{step:06d}"
    scores = [0.5 + rise * share + 0.01 * i for i in range(len(prompts))]
    values = {"reward": scores, reward: scores, "clip": [0.9] * len(prompts)}
    order = sorted(range(len(prompts)), key=lambda i: -scores[i])
    content = {
        "seeds": list(range(len(prompts))),
        "trained": [reward],
        "prompts": prompts,
        "values": values,
        "high_frequency_power": [0.05] * len(prompts),
        "diversity": [0.2] * len(prompts),
        "extremes": order[:4] + order[-4:],
    }
    if pictures:
        color = tuple(round(a + (b - a) * share) for a, b in zip(BEFORE, AFTER, strict=True))
        for i in {*range(8), *content["extremes"]}:
            save(place / f"prompt_{i:04d}.webp", color, f"prompt {i}\nstep {step}")
        (place / "evaluation.json").write_text(json.dumps(content))
    return values


def groups(folder: Path, step: int, prompts: list[str], reward: str) -> None:
    place, content = folder / "pictures" / f"step_{step:06d}", []
    mean = sum(REWARDS) / len(REWARDS)
    for number in range(2):
        for i, value in enumerate(REWARDS):
            save(place / f"group_{number}_{i:02d}.webp", (round(255 * value), 120, 90), f"{value}")
        advantage = [value - mean for value in REWARDS]
        rewards = {reward: REWARDS, "clip": REWARDS[::-1]}
        content.append(
            {"prompt": prompts[number], "images": 4, "reward": REWARDS, "rewards": rewards, "advantage": advantage}
        )
    (place / "groups.json").write_text(json.dumps({"groups": content}))


def save(file: Path, color: tuple[int, ...], text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", SIZE, color)
    ImageDraw.Draw(image).text((8, 8), text, fill="white")
    image.save(file, "WEBP", lossless=True)
