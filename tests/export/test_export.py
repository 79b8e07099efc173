"""What a run is shared as: it loads where people load such things, its card tells what is so, and nobody's files are lost."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.embedded import CALL, short_run, stir, tiny_policy
from support.fake_run import synthetic_run
from support.families import TINY
from support.hub_server import deleted, local_hub, settings, uploaded
from support.paths import ROOT

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import LoraConfig
from flow_grpo.evaluation.generate import generate_images
from flow_grpo.export import model_card
from flow_grpo.export.export import check_push, export
from flow_grpo.files import check_safetensors
from flow_grpo.policy import hub, lora_file
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.loading import load_policy, save_merged
from flow_grpo.policy.lora import Lora
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.run_folder.weights import load_trained_weights
from flow_grpo.text import plain
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer

HOSTILE = [
    "<script>alert(1)</script> | `x` ```",
    "---\\ninjected: true | [a](http://evil.example) ![b](http://evil.example/x.png)",
    "yaml: {a: [1], b: *c} # ' \" %",
    "<img src=x onerror=alert(1)> **bold** \u202eback",
]
CAT = ['red text "CAT" on a blue background']
A_LAYER = {f"transformer.q.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of two steps, of which the first is a checkpoint, too."""
    folder = tmp_path_factory.mktemp("share")
    prompts = [*HOSTILE, *(f'red text "WORD{i}" on a blue background' for i in range(4))]
    (folder / "held_out.txt").write_text("\n".join(prompts))
    settings = [
        "save_every=1",
        "keep_checkpoints=3",
        f"evaluation.prompts={folder / 'held_out.txt'}",
        "evaluation.max_prompts=8",
    ]
    more = ["evaluation.every=1", "optimizer.lr=0.01", "trackers=[]", "ema_decay=0.5"]
    FlowGRPOTrainer(args=short_run(folder / "run", "model=tiny", *settings, *more)).train()
    return folder / "run"


@pytest.fixture(scope="module")
def shared(run) -> Path:
    export(run, run.parent / "signs")
    return run.parent / "signs"


@pytest.fixture(scope="module")
def merged(run) -> Path:
    export(run, run.parent / "whole", merge=True)
    return run.parent / "whole"


