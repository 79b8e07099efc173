"""Folders of strangers: what they name or link to outside of them is not shown, and no file of theirs ends in a traceback or never."""

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.fake_run import synthetic_run

from flow_grpo.config.loading import MAX_BYTES, read_json, read_text
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.export.export import export
from flow_grpo.policy import hub
from flow_grpo.policy.encoding import EmbeddingCache
from flow_grpo.policy.loading import load_policy
from flow_grpo.report import page
from flow_grpo.run_folder import checkpoint, layout


def table(folder: Path, image: object) -> Path:
    """A folder of images with prompts, and a private image beside it."""
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder.parent / "private.png")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": image, "prompt": "a"}))
    return folder


@pytest.mark.parametrize("way", ["up", "absolute", "link", "in a list", "in a mapping"])
def test_images_outside_a_found_folder_are_not_read(tmp_path, way):
    names = {
        "up": "../private.png",
        "absolute": str(tmp_path / "private.png"),
        "link": "a.png",
        "in a list": ["../private.png"],
    }
    folder = table(tmp_path / "data", names.get(way, {"path": "../private.png"}))
    (folder / "a.png").symlink_to("../private.png")
    with pytest.raises(FlowGRPOError, match=r"metadata.jsonl|data, line 1|outside"):
        load_prompts(str(folder))


def test_a_file_that_the_user_names_may_name_any_image(tmp_path):
    folder = table(tmp_path / "data", "")
    (folder / "mine.jsonl").write_text(json.dumps({"image": str(tmp_path / "private.png"), "prompt": "a"}))
    (prompt,) = load_prompts(str(folder / "mine.jsonl")).prompts
    assert prompt.images[0].size == (8, 8)


LINKS = (layout.CONFIG, layout.METRICS, layout.MACHINE, f"{layout.PICTURES}/step_000000/prompt_0000.webp", layout.PICTURES)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_a_run_is_refused_by_report_and_export(tmp_path, name):
    run = synthetic_run(tmp_path / "run", steps=4, every=2)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    secret = tmp_path / "secret"
    if (run / name).exists():
        (run / name).rename(secret)
    else:
        secret.write_text("secret")
    (run / name).symlink_to(secret)
    for write in (lambda: page.write([run], tmp_path / "a.html"), lambda: export(run, tmp_path / "out", best=True)):
        with pytest.raises(FlowGRPOError, match="outside its folder"):
            write()
    assert not (tmp_path / "a.html").exists()
    assert page.write_report(run).exists(), "a run that trains may have links of its owner's"


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff"], ids=["lists", "objects", "cut", "bytes"]
)
def test_a_models_index_is_refused_in_one_sentence(tmp_path, content):
    (tmp_path / hub.INDEX).write_bytes(content)
    assert hub.resolve_model(str(tmp_path)) == str(tmp_path)
    assert hub.pipeline_class(str(tmp_path)) == "DiffusionPipeline"
    with pytest.raises(FlowGRPOError, match=r"could not be loaded: .*model_index.json is not "):
        load_policy(str(tmp_path))


def test_another_bit_in_the_embedding_cache_is_seen(tmp_path):
    EmbeddingCache(tmp_path).put("a", torch.arange(4.0))
    (file,) = tmp_path.rglob("*.pt")
    content = file.read_bytes()
    assert EmbeddingCache(tmp_path).get("a").tolist() == [0, 1, 2, 3]
    for place in range(0, len(content), 97):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert EmbeddingCache(tmp_path).get("a") is None
    file.write_bytes(content[32:])  # as 0.4 wrote it
    assert EmbeddingCache(tmp_path).get("a") is None


def test_devices_and_pipes_in_the_place_of_our_files_are_not_read(tmp_path):
    cache = EmbeddingCache(tmp_path)
    cache.put("a", torch.arange(4.0))
    (file,) = tmp_path.rglob("*.pt")
    step = checkpoint.step_folder(tmp_path, 1)
    step.mkdir(parents=True)
    (step / checkpoint.MANIFEST).write_text("{}")
    file.unlink()
    for other in (file, step / checkpoint.STATE):
        other.symlink_to("/dev/zero")
    assert EmbeddingCache(tmp_path).get("a") is None
    with pytest.raises(FlowGRPOError, match="missing or unreadable"):
        checkpoint.read(tmp_path, 1)
    (step / checkpoint.STATE).unlink()
    os.mkfifo(step / checkpoint.STATE)
    with pytest.raises(FlowGRPOError, match="missing or unreadable"):
        checkpoint.read(tmp_path, 1)


def test_files_that_never_end_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for file, sentence in ((tmp_path / "pipe", "named pipe"), (Path("/dev/zero"), "more than 16 MB")):
        with pytest.raises(FlowGRPOError, match=sentence):
            read_text(file)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(FlowGRPOError, match="more than 16 MB"):
        read_json(tmp_path / "large.json")


@pytest.mark.parametrize(
    "name",
    [
        "a/b](javascript:alert(1))",
        "a/b<script>",
        "a/b c",
        "a/../b",
        "/a",
        "a/",
        "a/b--c",
        "a/b..c",
        "a/.b",
        "-a/b",
        "a/b.git",
    ],
)
def test_no_link_is_made_of_a_name_that_is_no_hub_id(name):
    assert not hub.looks_like_hub_id(name)
    assert hub.looks_like_hub_id("owner-1/model_2.0")
