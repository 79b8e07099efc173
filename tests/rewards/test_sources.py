"""Rewards of edits: they receive the images of prompts, here and on a server."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from support.reward_servers import Server, Stub, serving

from flow_grpo import rewards
from flow_grpo.rewards.fidelity import Fidelity, Unchanged, ssim
from flow_grpo.rewards.human import Human
from flow_grpo.rewards.images import first_sources
from flow_grpo.rewards.judge import Judge
from flow_grpo.rewards.serving.client import Remote, encode
from flow_grpo.rewards.serving.server import RAW, Limits, decode
from flow_grpo.rewards.serving.sources import as_tensors, as_text, pack_sources, unpack_sources

PROMPTS = ["one", "two", "two"]


def picture(seed: int, size: tuple[int, int] = (8, 6)) -> Image.Image:
    squares = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize(size, Image.Resampling.NEAREST)


def sources() -> list[list[Image.Image]]:
    two = picture(2)
    return [[picture(1, (16, 12)), picture(3)], [two], [two]]


def drawn() -> torch.Tensor:
    return torch.rand(3, 3, 6, 8, generator=torch.Generator().manual_seed(0))


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255


DISTANCE = """
from flow_grpo import rewards


def distance(images, prompts, source):
    return -(images - source).abs().flatten(1).mean(1)


@rewards.takes_pil
def corner(images, prompts, source):
    return [one.getpixel((0, 0))[0] - other.getpixel((0, 0))[0] for one, other in zip(images, source)]


def count(images, prompts, sources):
    return [len(of_prompt) + of_prompt[0].width / 100 for of_prompt in sources]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(DISTANCE)
    return tmp_path / "mine.py"


def scored(name: str, **options) -> list[float]:
    return rewards.score("mine", rewards.load(name, **options), drawn(), PROMPTS, sources=sources()).tolist()


def test_a_reward_gets_the_first_image_of_each_prompt_at_the_size_of_the_images(file):
    expected = torch.stack([tensor(row[0].resize((8, 6), Image.Resampling.LANCZOS)) for row in sources()])
    torch.testing.assert_close(first_sources(sources(), drawn()), expected)
    assert scored(f"{file}:distance") == pytest.approx((-(drawn() - expected).abs().flatten(1).mean(1)).tolist())
    bytes_of = [(255 * images[:, 0, 0, 0]).round() for images in (drawn(), expected)]
    assert scored(f"{file}:corner") == (bytes_of[0] - bytes_of[1]).tolist()
    assert scored(f"{file}:count") == pytest.approx([2.16, 1.08, 1.08])


def test_a_server_and_a_process_of_its_own_give_the_same_values(file):
    names = [f"{file}:distance", f"{file}:count", f"{file}:corner"]
    with serving(Server(*names)) as (server,):
        for name in names:
            assert scored(name, isolate=True) == scored(name)
            remote = Remote(server.url, name, batch_size=2)
            values = rewards.score("mine", remote, drawn(), PROMPTS, sources=sources())
            assert values.tolist() == scored(name)