def differences(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the LoRA in a file adds to each layer, by the tensors alone."""
    downs = {name.removesuffix(".lora_A.weight"): down for name, down in weights.items() if "lora_A" in name}
    return {
        lora_file.strip_prefixes(name): weights[f"{name}.lora_B.weight"].double() @ down.double()
        for name, down in downs.items()
    }


def test_peft_loads_an_export_in_its_format_with_its_full_strength(run, tmp_path):
    export(run, tmp_path / "signs", form="peft")
    right = differences(load_file(run / "lora" / hub.WEIGHTS))
    model = peft.PeftModel.from_pretrained(tiny_policy().pipe.transformer, tmp_path / "signs")
    layers = {name: one for name, one in model.named_modules() if hasattr(one, "get_delta_weight")}
    assert {lora_file.strip_prefixes(name) for name in layers} == right.keys()
    for name, layer in layers.items():
        added = layer.get_delta_weight("default").double()
        wanted = right[lora_file.strip_prefixes(name)]
        torch.testing.assert_close(added, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert "PeftModel.from_pretrained(pipe.transformer, 'signs')" in (tmp_path / "signs" / model_card.CARD).read_text()


def test_bf16_halves_the_file_and_rounds_each_matrix_once(run, shared, tmp_path):
    export(run, tmp_path / "signs", dtype="bf16")
    weights, exact = (load_file(folder / hub.WEIGHTS) for folder in (tmp_path / "signs", shared))
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    sizes = [sum(value.nbytes for value in tensors.values()) for tensors in (weights, exact)]
    assert sizes[0] * 2 == sizes[1]
    rounding = 2.0**-8  # of a number with 8 significant bits
    largest = differences({name: value.abs() for name, value in exact.items()})
    for name, added in differences(weights).items():
        off = (added - differences(exact)[name]).abs()
        assert (off <= (2 * rounding + rounding**2) * largest[name]).all()
    again = tiny_policy()
    again.load_lora(tmp_path / "signs")


def test_an_export_for_comfyui_has_its_own_file_and_picture(run, tmp_path):
    export(run, tmp_path / "signs", checkpoint=2, form="comfyui", dtype="bf16")
    assert {file.name for file in (tmp_path / "signs").glob("signs*")} == {"signs.safetensors", "signs.png"}
    assert not (tmp_path / "signs" / hub.WEIGHTS).exists()
    manifest = json.loads((tmp_path / "signs" / layout.EXPORT_MANIFEST).read_text())
    assert {"signs.safetensors", "signs.png"} <= set(manifest["files"])
    picture = Image.open(tmp_path / "signs" / "signs.png")
    assert picture.size == (240, 96)
    card = (tmp_path / "signs" / model_card.CARD).read_text()
    assert "In ComfyUI: copy `signs.safetensors` to `models/loras`" in card
    assert 'weight_name="signs.safetensors"' in card
    with safe_open(tmp_path / "signs" / "signs.safetensors", "pt") as opened:
        header, names = opened.metadata(), list(opened.keys())
    assert all(name.startswith("transformer.") for name in names)
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "4")
    assert header["modelspec.title"] == header["ss_output_name"] == "signs"
    assert header["modelspec.architecture"] == "stable-diffusion-3/lora"
    assert header["ss_base_model_version"] == "sd3"
    assert header["modelspec.resolution"] == "80x32"
    assert re.fullmatch(r"0x[0-9a-f]{64}", header["modelspec.hash_sha256"])
    assert "lora_adapter_metadata" not in header, "a rank for all layers would be wrong where some are fused"
    policy = tiny_policy()
    policy.load_lora(tmp_path / "signs")
    assert len(policy.adapter_state()) == len(names)


def test_a_merged_transformer_for_comfyui_is_one_file(run, tmp_path):
    for form in ("diffusers", "comfyui"):
        export(run, tmp_path / form, merge=True, form=form)
    assert {file.name for file in (tmp_path / "comfyui").glob("*.*")} >= {"comfyui.safetensors", "comfyui.png", "README.md"}
    assert not (tmp_path / "comfyui" / "model_index.json").exists()
    one = load_file(tmp_path / "comfyui" / "comfyui.safetensors")
    (transformer,) = (tmp_path / "diffusers" / "transformer").glob("*.safetensors")
    whole = load_file(transformer)
    assert one.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in one.items())
    check_safetensors(tmp_path / "comfyui" / "comfyui.safetensors")
    with safe_open(tmp_path / "comfyui" / "comfyui.safetensors", "pt") as opened:
        assert opened.metadata()["modelspec.architecture"] == "stable-diffusion-3"
    card = (tmp_path / "comfyui" / model_card.CARD).read_text()
    assert "In ComfyUI: copy `comfyui.safetensors` to `models/diffusion_models`" in card
    assert "from_pretrained" not in card


def test_a_lora_of_the_papers_code_is_trained_on_and_exported(tmp_path):
    """Flow-GRPO's published LoRAs are what peft saves of a transformer with this config."""
    joint = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=[f"attn.{name}" for name in joint]
    )
    theirs = peft.get_peft_model(tiny_policy().pipe.transformer, config)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    layers = {name: one for name, one in theirs.named_modules() if hasattr(one, "get_delta_weight")}
    start = {lora_file.strip_prefixes(name): one.get_delta_weight("default").detach() for name, one in layers.items()}
    folder = tmp_path / "checkpoint-60" / "lora"
    theirs.save_pretrained(folder)
    settings = [f"lora.init_from={folder}", "optimizer.lr=1.0e-5", "trackers=[]", "evaluation.prompts=null"]
    FlowGRPOTrainer(args=short_run(tmp_path / "run", "model=tiny", *settings)).train()
    export(tmp_path / "run", tmp_path / "signs", form="comfyui")
    trained = differences(load_file(tmp_path / "signs" / "signs.safetensors"))
    assert trained.keys() == start.keys()
    moved = [float((trained[name] - difference).norm() / difference.norm()) for name, difference in start.items()]
    assert max(moved) < 0.01, "from the difference that their file has, alpha / rank included"
    assert sum(change > 1e-6 for change in moved) > len(moved) / 2, "and trained on"


