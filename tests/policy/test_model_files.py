"""A damaged or partial model folder is refused in one sentence: before anything large is read, by `train` and `plan` alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import TINY

from flow_grpo.errors import FlowGRPOError
from flow_grpo.plan.meta_pipeline import load_meta_pipeline
from flow_grpo.policy import hub
from flow_grpo.policy.comfyui import FAMILIES, all_weights
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.policy.loading import load_policy

quiet_libraries()
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
LAST = 1000  # bytes that a broken download lacks
Damage = Callable[[Path], object]


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(BUNDLED_MODELS["tiny"], tmp_path / "model"))


def with_values(file: str, **values: object) -> Damage:
    """The JSON file with other values; None takes one out."""

    def damage(model: Path) -> None:
        content = {**json.loads((model / file).read_text()), **values}
        (model / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return damage


def cut(file: str, last: int = LAST) -> Damage:
    return lambda model: (model / file).write_bytes((model / file).read_bytes()[:-last])


def written(file: str, text: str) -> Damage:
    return lambda model: (model / file).write_text(text)


def gone(file: str) -> Damage:
    return lambda model: shutil.rmtree(model / file) if (model / file).is_dir() else (model / file).unlink()


def without_a_tensor(file: str) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / file)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, model / file, {"format": "pt"})

    return damage


def in_shards(file: str, damage: Damage = lambda model: None) -> Damage:
    """The weights in two files with an index, and then the damage."""

    def split(model: Path) -> None:
        whole, tensors = model / file, load_file(model / file)
        names = [f"{whole.stem}-{part:05}-of-00002.safetensors" for part in (1, 2)]
        shards = {name: names[place % 2] for place, name in enumerate(tensors)}
        for shard in names:
            save_file({n: t for n, t in tensors.items() if shards[n] == shard}, whole.parent / shard, {"format": "pt"})
        whole.unlink()
        (model / f"{file}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
        damage(model)

    return split


INDEX = "model_index.json"
CONFIGS = [
    (written(INDEX, ""), "model_index.json is not valid JSON"),
    (lambda model: (model / INDEX).write_bytes(b"\xff\xfe\x00"), "model_index.json is UTF-16 text"),
    (written(INDEX, "[]"), "_class_name None, which is no pipeline"),
    (with_values(INDEX, _class_name=5), "_class_name 5, which is no pipeline"),
    (with_values(INDEX, _class_name="AutoencoderKL"), "'AutoencoderKL', which is no pipeline"),
    (with_values(INDEX, transformer=["diffusers", "Foo"]), "diffusers.Foo as transformer, and there is no such class"),
    (with_values(INDEX, transformer=["os", "system"]), "os.system as transformer, and there is no such class"),
    (with_values(INDEX, transformer=[1, 2]), "names no transformer"),
    (with_values(INDEX, vae=None), "names no vae"),
    (with_values(INDEX, tokenizer=[None, None]), "names no tokenizer"),
    (gone("tokenizer"), "names tokenizer, and its folder is missing or empty"),
    (gone("transformer/config.json"), "transformer"),
    (cut("transformer/config.json", 100), "transformer/config.json"),
    (written("scheduler/scheduler_config.json", "{"), "scheduler_config.json"),
    (with_values("transformer/config.json", num_layers="x"), "transformer: TypeError"),
    (with_values("text_encoder/config.json", hidden_size="x"), "text_encoder: .*hidden_size"),
]  # fmt: skip
WEIGHTS = [
    (gone(TRANSFORMER), "transformer: .*no file named"),
    (cut(TRANSFORMER), f"transformer: .*{TRANSFORMER}"),
    (without_a_tensor(TRANSFORMER), "transformer: its weights lack context_embedder.bias; copy or download"),
    (with_values("transformer/config.json", num_layers=1), "transformer: .*expected shape"),
    (in_shards(TRANSFORMER, gone(TRANSFORMER.replace(".s", "-00002-of-00002.s"))), "transformer: .*-00002-of-00002.safetensors"),
    (gone(TEXT), "text_encoder: .*no file named"),
    (cut(TEXT), "text_encoder: SafetensorError"),
    (with_values("text_encoder/config.json", num_hidden_layers=3), "text_encoder: its weights lack .* and 15 others"),
    (in_shards(TEXT, gone(TEXT.replace(".s", "-00001-of-00002.s"))), "text_encoder/model-00001-of-00002"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "sentence"), CONFIGS, ids=[sentence for _, sentence in CONFIGS])
def test_a_damaged_index_or_config_is_one_sentence_of_train_and_plan(model, damage, sentence):
    damage(model)
    for look in (
        lambda: load_policy(str(model), "cpu", "fp32"),
        lambda: load_meta_pipeline(str(model), torch.float32, cuda=False),
    ):
        with pytest.raises(ValueError, match=f"the model {model} could not be loaded: .*{sentence}") as error:
            look()
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("damage", "sentence"), WEIGHTS, ids=[sentence for _, sentence in WEIGHTS])
def test_damaged_or_partial_weights_are_one_sentence_before_any_are_read(model, monkeypatch, damage, sentence):
    damage(model)
    monkeypatch.setattr(hub.DiffusionPipeline, "from_pretrained", lambda *a, **k: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=f"the model {model} could not be loaded: .*{sentence}") as error:
        load_policy(str(model), "cpu", "fp32")
    assert len(str(error.value).splitlines()) == 1


def test_whole_folders_pass_in_one_file_or_in_shards(model):
    for file in (TRANSFORMER, TEXT):
        in_shards(file)(model)
    hub.check_weight_files(model)
    gone("text_encoder")(model)
    with pytest.raises(ValueError, match="text_encoder"):
        hub.check_weight_files(model)


def test_parts_that_will_not_be_loaded_need_no_weights(model):
    gone(TEXT)(model)
    hub.check_weight_files(model, left_out=["text_encoder"])


def renamed(model: Path, parts: tuple[str, ...], variant: str) -> None:
    for file in [file for part in parts for file in (model / part).glob("*.safetensors")]:
        file.rename(file.with_suffix(f".{variant}.safetensors"))


@pytest.mark.parametrize(
    "parts", [("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"), ("transformer",)]
)
def test_a_folder_with_files_of_a_variant_alone_is_loaded(model, parts):
    assert hub.weights_variant(model) is None
    renamed(model, parts, "fp16")
    assert hub.weights_variant(model) == "fp16"
    values = load_policy(str(model), "cpu", "fp32").pipe.transformer.state_dict()
    expected = load_policy("tiny", "cpu", "fp32").pipe.transformer.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_a_pickle_of_weights_is_loaded_without_log_lines(model, capfd):
    file = next((model / "vae").glob("*.safetensors"))
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    load_policy(str(model), "cpu", "fp32")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["sd3.5_medium.safetensors", "flux1-dev-Q4_K_S.gguf"])
def test_a_single_file_as_model_is_one_sentence(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (str(tmp_path / name), f"~/{name}"):
        with pytest.raises(
            ValueError, match=r"is a single file: put it, as \.safetensors, into the folder of its base model"
        ):
            load_policy(path)


def test_a_single_file_takes_the_place_of_its_folders_transformer(model):
    (weights,) = (model / "transformer").glob("*.safetensors")
    state = {name: value.float() * 1.5 for name, value in load_file(weights).items()}
    weights.unlink()
    file = model / "mine.safetensors"
    save_file(state, file)
    loaded = load_policy(str(file), "cpu", "fp32").pipe
    assert all(torch.equal(value, state[name]) for name, value in loaded.transformer.state_dict().items())
    assert hub.pipeline_class(str(file)) == "StableDiffusion3Pipeline"
    name, value = state.popitem()
    scaled = {name: value, "x.scale_weight": torch.ones(1)}
    for change, sentence in (({}, "holds no whole SD3Transformer2DModel by names"), (scaled, "its weights are scaled")):
        save_file({**state, **change}, file)
        with pytest.raises(FlowGRPOError, match=sentence):
            load_policy(str(file), "cpu", "fp32")


def test_a_single_file_has_the_names_of_its_authors(tmp_path):
    """As `export --merge --format comfyui` writes it, and the published checkpoints are."""
    pipe = TINY["flux2_klein"].build()
    pipe.save_pretrained(tmp_path)
    state = pipe.transformer.state_dict()
    save_file(all_weights(state, FAMILIES["Flux2Transformer2DModel"].whole), tmp_path / "klein.safetensors")
    loaded = load_policy(str(tmp_path / "klein.safetensors"), "cpu", "fp32").pipe.transformer.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    state.pop("x_embedder.weight")
    save_file(all_weights(state, FAMILIES["Flux2Transformer2DModel"].whole), tmp_path / "klein.safetensors")
    with pytest.raises(FlowGRPOError, match="holds no whole Flux2Transformer2DModel by names"):
        load_policy(str(tmp_path / "klein.safetensors"), "cpu", "fp32")


def test_a_model_in_the_home_folder_is_found(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert hub.resolve_model(f"~/{model.name}") == str(model)