def test_a_group_sends_an_image_once_and_what_is_malformed_is_refused():
    packed = pack_sources(sources())
    assert len(packed["files"]) == 3
    assert packed["rows"] == [[0, 1], [2], [2]]
    named, tensors = as_tensors(packed)
    for sent, files in ((named, tensors), (as_text(packed), {})):
        again = unpack_sources(json.loads(json.dumps(sent)), files, 3, 10_000)
        assert [[one.tobytes() for one in row] for row in again] == [[one.tobytes() for one in row] for row in sources()]
    for wrong, message in (
        ({**named, "rows": [[0], [1], [3]]}, "a list of indices"),
        ({**named, "rows": [[0], [1], [-1]]}, "a list of indices"),
        ({**named, "rows": [[0]]}, "for each of 3 images"),
        ([], "must have the lists"),
        ({**named, "files": ["source_9"] * 3}, "base64"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack_sources(wrong, tensors, 3, 10_000)
    with pytest.raises(ValueError, match="more than 100 pixels"):
        unpack_sources(named, tensors, 3, 100)


def test_sources_of_more_than_a_header_holds_arrive_as_they_were():
    files = [bytes([i]) * 60_000_000 for i in range(2)]  # 160 MB in base64, where safetensors allows 100
    request = {"prompts": PROMPTS, "sources": {"files": files, "rows": [[0], [1], [1]]}}
    body = encode(drawn(), request, "float")["content"]
    content, images, tensors = decode(RAW, body, Limits())
    assert torch.equal(images, drawn())
    assert content["sources"]["rows"] == [[0], [1], [1]]
    assert [bytes(tensors[name].numpy()) == file for name, file in zip(content["sources"]["files"], files, strict=True)] == [
        True
    ] * 2


class Earlier(Stub):
    """A server of an earlier version, which does not state that it takes files as tensors."""

    def answer(self, path: str, body: bytes):
        return 200, {"rewards": ["mine"], "versions": {}} if path == "/health" else {"values": [0.0] * 3}


def test_a_server_of_an_earlier_version_is_named_where_it_can_not_receive_the_images():
    server = Earlier()
    with pytest.raises(ValueError, match="runs an earlier flow-grpo, which can't receive the images of prompts: update it"):
        rewards.score("mine", Remote(server.url), drawn(), PROMPTS, sources=sources())
    for settings, metadata in (({"encoding": "png"}, {"sources": sources()}), ({}, {})):
        assert rewards.score("mine", Remote(server.url, **settings), drawn(), PROMPTS, **metadata).tolist() == [0, 0, 0]


def test_a_prompt_without_an_image_is_named_where_a_reward_needs_it(file):
    with pytest.raises(ValueError, match="some have none"):
        rewards.score("mine", rewards.load(f"{file}:distance"), drawn(), PROMPTS, sources=[*sources()[:2], []])
    values = rewards.score("plain", lambda images, prompts: [0.0] * 3, drawn(), PROMPTS, sources=[*sources()[:2], []])
    assert values.tolist() == [0, 0, 0]


def test_a_reward_of_any_metadata_scores_prompts_with_and_without_images_together():
    def seen(images, prompts, **metadata):
        return [len(of_prompt) + 10 * ("source" in metadata) for of_prompt in metadata["sources"]]

    mixed = [*sources()[:2], []]
    assert rewards.score("seen", seen, drawn(), PROMPTS, sources=mixed).tolist() == [2, 1, 0]
    assert rewards.score("seen", seen, drawn(), PROMPTS, sources=sources()).tolist() == [12, 11, 11]


def test_a_users_own_column_called_sources_is_metadata(file):
    values = rewards.score("own", lambda images, prompts, sources: sources, drawn(), PROMPTS, sources=[1.0, 2.0, 3.0])
    assert values.tolist() == [1, 2, 3]


def test_fidelity_is_1_for_the_source_and_ignores_what_the_mask_shows(tmp_path):
    fidelity, source = Fidelity(), torch.rand(2, 3, 32, 80, generator=torch.Generator().manual_seed(0))
    assert fidelity(source, ["a", "b"], source=source).tolist() == pytest.approx([1, 1])
    mask = Image.new("L", (80, 32))
    mask.paste(255, (40, 0, 80, 32))
    mask.save(tmp_path / "mask.png")
    changed = source.clone()
    changed[..., 40:] = 1 - changed[..., 40:]
    masked = fidelity(changed, ["a", "b"], source=source, mask=[str(tmp_path / "mask.png"), None])
    assert masked[0] == pytest.approx(1)
    assert masked[1] < 0.99
    with pytest.raises(ValueError, match=r"there is no image nothing\.png \(a mask\)"):
        fidelity(changed, ["a", "b"], source=source, mask=["nothing.png", None])
    with pytest.raises(ValueError, match="give them a column `image`"):
        rewards.score("fidelity", fidelity, source, ["a", "b"])


def test_unchanged_is_half_ssim_half_psnr_outside_the_mask(tmp_path):
    """Flat images of a and b: SSIM is (2 a b + c) / (a^2 + b^2 + c), the error (a - b)^2."""
    unchanged, source = Unchanged(), torch.full((3, 3, 24, 40), 0.5)
    mask = Image.new("L", (40, 24))
    mask.paste(255, (20, 0, 40, 24))
    mask.save(tmp_path / "mask.png")
    images = source.clone()
    images[1] += 0.1
    images[2, ..., 20:] = 1
    values = unchanged(images, ["a"] * 3, source=source, mask=[None, None, str(tmp_path / "mask.png")])
    flat = (2 * 0.5 * 0.6 + 1e-4) / (0.5**2 + 0.6**2 + 1e-4)
    assert values.tolist() == pytest.approx([1, 0.5 * flat + 0.5 * 20 / 40, 1], abs=1e-4)
    with pytest.raises(ValueError, match="give them a column `image`"):
        rewards.score("unchanged", unchanged, source, ["a"] * 3)


def test_ssim_compares_what_a_window_shows_and_not_its_brightness_alone():
    stripes = torch.arange(32).remainder(4).div(3).expand(1, 1, 32, 32)
    inner = (..., slice(8, 24), slice(8, 24))
    assert ssim(stripes, stripes)[inner].min() == pytest.approx(1, abs=1e-5)
    assert ssim(stripes, 1 - stripes)[inner].max() < -0.9  # the same means and variances, the opposite pattern
    noise = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert 0.2 < ssim(stripes, stripes + 0.3 * noise).mean() < 0.9


def test_the_gradient_of_unchanged_leads_to_the_source():
    source = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    images = (source * 0.8).requires_grad_()
    before = Unchanged()(images, ["a", "b"], source=source)
    before.sum().backward()
    assert (Unchanged()(images.detach() + 0.1 * images.grad, ["a", "b"], source=source) > before).all()


class Endpoint(Stub):
    """Keeps what it is asked, and says yes."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[bytes], str]] = []
        super().__init__()

    def answer(self, path: str, body: bytes):
        content = json.loads(body)["messages"][0]["content"]
        urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        self.asked.append(([base64.b64decode(url.partition(",")[2]) for url in urls], content[-1]["text"]))
        tokens = [{"token": "yes", "logprob": -0.1}, {"token": "no", "logprob": -3.0}]
        return 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": tokens}]}, "message": {"content": "yes"}}]}


def test_a_judge_sees_the_source_before_the_edit():
    endpoint = Endpoint()
    judge = Judge(endpoint.url, "any", concurrency=1)
    rewards.score("judge", judge, drawn(), PROMPTS, sources=sources())
    shown = [[Image.open(io.BytesIO(one)).size for one in images] for images, _ in endpoint.asked]
    assert shown == [[(16, 12), (8, 6), (8, 6)], [(8, 6), (8, 6)], [(8, 6), (8, 6)]]
    assert all("The first image was changed by this request" in text for _, text in endpoint.asked)
    endpoint.asked.clear()
    rewards.score("judge", judge, drawn(), PROMPTS)
    assert all("An image was made for this request" in text for _, text in endpoint.asked)
    assert [len(images) for images, _ in endpoint.asked] == [1, 1, 1]


def test_the_human_page_shows_the_source(tmp_path):
    import threading

    import httpx

    human = Human(str(tmp_path / "votes.jsonl"))
    values: list[torch.Tensor] = []
    asking = threading.Thread(target=lambda: values.append(human(drawn(), PROMPTS, sources=sources())), daemon=True)
    asking.start()
    shown: list[str] = []
    while asking.is_alive() and not shown:
        shown = re.findall(r'id="sources"><img src="data:image/png;base64,([^"]+)"', httpx.get(human.url).text)
    assert Image.open(io.BytesIO(base64.b64decode(shown[0]))).tobytes() == picture(2).tobytes()
    httpx.post(f"{human.url}vote", json={"ballot": 0, "order": [1, 0]}).raise_for_status()
    asking.join()
    assert values[0].tolist() == [0.5, 0.0, 1.0]