def test_a_model_that_comfyui_does_not_have_is_one_sentence(run, tmp_path):
    folder, model = synthetic_run(tmp_path / "run"), tmp_path / "model"
    model.mkdir()
    index = {"_class_name": "SanaPipeline", "transformer": ["diffusers", "SanaTransformer2DModel"]}
    (model / "model_index.json").write_text(json.dumps(index))
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("model: tiny", f"model: {model}"))
    (folder / "lora").mkdir()
    save_file(A_LAYER, folder / "lora" / hub.WEIGHTS)
    with pytest.raises(
        ValueError, match="ComfyUI has no model of the kind SanaTransformer2DModel, or its names are not known"
    ):
        export(folder, tmp_path / "out", form="comfyui")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--format peft is for a LoRA, and this exports the whole model"):
        export(run, tmp_path / "out", merge=True, form="peft")


@pytest.mark.parametrize("name", ["wan22", "hunyuan_video"])
def test_layers_of_comfyui_are_made_of_those_of_the_model(name, tmp_path):
    """Two experts are two files; where only some parts of a layer were trained, the model's config has the size of the others."""
    pipe = TINY[name].build()
    pipe.save_pretrained(tmp_path / "model")
    experts = [one for one in ("transformer_2",) if getattr(pipe, one, None) is not None]
    lora = Lora(pipe, torch.float32, ("attn1.to_q", "attn.to_q"), experts)
    lora.add(4, 8, None, seed=0)
    folder = synthetic_run(tmp_path / "run")
    lora.save(folder / "lora")
    (folder / "config.yaml").write_text(
        (folder / "config.yaml").read_text().replace("model: tiny", f"model: {tmp_path / 'model'}")
    )
    export(folder, tmp_path / "signs", form="comfyui")
    files = [f"signs_{kind}_noise" for kind in ("high", "low")] if experts else ["signs"]
    for file in files:
        weights = load_file(tmp_path / "signs" / f"{file}.safetensors")
        assert all(part.startswith("diffusion_model.") for part in weights)
    if not experts:
        assert weights["diffusion_model.single_blocks.0.linear1.lora_B.weight"].shape == (3 * 32 + 128, 4)
        assert "pipe.load_lora_weights" not in (tmp_path / "signs" / model_card.CARD).read_text()
    else:
        with pytest.raises(ValueError, match="peft's format holds the LoRA of one transformer, and this model has 2"):
            export(folder, tmp_path / "peft", form="peft")


def html(folder: Path) -> str:
    text = ModelCard.load(folder / model_card.CARD).text
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def test_the_lora_is_the_runs_and_the_hub_reads_what_it_is(run, shared):
    weights, of_run = load_file(shared / hub.WEIGHTS), load_file(run / "lora" / hub.WEIGHTS)
    assert weights.keys() == of_run.keys()
    assert all(torch.equal(value, of_run[name]) for name, value in weights.items())
    with safe_open(shared / hub.WEIGHTS, "pt") as opened:
        header = opened.metadata()
    assert header["modelspec.title"] == shared.name
    assert plain(HOSTILE[0]) in header["modelspec.description"]
    data = ModelCard.load(shared / model_card.CARD).data
    assert (data.library_name, data.pipeline_tag, data.base_model_relation) == ("diffusers", "text-to-image", "adapter")
    assert data.license == "apache-2.0"
    assert "base_model" not in data.to_dict(), "the embedded model is not on the hub"
    assert {"lora", "flow-grpo"} <= set(data.tags)
    last = [row for row in read_metrics(run) if "eval/reward" in row][-1]
    metrics = {result.metric_type: result.metric_value for result in data.eval_results}
    assert metrics == {"brightness": round(last["eval/reward"], 4)}, "no path of this machine in its name"
    for one, prompt in zip(data.widget, HOSTILE, strict=False):
        assert one["text"] == plain(prompt)
        assert Image.open(shared / one["output"]["url"]).size == (240, 96)


