"""`flow-grpo init` and `flow-grpo schema`: a commented config file, and the JSON schema of config files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flow_grpo.cli.console import say
from flow_grpo.cli.options import parse_rewards
from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import write_atomic


def init(
    file: Annotated[Path, typer.Argument(help="YAML file to write.", metavar="FILE")] = Path("config.yaml"),
    model: Annotated[str, typer.Option(help="Diffusers folder, hub id or bundled model to train.")] = "tiny",
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Reward to train on, with options as NAME={key: value}. Repeatable.", show_default="ocr"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a commented config for a model and a reward.

    [bold]flow-grpo init my.yaml --model stabilityai/stable-diffusion-3.5-medium --reward my_reward.py:bold[/bold]
    """
    from flow_grpo import rewards
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.config.loading import TRAINING_PROMPTS
    from flow_grpo.config.template import template

    if file.exists() and not force:
        raise FlowGRPOError(f"{file} exists: give another FILE, or --force to overwrite it.")
    options_of = parse_rewards(reward or ["ocr"])
    for name, options in options_of.items():
        rewards.check_options(name, **options)
    if model not in TRAINING_PROMPTS:
        # importing diffusers takes seconds
        from flow_grpo.policy import hub

        # the hub is asked only when the model is loaded
        if not hub.looks_like_hub_id(model):
            hub.resolve_model(model)
    write_atomic(file, template(model, options_of))
    FlowGRPOConfig.from_yaml(file)
    say(f"config: {file}; train it by: flow-grpo train {file}")


def schema() -> None:
    """Print the JSON schema of config files, with the documentation of every setting, for editors.

    [bold]flow-grpo schema > flow-grpo.schema.json[/bold]
    """
    from flow_grpo.config.template import json_schema

    print(json.dumps(json_schema(), indent=2))
