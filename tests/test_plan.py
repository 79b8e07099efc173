"""What a run will need is known from configs alone: bytes and operations are counted by hand, and nothing is loaded."""

import json
from pathlib import Path

import pytest
import torch
from families import TINY
from typer.testing import CliRunner

from flow_grpo import cli, hollow, plan
from flow_grpo.config import FlowGRPOConfig, shipped
from flow_grpo.plan import GB, Machine, Plan, fitting

PRESETS = sorted(file.stem for file in shipped("").glob("*.yaml"))
FAMILIES = {
    "sd35_medium_ocr_24gb": "sd3",
    "sd35_medium_ocr_awm": "sd3",
    "sd35_medium_ocr_nft": "sd3",
    "flux_dev_ocr": "flux",
    "flux2_klein_ocr": "flux2_klein",
    "qwen_image_ocr": "qwen_image",
    "z_image_ocr": "z_image",
    "sana_ocr": "sana",
}
WEIGHTS = ("*.safetensors", "*.bin", "*.onnx")


def follow(network: torch.nn.Module, x: torch.Tensor, backward: bool) -> tuple[int, int]:
    followed, alive, counter = (
        hollow.Followed(network.to("meta"), torch.float32, cuda=False),
        hollow.Alive(),
        hollow.Operations(),
    )
    for mode in (alive, counter):
        with followed.counted(mode, backward):
            out = followed(x)
    assert out.shape == (len(x), 5)
    assert not out.any()
    return alive.peak, counter.total


def test_bytes_and_operations_are_those_of_the_matrices():
    layers = torch.nn.Sequential(torch.nn.Linear(7, 11, bias=False), torch.nn.Linear(11, 5, bias=False)).requires_grad_(
        False
    )
    x = torch.zeros(3, 7)
    peak, operations = follow(layers, x, backward=False)
    assert operations == 2 * 3 * (7 * 11 + 11 * 5)
    assert peak == 4 * 3 * (11 + 5), "the hidden values and the output"
    layers[0].weight.requires_grad_(True)
    _, both = follow(layers, x, backward=True)
    assert both == operations + 2 * 3 * 11 * 5 + 2 * 3 * 7 * 11, "back through the second, and the first one's gradient"


def test_checkpointing_takes_less_memory_and_more_operations():
    found = {}
    for checkpointing in (False, True):
        args = FlowGRPOConfig.read("tiny_ocr", [f"memory.checkpointing={checkpointing}"])
        found[checkpointing] = Plan(args, cuda=True).forecast(64)
    assert found[True].passing["update"] < 0.7 * found[False].passing["update"]
    assert found[True].operations > 1.05 * found[False].operations


def test_a_forecast_is_linear_in_the_rows_and_the_largest_fits():
    forecasts = Plan(FlowGRPOConfig.read("tiny_ocr"), cuda=True)
    for memory in (0.8 * GB, 1.5 * GB):
        largest = forecasts.largest(memory)
        assert forecasts.forecast(largest).peak <= memory < forecasts.forecast(largest + 2).peak


@pytest.mark.parametrize(("count", "updates"), [(1, 1), (3, 2), (8, 1)])
def test_sizes_divide(count, updates):
    args = fitting(FlowGRPOConfig.read("tiny_ocr", [f"updates={updates}"]), 50, count)
    assert args.prompts_per_step % (count * updates) == 0
    assert args.prompts_per_step * args.images_per_prompt // count % args.microbatch == 0
    assert args.microbatch <= 50


def test_a_kl_needs_the_reference_beside_the_graph():
    without, with_kl = (Plan(FlowGRPOConfig.read("tiny_ocr", [f"objective.kl_weight={w}"]), cuda=True) for w in (0, 0.1))
    one, other = without.forecast(8), with_kl.forecast(8)
    assert other.passing["update"] == one.passing["update"] + one.passing["rollout"]
    assert other.operations > one.operations


@pytest.fixture(scope="module")
def configs_alone(tmp_path_factory):
    """Checkpoints of the presets' families without their weights."""
    folders = {}
    for name in set(FAMILIES.values()):
        folders[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        TINY[name].build().save_pretrained(folders[name])
        for kind in WEIGHTS:
            for file in folders[name].rglob(kind):
                file.unlink()
    return folders


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_preset_passes_a_dry_run_on_the_configs_of_its_model(configs_alone, preset):
    """The real config with a small model of its family in place of the hub's, of which there are no weights to load."""
    tiny, folder = TINY[FAMILIES[preset]], configs_alone[FAMILIES[preset]]
    size = [f"height={tiny.size[0]}", f"width={tiny.size[1]}", f"pipeline={json.dumps(tiny.call)}"]
    result = CliRunner().invoke(cli.app, ["train", preset, f"model={folder}", "microbatch=2", *size, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "The model will take" in result.output
    assert "The settings go together; nothing was trained." in result.output


@pytest.mark.parametrize("preset", [name for name in FAMILIES if FlowGRPOConfig.read(name).lora.targets])
def test_every_lora_target_of_a_preset_is_a_layer_of_its_model(preset):
    modules = TINY[FAMILIES[preset]].build().transformer.named_modules()
    layers = [f".{name}" for name, module in modules if isinstance(module, torch.nn.Linear)]
    for target in FlowGRPOConfig.read(preset).lora.targets:
        assert any(name.endswith(f".{target}") for name in layers), target


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_a_dry_run_where_the_hub_is_out_of_reach(preset, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(cli.app, ["train", preset, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "The settings go together" in result.output


def test_plan_says_what_a_gpu_will_hold():
    result = CliRunner().invoke(cli.app, ["plan", "tiny_grpo", "--gpu", "rtx 4090", "--gpus", "3"])
    assert result.exit_code == 0, result.output
    assert "3 x RTX 4090, 24 GB" in result.output
    assert "prompts_per_step=33" in result.output, "the next number that three processes can share"


def test_an_unknown_gpu_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="there is no GPU Voodoo in the list: give one of A100"):
        Machine.named("Voodoo", None, 1)


def test_nothing_fits_into_no_memory(capsys):
    small = Machine("small", 0.5 * GB, 1e12)
    from rich.console import Console

    assert not plan.print_plan(Console(), FlowGRPOConfig.read("tiny_ocr"), small)
    assert "It does not fit" in capsys.readouterr().out


def test_no_weights_are_read(monkeypatch):
    """Not of the model: a plan opens its json files alone."""
    import safetensors.torch

    monkeypatch.setattr(safetensors.torch, "load_file", lambda *a, **k: pytest.fail("weights were read"))
    opened = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or real(self, *a, **k))
    Plan(FlowGRPOConfig.read("tiny_ocr"), cuda=False)
    assert not [file for file in opened if file.suffix == ".safetensors"]