def test_a_run_with_odd_rows_is_exported_all_the_same(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert "eval/reward" in last
    lone = {"step": last["step"], "eval/reward": 0.5, "monitor/best_step": float("nan")}  # without the other measures
    odd = [
        {**last, "monitor/best_step": "two", "time/evaluation": 1e308},
        lone,
        [1],
        {"reward": 1},
        {"step": 2, "loss": None},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines, *map(json.dumps, odd), '{"step": 2, "rew']))
    export(tmp_path / "run", tmp_path / "out", best=True)
    assert json.loads((tmp_path / "out" / layout.EXPORT_MANIFEST).read_text())["step"] == last["monitor/best_step"]


def test_prompts_stay_text_wherever_they_stand(shared):
    page = html(shared)
    for tag in ("<script", "<img src=x", "<strong>bold", 'href="http://evil', 'src="http://evil', "\u202e"):
        assert tag not in page, tag
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | `x` ```</code>" in page
    rows = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)
    assert {row.count("<td") + row.count("<th") for row in rows} == {3, 5}, "no prompt broke a table"
    assert "injected" not in ModelCard.load(shared / model_card.CARD).data.to_dict()
    assert yaml_of(shared) == (shared / "config.yaml").read_text().strip()


def yaml_of(folder: Path) -> str:
    text = ModelCard.load(folder / model_card.CARD).text
    return re.search(r"```yaml\n(.*?)\n```", text, re.DOTALL).group(1)


def test_the_cards_python_loads_it_and_draws_its_images(run, shared, monkeypatch):
    monkeypatch.chdir(shared.parent)
    text = re.search(r"(`{3,})python\n(.*?)\n\1", (shared / model_card.CARD).read_text(), re.DOTALL).group(2)
    namespace: dict = {}
    exec(text, namespace)
    policy = load_policy("tiny", "cpu", "fp32", str(run / "lora"))
    policy.pipe.set_progress_bar_config(disable=True)
    call = {**CALL, "num_inference_steps": 3, "generator": torch.Generator().manual_seed(0)}
    expected = policy.pipe(plain(HOSTILE[0]), **call).images[0]
    assert np.array_equal(np.asarray(namespace["image"]), np.asarray(expected))
    namespace["pipe"].set_adapters("flow_grpo", 0.0)
    base = namespace["pipe"](plain(HOSTILE[0]), **{**call, "generator": torch.Generator().manual_seed(0)}).images[0]
    assert not np.array_equal(np.asarray(base), np.asarray(expected))


def test_a_lora_is_found_wherever_a_run_or_an_export_has_it(run, shared, tmp_path):
    policy = tiny_policy()

    def state(place: Path) -> dict[str, torch.Tensor]:
        if policy.has_lora:
            policy.lora.remove()
        load_trained_weights(policy, str(place))
        return policy.adapter_state()

    def folded(place: Path) -> dict[str, torch.Tensor]:
        """A checkpoint's weights with alpha / rank = 2 in the second matrix."""
        return {name: 2 * value if "lora_B" in name else value for name, value in state(place).items()}

    last = folded(run / "checkpoints" / "step_000002")
    for place in (run, run / "lora", shared, shared / hub.WEIGHTS):
        again = state(place)
        assert all(torch.equal(again[name], value) for name, value in last.items()), place
    first = folded(run / "checkpoints" / "step_000001")
    assert any(not torch.equal(first[name], value) for name, value in last.items())
    export(run, tmp_path / "first", checkpoint=1)
    export(run, tmp_path / "best", best=True)
    for place, other in ((tmp_path / "first", first), (tmp_path / "best", state(run / "best"))):
        again = state(place)
        assert all(torch.equal(again[name], value) for name, value in other.items()), place
    assert "for 1 of 2 planned steps" in html(tmp_path / "first")
    for place in (run, run / "best", run / "checkpoints" / "step_000001", shared, shared / hub.WEIGHTS):
        assert layout.config_near(str(place)).read_text() == (run / "config.yaml").read_text()
    assert layout.config_near("someone/lora") is None


