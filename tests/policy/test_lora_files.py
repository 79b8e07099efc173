"""LoRAs that hold nothing, too little or NaN are refused in a sentence, wherever a LoRA is taken."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.cli_process import run
from support.embedded import short_run, stir, tiny_policy
from support.fake_run import synthetic_run

from flow_grpo.export.export import export
from flow_grpo.files import CHECKSUM
from flow_grpo.policy.hub import WEIGHTS
from flow_grpo.run_folder import checkpoint
from flow_grpo.run_folder.weights import load_trained_weights
from flow_grpo.trainer import FlowGRPOTrainer


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A LoRA that does something."""
    policy = tiny_policy()
    policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
    stir(policy)
    return policy.lora.save(tmp_path_factory.mktemp("good"))


def spoiled(good: Path, how: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a LoRA that something is wrong with."""
    tensors, metadata = load_file(good), dict(safe_open(good, "pt").metadata())
    del metadata[CHECKSUM]
    first = sorted(tensors)[0]
    if how in ("nan", "inf"):
        tensors[first] = tensors[first].clone()
        tensors[first].view(-1)[-1] = float(how)
    elif how == "half":
        tensors = {first: tensors[first]}
    elif how == "alpha":
        settings = json.loads(metadata["lora_adapter_metadata"])
        metadata["lora_adapter_metadata"] = json.dumps({**settings, "transformer.lora_alpha": float("nan")})
    elif how == "another part's":
        tensors = {name.replace("transformer.", "unet.", 1): value for name, value in tensors.items()}
    else:
        tensors = {}
    return tensors, metadata


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("nan", "holds values that are not finite, in 1 of 24 tensors; the first is transformer_blocks"),
        ("inf", "holds values that are not finite, in 1 of 24 tensors; the first is transformer_blocks"),
        ("half", r"is incomplete: transformer\.transformer_blocks.* has no up matrix"),
        ("alpha", "has an alpha that is not finite"),
        ("another part's", "has 12 layers, of which 0 have a place in StableDiffusion3Pipeline: unet"),
        ("empty", "holds no weights for the transformer of this model"),
    ],
)
def test_a_lora_that_something_is_wrong_with_is_refused_and_taken_off(good, tmp_path, how, sentence):
    tensors, metadata = spoiled(good, how)
    save_file(tensors, tmp_path / WEIGHTS, metadata)
    policy = tiny_policy()
    with pytest.raises(ValueError, match=f"^the LoRA .* {sentence}"):
        policy.load_lora(tmp_path)
    assert not policy.has_lora
    policy.load_lora(good)
    assert all(value.isfinite().all() for value in policy.trainable_parameters().values())


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_lora_is_refused(tmp_path, content):
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match="could not be loaded"):
        tiny_policy().load_lora(tmp_path)
    folder = synthetic_run(tmp_path / "run")
    (folder / "lora").mkdir()
    (folder / "lora" / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=f"{WEIGHTS} is damaged"):
        export(folder, tmp_path / "out")


@pytest.fixture
def nan(good, tmp_path) -> Path:
    """A run folder whose LoRA, and that of its checkpoint, are NaN in one place."""
    folder = synthetic_run(tmp_path / "run", steps=2, reward="brightness")
    (folder / "config.yaml").write_text(short_run(folder, "model=tiny").to_yaml())
    tensors, metadata = spoiled(good, "nan")
    (folder / "lora").mkdir()
    save_file(tensors, folder / "lora" / WEIGHTS, metadata)
    policy = tiny_policy()
    policy.load_lora(good)
    state = policy.adapter_state()
    next(iter(state.values())).view(-1)[0] = torch.nan
    checkpoint.save(folder / "checkpoints", 2, {"step": 2, "adapter": state, "ema": {}}, keep=1)
    return folder


def test_a_checkpoint_with_nan_is_refused(nan):
    with pytest.raises(ValueError, match=r"^the checkpoint .*step_000002 holds values that are not finite, in 1 of 24"):
        load_trained_weights(tiny_policy(), str(nan / "checkpoints" / "step_000002"))


def test_every_verb_refuses_a_lora_with_nan(nan, tmp_path):
    for options in ({}, {"checkpoint": 2}, {"merge": True}):
        with pytest.raises(ValueError, match="holds values that are not finite"):
            export(nan, tmp_path / "out", **options)
    (nan / "lora" / WEIGHTS).rename(nan / "lora" / "other.safetensors")
    with pytest.raises(ValueError, match="lora holds no LoRA: neither"):
        export(nan, tmp_path / "out")
    (nan / "lora" / "other.safetensors").rename(nan / "lora" / WEIGHTS)
    with pytest.raises(ValueError, match="holds values that are not finite"):
        FlowGRPOTrainer(args=short_run(tmp_path / "next", "model=tiny", f"lora.init_from={nan / 'lora'}"))
    words = ["--lora", str(nan / "lora")]
    for output in (
        run("sample", "a b", "--seeds", "1", "--steps", "1", *words, cwd=tmp_path, code=2),
        run("eval", str(nan), "--trust", "--steps", "1", "--limit", "1", cwd=tmp_path, code=2),
    ):
        assert "holds values that are not finite, in 1 of 24 tensors" in " ".join(output.split())
    assert not (tmp_path / "samples" / "grid.png").exists()


def test_a_file_with_a_matrix_of_two_names_is_refused(good, tmp_path):
    """Such as one of two adapters: which of them is meant, it does not say."""
    tensors = load_file(good)
    first = next(name for name in tensors if ".lora_A." in name)
    tensors[first.replace(".lora_A.", ".lora_A.old.")] = 2 * tensors[first]
    save_file(tensors, tmp_path / "both.safetensors")
    with pytest.raises(ValueError, match=r"has transformer\.\S+ twice, with \S+: give a file of one adapter"):
        tiny_policy().load_lora(tmp_path / "both.safetensors")