def test_the_merged_model_draws_the_loras_images_and_has_no_adapter(run, merged):
    with_lora = load_policy("tiny", "cpu", "fp32", str(run), **CALL)
    whole = load_policy(str(merged), "cpu", "fp32", **CALL)
    assert not whole.has_lora
    for part in ("vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json", "model_index.json"):
        assert (merged / part).read_bytes() == (hub.BUNDLED_MODELS["tiny"] / part).read_bytes(), "the rest is the base's own"
    pictures = [generate_images(policy, CAT * 2, [1, 2], 4) for policy in (with_lora, whole)]
    torch.testing.assert_close(pictures[0], pictures[1], rtol=0, atol=2e-5)
    with with_lora.base_model():
        assert (generate_images(with_lora, CAT * 2, [1, 2], 4) - pictures[0]).abs().max() > 1e-2
    data = ModelCard.load(merged / model_card.CARD).data
    assert not any(str(hub.BUNDLED_MODELS["tiny"]) in file.read_text() for file in merged.rglob("*.json")), (
        "where it lay is private"
    )
    assert data.base_model_relation == "finetune"
    assert "lora" not in data.tags
    assert f"StableDiffusion3Pipeline.from_pretrained('{merged.name}'" in (merged / model_card.CARD).read_text()
    with pytest.raises(ValueError, match="is a whole model, not a LoRA: give it as --model"):
        with_lora.load_lora(merged)


def test_a_run_of_all_weights_is_exported_as_the_model_that_it_trained(tmp_path):
    args = short_run(tmp_path / "run", "lora=null", "optimizer.lr=1.0e-3", "trackers=[]", "steps=1")
    trainer = FlowGRPOTrainer(args=args)
    trainer.train()
    export(tmp_path / "run", tmp_path / "out")
    whole = load_policy(str(tmp_path / "out"), "cpu", "fp32").pipe.transformer.state_dict()
    with trainer.policy.ema.applied():
        trained = trainer.policy.pipe.transformer.state_dict()
        assert all(torch.equal(whole[name], value) for name, value in trained.items())
    assert "All weights of the transformer" in (tmp_path / "out" / model_card.CARD).read_text()


def test_merging_rounds_once_to_the_dtype_of_the_base(tmp_path):
    policy = tiny_policy("bf16")
    policy.add_lora(4, 8, ["to_q"], seed=0)
    stir(policy)
    parts = policy.trainable_parameters()
    wanted = {}
    for name, down in parts.items():
        if ".lora_A." in name:
            layer = name.partition(".lora_A.")[0]
            base = policy.pipe.transformer.get_submodule(layer).get_base_layer().weight.float()
            wanted[f"{layer}.weight"] = (base + 2 * parts[name.replace("lora_A", "lora_B")] @ down).bfloat16()
    save_merged(policy, tmp_path, "tiny")
    merged = load_policy(str(tmp_path), "cpu", "bf16").pipe.transformer.state_dict()
    assert wanted
    for name, value in wanted.items():
        off = (merged[name].float() - value.float()).abs()
        assert (off > 0).float().mean() < 1e-3, "but for sums that lie between two bf16 numbers"
        assert (off <= 2**-8 * value.float().abs() + 1e-30).all()


@pytest.mark.parametrize("merge", [False, True])
def test_the_card_gives_the_rank_and_alpha_of_the_weights_whatever_the_config_has(run, tmp_path, merge):
    """As `lora.init_from` and a LoRA given in Python leave the config's without effect."""
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("  rank: 4\n", "  rank: 32\n").replace("  alpha: 8.0\n", "  alpha: 64.0\n"))
    assert "rank: 32" in config.read_text()
    export(tmp_path / "run", tmp_path / "out", merge=merge)
    card = (tmp_path / "out" / model_card.CARD).read_text()
    assert "- LoRA of rank 4, alpha 4;" in card
    assert "advantage `grpo`, transition `cps`, " in card, "of an objective on sampling steps"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"r": 8, "lora_alpha": 3.5}', {"rank": 8, "alpha": 3.5}),
        ('{"r": "**8**", "lora_alpha": null}', {"rank": 32, "alpha": 64.0}),
        ("[1]", {"rank": 32, "alpha": 64.0}),
        ("{", {"rank": 32, "alpha": 64.0}),
    ],
)
def test_of_a_lora_that_does_not_tell_them_rank_and_alpha_are_the_configs(tmp_path, content, found):
    nothing = tmp_path / "nothing"
    (tmp_path / hub.ADAPTER_CONFIG).write_text(content)
    assert model_card.rank_and_alpha(LoraConfig(), [nothing, tmp_path]) == found
    assert model_card.rank_and_alpha(None, [tmp_path]) is None


def test_an_export_replaces_its_own_files_alone(run, tmp_path):
    out = tmp_path / "out"
    assert not any("replaced" in line for line in export(run, out, merge=True))
    (out / "notes.txt").write_text("mine")
    lines = export(run, out)
    assert f"replaced: the earlier export of step 2 of the run {run.name} in {out}" in lines
    assert f"LoRA of step 2: {out / hub.WEIGHTS}" in lines
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / hub.WEIGHTS).is_file()
    assert {file.name for file in out.iterdir() if file.is_dir()} == {"pictures"}, "nothing of the former export is left"
    assert not list(tmp_path.glob(".*")), "nor what it was made in"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "README.md").write_text("theirs")
    with pytest.raises(ValueError, match="holds files that no export wrote: give an empty or new folder"):
        export(run, theirs)
    (theirs / layout.EXPORT_MANIFEST).write_text(json.dumps({"files": ["../out/notes.txt"], "step": 1, "run": "a"}))
    export(run, theirs)
    assert (out / "notes.txt").is_file(), "a list of files reaches no other folder"


def test_what_is_not_there_is_a_clear_error(run, tmp_path, monkeypatch):
    bare = synthetic_run(tmp_path / "bare")
    for words, sentence in (
        ({}, "is not finished, so it has no lora/: export --best, or a --checkpoint"),
        ({"best": True}, "has no best/"),
        ({"checkpoint": 7}, "keeps no checkpoint of step 7; it has none"),
        ({"best": True, "checkpoint": 7}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=sentence):
            export(bare, tmp_path / "out", **words)
    with pytest.raises(ValueError, match="it has those of steps 0, 1, 2"):
        export(run, tmp_path / "out", checkpoint=7)
    with pytest.raises(ValueError, match="of a run that is not finished, its best/"):
        tiny_policy().load_lora(bare)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr("flow_grpo.export.export.get_token", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir(exist_ok=True)  # a folder of that name changes nothing
    with pytest.raises(ValueError, match="needs a token: log in by `hf auth login`, or set HF_TOKEN"):
        check_push("me/signs")
    with pytest.raises(ValueError, match="is no name for the hub"):
        check_push("me/my signs/x")
    with pytest.raises(ValueError, match="is no name for the hub"):
        check_push("signs")


def test_the_card_says_what_the_monitor_reported_and_what_is_not_known(tmp_path):
    folder = synthetic_run(tmp_path / "run", warning="clip has <b>fallen</b>", reward="my_reward.py:redness")
    (folder / "lora").mkdir()
    save_file(A_LAYER, folder / "lora" / hub.WEIGHTS)
    settings = (folder / "config.yaml").read_text()
    for model, licence, link in (
        ("stabilityai/stable-diffusion-3.5-medium", "other", "/stable-diffusion-3.5-medium/blob/main/LICENSE.md"),
        ("Qwen/Qwen-Image", "apache-2.0", None),
        ("someone/model", None, None),
    ):
        (folder / "config.yaml").write_text(settings.replace("model: tiny", f"model: {model}"))
        export(folder, tmp_path / "out")
        data, page = ModelCard.load(tmp_path / "out" / model_card.CARD).data, html(tmp_path / "out")
        assert (data.base_model, data.license) == (model, licence)
        assert (data.license_link or "").endswith(link or "")
        assert "&lt;b&gt;fallen&lt;/b&gt;" in page
        assert "<b>" not in page
        assert "no reward that it was not trained on" not in page
        assert "0.595</td>" in page
        assert "0.695</td>" in page
        assert "<code>redness</code>: a custom reward. Its licence is not known here." in page.replace("&#x27;", "'")
        assert "this package's licence" in page.replace("&#x27;", "'"), "clip's"
    assert "see its page" in page


@pytest.mark.parametrize(
    ("pipeline", "task", "argument"),
    [
        ("QwenImageEditPlusPipeline", "image-to-image", '    image=load_image("source.png"),\n'),
        ("QwenImagePipeline", "text-to-image", ""),
        ("WanPipeline", "text-to-video", ""),
    ],
)
def test_the_card_says_what_the_pipeline_makes_of_what(tmp_path, pipeline, task, argument):
    folder, model = synthetic_run(tmp_path / "run"), tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("model: tiny", f"model: {model}"))
    (folder / "lora").mkdir()
    save_file(A_LAYER, folder / "lora" / hub.WEIGHTS)
    export(folder, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / model_card.CARD)
    assert card.data.pipeline_tag == task
    assert {result.task_type for result in card.data.eval_results} == {task}
    assert [tag for tag in card.data.tags if "-to-" in tag] == [task]
    assert card.text.count("load_image") == (2 if argument else 0)
    assert argument in card.text


@pytest.mark.parametrize("merge", [False, True])
def test_the_cards_python_names_the_variant_of_the_base_models_files(run, tmp_path, merge):
    base = shutil.copytree(BUNDLED_MODELS["tiny"], tmp_path / "base")
    for file in [*base.rglob("*.safetensors")]:
        file.rename(file.with_suffix(".fp16.safetensors"))
    args, run_reader = FlowGRPOConfig.from_yaml(run / "config.yaml"), RunReader(run)
    args = args.model_copy(update={"model": str(base)})
    folder = tmp_path / "out"
    if merge:
        save_merged(load_policy(str(base), "cpu", "fp32", str(run / "lora")), folder, str(base))
    else:
        shutil.copytree(run / "lora", folder)
    code = model_card.usage_code(folder, args, run_reader, merge, str(folder))
    loading = next(line for line in code.splitlines() if ".from_pretrained(" in line)
    namespace: dict = {"device": "cpu", "torch": torch, "StableDiffusion3Pipeline": StableDiffusion3Pipeline}
    exec(loading, namespace)
    assert "variant='fp16'" in loading


@pytest.mark.slow
def test_pushing_gives_the_hub_the_exports_files_and_a_refusal_is_a_clear_error(run, tmp_path):
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def pushed(name: str) -> subprocess.CompletedProcess:
        words = ["export", str(run), "--out", str(tmp_path / "signs"), "--push", name, "--private"]
        command = [sys.executable, "-m", "flow_grpo", *words]
        return subprocess.run(command, capture_output=True, text=True, env={**environment, **settings(server)})

    with local_hub() as server:
        done, refused, public = pushed("me/signs"), pushed("them/signs"), pushed("known/signs")
    unreachable = pushed("me/signs")
    assert unreachable.returncode == 75, unreachable.stderr
    assert "but the hub did not take it as me/signs: " in unreachable.stderr
    assert done.returncode == 0, done.stderr
    assert "/me/signs" in done.stdout.splitlines()[-1]
    assert not done.stderr
    (_, token, made), *_ = [one for one in server.asked if one[0] == "/api/repos/create"]
    assert token == "Bearer hf_secret"
    assert {"private": True, "visibility": "private"}.items() & json.loads(made).items(), "as the client's version says it"
    sent, dropped = uploaded(server), deleted(server)
    assert sent.keys() == set(json.loads((tmp_path / "signs" / layout.EXPORT_MANIFEST).read_text())["files"])
    assert sent[hub.WEIGHTS] == (run / "lora" / hub.WEIGHTS).read_bytes()
    assert b"load_lora_weights('me/signs'" in sent[model_card.CARD]
    assert dropped == ["transformer/m[1].safetensors"], "what the former export alone has there, and nothing of anybody else"
    assert "the repository is public: make it private" in public.stderr
    assert refused.returncode == 2
    assert "but the hub did not take it as them/signs: " in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
