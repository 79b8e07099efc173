"""Rewards behind HTTP and in processes of their own: real servers, killed in mid-run, and requests that mean no good."""

import base64
import contextlib
import json
import math
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from fastapi import HTTPException
from starlette.testclient import TestClient
from support import small_policy as small
from support.cli_process import begin, run
from support.embedded import short_run
from support.paths import SAMPLE_REWARDS
from support.reward_servers import Server, Stub, serving
from support.run_contents import MEASURED

from dev.tiny import pretrain, world
from flow_grpo import FlowGRPOTrainer, rewards
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.grid import ImageInfo, save_grid
from flow_grpo.errors import FlowGRPOError, is_retryable
from flow_grpo.rewards.judge import Judge
from flow_grpo.rewards.scopes import frames_of
from flow_grpo.rewards.serving.client import Remote, encode, png
from flow_grpo.rewards.serving.retry import Client
from flow_grpo.rewards.serving.server import RAW, Limits, application, checked, decode, serve
from flow_grpo.rewards.serving.subprocess import Isolated
from flow_grpo.rewards.threads import DaemonThread
from flow_grpo.tracking.tracker import read_metrics

SAMPLES = SAMPLE_REWARDS
TOKEN = "not-a-secret"
EVIL = '<script>alert(1)</script> \x1b[31mred\x1b[0m text "CAT" on a blue background'
MINE = """
import os, pathlib, signal, time
def slow(images, prompts):
    '''Brightness a little late. Once a file `die` is there, the second call from then on kills its process.'''
    die = pathlib.Path("die")
    if die.exists():
        if die.read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        die.write_text("at the next call")
    time.sleep(0.05)
    return images.mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two servers of one reward, each in a folder of its own; the first has others too, and takes 10 MB at most."""
    folders = [tmp_path_factory.mktemp(name) for name in ("a", "b")]
    for folder in folders:
        (folder / "mine.py").write_text(MINE)
    more = ["ocr", "color={palette: {teal: [0, 128, 128]}}", *(f"{SAMPLES}:{f}" for f in ("nan", "raises", "uses_metadata"))]
    first = Server("mine.py:slow", *more, "--max-megabytes", "10", folder=folders[0], token=TOKEN)
    with serving(first, Server("mine.py:slow", folder=folders[1], token=TOKEN)) as servers:
        yield servers


@pytest.fixture(autouse=True)
def token_and_stubs(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    yield
    Stub.close_all()


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, 24, 32, generator=torch.Generator().manual_seed(seed))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a few bytes of pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [("ocr", {}), ("color", {"palette": {"teal": [0, 128, 128]}})])
def test_values_are_the_local_ones_bit_for_bit(pair, name, options):
    shown, prompts = (
        [f'red text "{word}" on a {color} background' for word, color in zip(words, ("blue", "white", "blue"), strict=True)]
        for words in (("CAT", "HOUSE", "RIVER"), ("CUT", "MOUSE", "RAVEN"))
    )
    images = pretrain.images_of([world.parse(prompt) for prompt in shown]) / 2 + 0.5
    images = images + 0.2 * torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    local = rewards.score(name, rewards.load(name, **options), images, prompts)
    assert local.unique().numel() > 1
    for batch_size in (16, 2):
        there = rewards.load("remote", urls=pair[0].url, reward=name, batch_size=batch_size)
        assert torch.equal(rewards.score("remote", there, images, prompts), local)


def test_png_gives_the_values_of_eight_bits(pair):
    images = (pictures(4) * 255).round() / 255
    there = Remote(pair[0].url, "mine.py:slow", encoding="png")
    assert torch.allclose(there(images, ["a"] * 4), images.mean((1, 2, 3)), atol=1e-7)


def test_metadata_reaches_the_reward_in_the_rows_of_its_images(pair):
    there = Remote(pair[0].url, f"{SAMPLES}:uses_metadata", batch_size=2)
    values = rewards.score("m", there, pictures(5), list("abcde"), answer=[5, 4, 3, 2, 1], other=[{"x": [None]}] * 5)
    assert values.tolist() == [5, 4, 3, 2, 1]


def test_a_score_that_is_not_a_number_stays_one(pair):
    there = Remote(pair[0].url, f"{SAMPLES}:nan")
    assert there(pictures(2), ["a", "b"]).isnan().all()
    with pytest.raises(ValueError, match="reward mine returned nan for the prompt 'a'"):
        rewards.score("mine", there, pictures(2), ["a", "b"])


def test_an_error_of_the_reward_is_reported_and_not_tried_elsewhere(pair):
    there = Remote([pair[0].url], f"{SAMPLES}:raises")
    started = time.monotonic()
    with pytest.raises(ValueError, match="the camera is off") as error:
        rewards.score("mine", there, pictures(2), [EVIL, EVIL])
    assert "\x1b" not in str(error.value)
    assert time.monotonic() - started < 2


def test_health_says_what_is_served(pair):
    health = httpx.get(f"{pair[0].url}/health", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert health["rewards"][:3] == ["mine.py:slow", "ocr", "color"]


# -- hostile requests -------------------------------------------------------------------------------------------------


def asked(count=1, images=None, **more) -> dict:
    return {"json": {"reward": "mine.py:slow", "prompts": ["a"] * count, "images": images, **more}}


def raw(content: bytes) -> dict:
    return {"content": content, "headers": {"Content-Type": "application/x-safetensors"}}


def in_base64(content: bytes) -> list[str]:
    return [base64.b64encode(content).decode()]


GOOD = png(torch.zeros(3, 8, 8))
SHAPE = b'{"images":{"dtype":"F32","shape":[%s],"data_offsets":[0,12]},"__metadata__":{"request":"{}"}}'


def with_header(header: bytes) -> dict:
    return raw(struct.pack("<Q", len(header)) + header + bytes(12))


def with_images(**more) -> dict:
    """A file of one black pixel, but for what is given."""
    images = {"dtype": "F32", "shape": [1, 3, 1, 1], "data_offsets": [0, 12], **more}
    return with_header(json.dumps({"images": images, "__metadata__": {"request": "{}"}}).encode())


def with_request(request: str | bytes) -> dict:
    return raw(safetensors.torch.save({"images": torch.zeros(1, 3, 1, 1)}, {"request": request}))


def with_source(tensor: torch.Tensor, file: object = "source_0") -> dict:
    """An edit of an image whose source is that tensor."""
    text = json.dumps({"reward": "mine.py:slow", "prompts": ["a"], "sources": {"files": [file], "rows": [[0]]}})
    return raw(safetensors.torch.save({"images": torch.zeros(1, 3, 1, 1), "source_0": tensor}, {"request": text}))


HUGE = SHAPE % b"900000000000,3,100,100"
LIE = SHAPE % b"1,3,64,64"
EMPTY = SHAPE % b"0,3,64,64"
HOSTILE = {
    "a PNG header of 50,000 x 50,000": (asked(1, in_base64(png_header(50_000, 50_000))), 413),
    "a PNG header of 12,000 x 12,000": (asked(1, in_base64(png_header(12_000, 12_000))), 413),
    "a truncated PNG": (asked(1, in_base64(GOOD[:-30])), 400),
    "a PNG whose pixels are missing": (asked(1, in_base64(png_header(64, 64))), 400),
    "no PNG": (asked(1, in_base64(b"GIF89a" + bytes(100))), 400),
    "no base64": (asked(1, ["%%%"]), 400),
    "11 MB": (raw(bytes(11_000_000)), 413),
    "11 MB in parts": ({"content": (bytes(1_000_000) for _ in range(11))}, 413),
    "a pickle": ({"content": pickle.dumps([1]), "headers": {"Content-Type": "application/octet-stream"}}, 415),
    "a pickle as tensors": (raw(pickle.dumps([1])), 400),
    "a tensor of petabytes": (raw(struct.pack("<Q", len(HUGE)) + HUGE + bytes(12)), 400),
    "a tensor larger than its bytes": (raw(struct.pack("<Q", len(LIE)) + LIE + bytes(12)), 400),
    "no images": (raw(struct.pack("<Q", len(EMPTY)) + EMPTY), 400),
    "a header longer than the body": (raw(struct.pack("<Q", 2**63) + b"{}"), 400),
    "brackets without end": ({"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, 400),
    "a list in place of an object": ({"json": ["images"]}, 400),
    "no body": ({"headers": {"Content-Type": "application/json"}}, 400),
    "more prompts than images": (asked(2, in_base64(GOOD)), 400),
    "a short column of metadata": (asked(1, in_base64(GOOD), metadata={"answer": []}), 400),
    "an unknown reward": (asked(1, in_base64(GOOD), reward="../../etc/passwd"), 404),
    "float64": (raw(safetensors.torch.save({"images": torch.zeros(1, 3, 8, 8).double()}, {"request": "{}"})), 400),
    "three sizes": (with_images(shape=[3, 1, 1]), 400),
    "one channel": (with_images(shape=[3, 1, 1, 1]), 400),
    "a list as header": (with_header(b"[]"), 400),
    "no metadata": (with_header(b'{"images":{"dtype":"F32","shape":[1,3,1,1],"data_offsets":[0,12]}}'), 400),
    "metadata that is a text": (with_header(b'{"images":{"shape":[1,3,1,1]},"__metadata__":"request"}'), 400),
    "no header": (raw(b""), 400),
    "a request that is no JSON": (with_request("request"), 400),
    "a request that is NaN": (with_request("NaN"), 400),
    "a nested request": (with_request('{"metadata":' + "[" * 100_000 + "]" * 100_000 + "}"), 400),
    "half a character in a prompt": (with_request('{"reward": "mine.py:slow", "prompts": ["\\ud800"]}'), 400),
    "half a character as reward": (with_request('{"reward": "\\ud800", "prompts": ["a"]}'), 404),
    "a source that is no tensor of bytes": (with_source(torch.zeros(9)), 400),
    "a source that is no PNG": (with_source(torch.zeros(99, dtype=torch.uint8)), 400),
    "a list as source": (with_source(torch.zeros(9), ["source_0"]), 400),
    "a list as reward": (asked(1, in_base64(GOOD), reward=["ocr"]), 404),
    "prompts that are numbers": (asked(1, in_base64(GOOD), prompts=[1]), 400),
    "a text as prompts": (asked(1, in_base64(GOOD), prompts="a"), 400),
    "a column of prompts": (asked(1, in_base64(GOOD), metadata={"prompts": ["b"]}), 400),
    "a list as metadata": (asked(1, in_base64(GOOD), metadata=[1]), 400),
    "a text as column": (asked(1, in_base64(GOOD), metadata={"answer": "b"}), 400),
    "numbers as images": (asked(1, [1, None]), 400),
    "an object as images": (asked(1, {"0": "a"}), 400),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_bad_request_is_refused_in_a_clear_error(pair, what):
    request, status = HOSTILE[what]
    headers = {"Authorization": f"Bearer {TOKEN}", **request.get("headers", {})}
    response = httpx.post(f"{pair[0].url}/score", **{**request, "headers": headers}, trust_env=False)
    assert response.status_code == status, response.text
    assert response.json()["detail"].rstrip(".")
    assert "\n" not in response.json()["detail"]


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}])
def test_nothing_without_the_token(pair, header):
    for response in (
        httpx.get(f"{pair[0].url}/health", headers=header),
        httpx.post(f"{pair[0].url}/score", headers=header, content=bytes(11_000_000)),
    ):
        assert response.status_code == 401
        assert "Authorization: Bearer TOKEN" in response.json()["detail"]
    with pytest.raises(ValueError, match="refused with 401"):
        Remote(pair[0].url, token="wrong")


@pytest.mark.parametrize("token", [None, ""])
def test_others_are_not_listened_to_without_a_token(token):
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.com"):
        with pytest.raises(ValueError, match="give --token"):
            serve({}, host, 0, token, Limits(), print)


def test_a_token_that_no_header_can_hold_is_refused():
    for token in ("two words", "\n", "pässe"):
        with pytest.raises(ValueError, match="can't be sent"):
            serve({}, "127.0.0.1", 0, token, Limits(), print)


def test_a_port_or_an_address_that_can_not_be_used_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            FlowGRPOError, match=rf"^port {port} of 127\.0\.0\.1 can't be used: Address already in use\. Give"
        ):
            serve({}, "127.0.0.1", port, None, Limits(), print)
    with pytest.raises(
        FlowGRPOError, match=r"^port 8000 of 192\.0\.2\.1 can't be used: Cannot assign requested address\. Give"
    ):
        serve({}, "192.0.2.1", 8000, TOKEN, Limits(), print)


def test_whatever_arrives_is_an_answer_or_refused():
    """Good requests with some bytes changed, cut or repeated: the decoder raises nothing but refusals."""
    chance = random.Random(0)
    text = json.dumps({"reward": "a", "prompts": ["x", "y"], "metadata": {"n": [1, math.nan]}})
    good = {
        RAW: safetensors.torch.save({"images": torch.zeros(2, 3, 2, 2)}, {"request": text}),
        "application/json": json.dumps({"prompts": ["x"], "images": in_base64(GOOD)}).encode(),
    }
    seen = []
    for _ in range(3000):
        kind = chance.choice(list(good))
        body = bytearray(good[kind])
        for _ in range(chance.randint(1, 3)):
            i, j = sorted(chance.choices(range(len(body)), k=2))
            how = chance.random()
            if how < 0.6:
                body[i] = chance.choice(b'[]{}",:0123456789-.eNI\x00\xff')
            else:
                body[i:j] = b"" if how < 0.8 else body[i:j] * 2
        try:
            request, images, _ = decode(kind, bytes(body), Limits())
            checked(request, len(images), ["a"])
            seen.append(200)
        except HTTPException as error:
            json.dumps(error.detail).encode()
            seen.append(error.status_code)
    assert set(seen) <= {200, 400, 404, 413}
    assert {200, 400} <= set(seen)


# -- connections ------------------------------------------------------------------------------------------------------


def sends(url: str, content: bytes) -> socket.socket:
    """A connection that has sent this."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(content)
    return connection


HALF = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Le"


def test_half_sent_requests_without_a_token_keep_nobody_out(pair):
    waiting = [sends(pair[0].url, HALF) for _ in range(200)]
    there = Remote(pair[0].url, "mine.py:slow", attempts=1)
    assert there(pictures(2), ["a", "b"]).tolist() == pictures(2).mean((1, 2, 3)).tolist()
    for connection in waiting:
        connection.close()


def test_without_a_token_the_body_is_not_waited_for(pair):
    with sends(pair[0].url, b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


# -- servers that come and go -----------------------------------------------------------------------------------------


class Scripted(Stub):
    """Serves a reward `stub`: its n-th answer to /score is `script[n]`, the last one for ever: a status or values."""

    def __init__(self, *script, port: int = 0) -> None:
        super().__init__(port)
        self.script, self.asked = script, 0

    def answer(self, path: str, body: bytes) -> tuple[int, dict]:
        if path == "/health":
            return 200, {"rewards": ["stub"]}
        said = self.script[min(self.asked, len(self.script) - 1)]
        self.asked += 1
        return (said, {"detail": "busy"}) if isinstance(said, int) else (200, {"values": said})


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_busy_server_and_a_senseless_answer_are_asked_again():
    stub = Scripted(503, [1.0, 2.0], "nonsense", [0.5])
    assert Remote(stub.url, "stub")(pictures(1), ["a"]).tolist() == [0.5]
    assert stub.asked == 4


def test_values_keep_the_order_of_their_images_whoever_is_first():
    class Echo(Stub):
        """Scores an image by its prompt, the first ones last."""

        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            if path == "/health":
                return 200, {"rewards": ["stub"]}
            prompts = json.loads(body)["prompts"]
            time.sleep(0.2 if "0" in prompts else 0)
            return 200, {"values": prompts}

    servers = [Echo(), Echo()]
    there = Remote([server.url for server in servers], "stub", batch_size=2, encoding="png")
    assert there(pictures(7), list("0123456")).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_server_that_fails_is_replaced_and_looked_after_when_it_is_back():
    good, gone = Scripted([1.0]), Scripted([1.0])
    there = Remote([good.url, gone.url], "stub", batch_size=1, attempts=1)
    gone.close()
    assert there(pictures(6), list("abcdef")).tolist() == [1.0] * 6
    assert list(there.down) == [gone.url]
    back = Scripted([1.0], port=gone.server_port)
    until(lambda: not there.down)
    assert there(pictures(6), list("abcdef")).tolist() == [1.0] * 6
    assert back.asked


class Meeting(Scripted):
    """Answers a request of `late` images only when so many are there at a time."""

    def __init__(self, parties: int) -> None:
        super().__init__([1.0])
        self.barrier = threading.Barrier(parties)

    def answer(self, path: str, body: bytes) -> tuple[int, dict]:
        if path == "/score" and "late" in json.loads(body)["prompts"]:
            self.barrier.wait(60)
        return super().answer(path, body)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_and_calls_begin_with_different_servers(monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    servers = [Scripted([1.0]), Scripted([1.0])]
    there = Remote([server.url for server in servers], "stub")
    for call in range(4):
        there(pictures(1), ["a"])
        assert servers[rank].asked == call // 2 + 1
    assert [server.asked for server in servers] == [2, 2]


def test_the_parts_of_a_batch_are_at_a_server_at_the_same_time():
    """So that a slow connection delays a batch once. The first answer says that the server is quick."""
    server = Meeting(3)
    there = Remote(server.url, "stub", batch_size=1, encoding="png")
    assert there(pictures(1), ["a"]).tolist() == [1.0]
    assert there(pictures(3), ["late"] * 3).tolist() == [1.0] * 3


def test_a_server_that_needs_much_of_its_time_gets_one_request_at_a_time():
    class Slow(Scripted):
        running = most = 0

        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            self.running += 1
            self.most = max(self.most, self.running)
            time.sleep(0.1)
            self.running -= 1
            return super().answer(path, body)

    server = Slow([1.0])
    there = Remote(server.url, "stub", batch_size=1)
    there.client.timeout = 0.9
    there.attempts = 50
    assert there(pictures(4), list("abcd")).tolist() == [1.0] * 4
    assert server.most == 1


def test_rewards_and_parts_that_other_machines_score_do_not_wait_for_each_other():
    server = Meeting(4)
    both = {name: Remote(server.url, "stub", encoding="png") for name in ("a", "b")}
    weighted = rewards.WeightedSum({**both, "here": lambda images, prompts: [5.0]}, {"a": 1.0, "b": 2.0, "here": 1.0})
    for remote in both.values():
        remote(pictures(1), ["a"])
    parts = [weighted.begin(pictures(1), ["late"]) for _ in range(2)]
    for finish in parts:
        total, by_name = finish()
        assert (total.tolist(), list(by_name)) == ([8.0], ["a", "b", "here"])


def test_a_stopped_server_costs_its_timeout_once_and_is_used_again_when_it_answers():
    class Stopped(Scripted):
        stopped = True

        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            while self.stopped:
                time.sleep(0.02)
            return super().answer(path, body)

    good, other = Scripted([1.0]), Stopped([1.0])
    other.stopped = False
    there = Remote([good.url, other.url], "stub", batch_size=1, timeout=1.5)
    other.stopped = True
    assert there(pictures(2), ["a", "b"]).tolist() == [1.0, 1.0]
    assert list(there.down) == [other.url]
    began = there.servers[1].failures
    for _ in range(4):
        assert there(pictures(2), ["a", "b"]).tolist() == [1.0, 1.0]
    assert there.servers[1].failures == began == 1
    other.stopped = False
    until(lambda: not there.down)
    before = other.asked
    there(pictures(4), list("abcd"))
    assert other.asked > before


def test_a_lost_connection_refuses_no_start_and_servers_that_start_later_are_waited_for(capfd):
    class Losing(Scripted):
        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            self.asked += 1
            return (503, {}) if self.asked < 4 else super().answer(path, body)

    losing = Losing([1.0])
    Remote(losing.url, "stub")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    later: list[Scripted] = []
    timer = threading.Timer(0.5, lambda: later.append(Scripted([1.0], port=port)))
    timer.start()
    assert Remote(f"http://127.0.0.1:{port}", "stub", attempts=1, wait=60)(pictures(1), ["a"]).tolist() == [1.0]
    assert f"waiting up to 60 s for the reward server http://127.0.0.1:{port}" in capfd.readouterr().err


@pytest.mark.parametrize("health", [{}, [], "hello", {"rewards": None}])
def test_a_web_server_of_another_kind_is_named_as_one(health):
    class Other(Stub):
        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            return 200, health

    other = Other()
    sentence = (
        f"^reward bold could not be built: {other.url} answers, but is no reward server of flow-grpo: check the address.$"
    )
    with pytest.raises(FlowGRPOError, match=sentence) as raised:
        rewards.load("bold", remote=other.url)
    assert not is_retryable(raised.value)


def test_a_server_that_is_down_from_the_start_is_named(capfd):
    good, down = Scripted([1.0]), Scripted([1.0])
    down.close()
    Remote([good.url, down.url], "stub")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: a server does not answer, {down.url}: ConnectError ")
    assert line.endswith("; the other servers of the reward stub score in its place until it does.")


def test_a_remote_reward_with_options_of_its_own_is_told_where_they_belong():
    sentence = (
        r"bad\.py:Cls is remote, .* `flow-grpo serve 'bad\.py:Cls=\{gain: 2\}'`, .* the client: token, batch_size, timeout"
    )
    with pytest.raises(FlowGRPOError, match=sentence):
        rewards.load("bad.py:Cls", remote="http://127.0.0.1:1", gain=2, timeout=3)


def test_a_missing_token_is_named_whatever_the_server_says():
    class Guarded(Stub):
        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            return 401, {"detail": "who are you?"}

    guarded = Guarded()
    with pytest.raises(FlowGRPOError, match=r"refused with 401: who are you\? Set the environment variable REWARD_TOKEN"):
        Remote(guarded.url, "stub")


def test_when_no_server_is_left_it_is_an_error_and_never_a_score():
    healthy_but_failing = Scripted(500)
    there = Remote(healthy_but_failing.url, "stub", attempts=2)
    with pytest.raises(
        ValueError, match=r"no server is left for the reward stub: .*in 2 attempts, lastly: it answered 500 busy"
    ):
        there(pictures(2), ["a", "b"])
    healthy_but_failing.close()
    with pytest.raises(ValueError, match="no server for the reward stub answers"):
        Remote(healthy_but_failing.url, "stub", attempts=1)
    with pytest.raises(ValueError, match="is not a server address"):
        Remote("localhost:8000")


def dripping(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.1)


def dripping_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 8000000000\r\n\r\n")
    while True:
        connection.sendall(b" " * 100_000)


def garbage(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)))


def answering(misbehaves: Callable[[socket.socket], None], is_read: bool, connection: socket.socket) -> None:
    """Read a request, or leave it unread, and misbehave."""
    with connection, contextlib.suppress(OSError), connection.makefile("rb") as sent:
        if is_read:
            lines = [line.lower() for line in iter(sent.readline, b"\r\n")]
            sent.read(sum(int(line[16:]) for line in lines if line.startswith(b"content-length")))
        misbehaves(connection)


def accepting(listening: socket.socket, handle: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=handle, args=[listening.accept()[0]], daemon=True).start()


BAD = {
    "drips": (dripping, "no complete answer within 0.4 seconds"),
    "drips its head": (dripping_head, "no complete answer within 0.4 seconds"),
    "sends 8 GB": (endless, "its answer is longer than 16,000,000 bytes"),
    "reads nothing": (lambda connection: time.sleep(3600), "no complete answer within 0.4 seconds"),
    "sends garbage": (garbage, "RemoteProtocolError"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_request_ends_in_its_time_whatever_the_server_does(monkeypatch, what):
    """As a server, as one that is asked for its health, and as a judge's endpoint."""
    misbehaves, reason = BAD[what]
    handle = partial(answering, misbehaves, what != "reads nothing")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accepting, args=[listening, handle], daemon=True).start()
        url, good = f"http://127.0.0.1:{listening.getsockname()[1]}", Scripted([1.0])
        there = Remote(good.url, "stub", timeout=0.4, attempts=2)
        there.servers[0].url = url
        images = torch.zeros(1, 3, 1000, 1000)  # more than a connection holds that nobody reads
        with pytest.raises(ValueError, match=f"in 2 attempts, lastly: .*{reason}"):
            there(images, ["a"])
        with pytest.raises(ValueError, match=f"gave no usable answer for an image: .*{reason}"):
            Judge(url, "vlm", timeout=0.4, attempts=1)(torch.rand(1, 3, 800, 800), ["a"])
        monkeypatch.setattr(rewards.serving.client, "CONNECT_TIMEOUT", 0.4)
        with pytest.raises(ValueError, match=f"no server for the reward remote answers: .*{reason}"):
            Remote(url, attempts=1)


def test_a_reward_without_a_server_has_its_own_name_in_the_error():
    with socket.create_server(("127.0.0.1", 0)) as socket_of_port:
        url = f"http://127.0.0.1:{socket_of_port.getsockname()[1]}"
    with pytest.raises(FlowGRPOError, match=r"^reward bold could not be built: no server for the reward bold answers: "):
        rewards.load("bold", remote=url, attempts=1)


def test_ctrl_c_ends_a_command_that_waits_for_a_server(tmp_path):
    class Silent(Scripted):
        def answer(self, path: str, body: bytes) -> tuple[int, dict]:
            if path == "/score":
                (tmp_path / "asked").touch()
                time.sleep(3600)
            return super().answer(path, body)

    silent = Silent()
    save_grid(tmp_path / "grid.png", pictures(1), [ImageInfo("a", 0, "m")], columns=1)
    command = begin("score", "grid.png", "--reward", f"stub={{remote: {silent.url}}}", cwd=tmp_path)
    command.wait_for((tmp_path / "asked").exists)
    os.kill(command.process.pid, signal.SIGINT)
    command.finish(130)


def test_the_command_line_scores_by_a_reward_that_runs_elsewhere(pair, tmp_path):
    """`remote` says where, any other option is the client's."""
    save_grid(tmp_path / "grid.png", pictures(2), [ImageInfo("a", 0, "m"), ImageInfo("b", 0, "m")], columns=2)
    word = f"mine.py:slow={{remote: '{pair[0].url}', batch_size: 1}}"
    run("score", "grid.png", "--reward", word, "--out", "scores.json", cwd=tmp_path)
    scores = [row["slow"] for row in json.loads((tmp_path / "scores.json").read_text())]
    assert scores == pytest.approx(pictures(2).mean((1, 2, 3)).tolist(), abs=1e-2)
    assert "timeot" in run("score", "grid.png", "--reward", word.replace("batch_size", "timeot"), cwd=tmp_path, code=2)
    assert "give isolate=/bin/true" in run("score", "grid.png", "--reward", "ocr={python: /bin/true}", cwd=tmp_path, code=2)


def test_a_server_ends_at_sigterm_though_its_reward_hangs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import pathlib, time\ndef mine(images, prompts):\n    pathlib.Path('asked').touch()\n    time.sleep(3600)\n"
    )
    with serving(Server("mine.py:mine", folder=tmp_path)) as (server,):
        there = Remote(server.url, attempts=1)
        thread = DaemonThread()
        asked = thread.submit(lambda: there(pictures(1), ["a"]))
        deadline = time.monotonic() + 60
        while not (tmp_path / "asked").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.process.terminate()
        assert server.process.wait(60) == -signal.SIGTERM
        assert isinstance(asked.exception(60), ValueError)
        thread.close()


def test_a_server_that_never_answers_is_given_up_after_its_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url, good = f"http://127.0.0.1:{silent.getsockname()[1]}", Scripted([1.0])
        other = Scripted([1.0])
        there = Remote([good.url, other.url], "stub", batch_size=1, timeout=0.3, attempts=1)
        there.servers[1].url = silent_url
        assert there(pictures(4), list("abcd")).tolist() == [1.0] * 4


# -- who is answered ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "127.0.0.1.example"}, 403),
        ({"Host": "["}, 403),
        ({"Host": "localhost:8000", "Origin": "http://site.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
    ],
)
def test_without_a_token_only_this_machine_is_answered_and_no_web_page(headers, status):
    rewards_served = {"bright": lambda images, prompts: images.mean((1, 2, 3))}
    client = TestClient(application(rewards_served, None, Limits()))
    assert client.get("/health", headers=headers).status_code == status
    request = encode(pictures(1), {"prompts": ["a"], "metadata": {}}, "float")
    request["headers"] |= headers
    assert client.post("/score", **request).status_code == status
    with_token = TestClient(application(rewards_served, "secret", Limits()))
    assert with_token.get("/health", headers={**headers, "Authorization": "Bearer secret"}).status_code == 200
    refused = with_token.get("/health", headers=headers)
    assert refused.status_code == 401
    assert "REWARD_TOKEN" in refused.json()["detail"]


def test_an_address_with_a_password_is_shown_without_it():
    class Asks(Stub):
        def answer(self, path: str, body: bytes) -> tuple[int, dict | str]:
            return 403, {"detail": "go away"}

    stub = Asks()
    with pytest.raises(ValueError, match="refused with 403") as caught:
        Remote(stub.url.replace("http://", "http://user:pa55@"))
    assert "pa55" not in str(caught.value)
    stub.close()
    with pytest.raises(ValueError, match="no server") as caught:
        Remote(stub.url.replace("http://", "http://user:pa55@"), attempts=1)
    assert "pa55" not in str(caught.value)


def test_credentials_of_an_address_are_sent(monkeypatch):
    client = Client(None, 1.0)
    assert client.without_credentials("http://me:pa55@host:1/v1?a=b@c") == "http://host:1/v1?a=b@c"
    assert client.without_credentials("http://host:1/v1?a=b@c") == "http://host:1/v1?a=b@c"
    seen = []
    transport = httpx.MockTransport(lambda request: seen.append(request.headers.get("authorization")) or httpx.Response(200))
    monkeypatch.setattr(client, "client", httpx.AsyncClient(transport=transport))
    client.run(client.request("GET", "http://host:1/v1/x"))
    client.run(client.request("GET", "http://other:1/v1/x"))
    assert seen == [f"Basic {base64.b64encode(b'me:pa55').decode()}", None]


def test_only_columns_that_a_reward_reads_and_json_can_hold_are_sent(tmp_path, capfd):
    text = (
        "def one(images, prompts, word):\n    return [len(w) for w in word]\n\n"
        "def every(images, prompts, metadata):\n    return [len(row) for row in metadata]\n"
    )
    (tmp_path / "mine.py").write_text(text)
    isolated = Isolated(f"{tmp_path / 'mine.py'}:one")
    unsendable = {"word": ["A", "BC"], "picture": [b"1", b"2"]}
    assert rewards.score("mine", isolated, pictures(2), ["a", "b"], **unsendable).tolist() == [1, 2]
    isolated = Isolated(f"{tmp_path / 'mine.py'}:every")
    assert rewards.score("mine", isolated, pictures(2), ["a", "b"], word=["A", "BC"]).tolist() == [1, 1]
    for _ in range(2):
        assert rewards.score("mine", isolated, pictures(2), ["a", "b"], **unsendable).tolist() == [1, 1]
    assert capfd.readouterr().err.count("without the prompts' columns picture, which JSON can't hold") == 1
    with pytest.raises(FlowGRPOError, match=r"the prompts' column picture can't be sent to another process \(.*bytes"):
        encode(pictures(2), {"metadata": unsendable}, "float")  # a column that the reward names


# -- isolated -----------------------------------------------------------------------------------------------------------


def test_an_isolated_reward_has_the_local_values_in_another_process_that_may_die(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\ndef pid(images, prompts):\n    print('noise')\n    return [os.getpid()] * len(prompts)\n"
    )
    isolated = Isolated(f"{tmp_path / 'mine.py'}:pid")
    assert isolated(pictures(2), ["a", "b"]).tolist() == [float(isolated.process.pid)] * 2
    isolated.process.send_signal(signal.SIGKILL)
    with pytest.raises(ValueError, match=r"mine.py:pid: its process was killed by signal 9 \(Killed\)"):
        isolated(pictures(2), ["a", "b"])
    with pytest.raises(ValueError, match="Did you mean ocr"):
        Isolated("orc")


def test_a_server_starts_without_the_packages_that_no_sentence_asks_for():
    """rich was needed, which an environment of the reward's own lacks."""
    other = "rich jaxtyping typer httpx psutil scipy cv2 yaml matplotlib diffusers transformers peft accelerate open_clip datasets"
    code = f"import sys; sys.modules.update(dict.fromkeys({other.split()})); import flow_grpo.rewards.serving.server"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_isolated_reward_ends_when_its_parent_is_killed():
    start = "from flow_grpo.rewards.serving.subprocess import Isolated; import time; r = Isolated('jpeg_size')"
    code = f"{start}; print(r.process.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").exists() else not os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_python_without_this_package_runs_a_reward(tmp_path, monkeypatch):
    """With the libraries of this environment, but started where the package can't be imported."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nunset PYTHONPATH\ncd /\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    isolated = rewards.load("jpeg_size", isolate="~/python")
    assert isolated.python == str(file)
    assert isolated(pictures(1), ["a"]).tolist() == rewards.load("jpeg_size")(pictures(1), ["a"]).tolist()


def test_another_environment_is_really_another(tmp_path):
    """Nothing that is installed beside this package is seen by the other python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    with pytest.raises(ValueError, match=r"bin/python can't serve it: ModuleNotFoundError.*whose environment has torch"):
        Isolated("jpeg_size", python=str(tmp_path / "bin" / "python"))


NOT_PYTHON = {
    "missing": (None, "No such file or directory; name an interpreter that can"),
    "a folder": ("", "Permission denied; name an interpreter that can"),
    "a text": ("hello", "Permission denied|Exec format error"),
    "an executable text": ("hello", "Exec format error; name an interpreter that can"),
    "one that complains": (
        "#!/bin/sh\necho no $2 >&2\nexit 3\n",
        "ended with code 3 before it could serve; `isolate` must name an",
    ),
    "one that is killed": ("#!/bin/sh\nkill -9 $$\n", "its process was killed by signal 9"),
    "one that says a word": (
        "#!/bin/sh\necho hello\nsleep 3600\n",
        "its process is not a Python interpreter and was killed before",
    ),
    "one that says a number": (
        "#!/bin/sh\necho 5\nsleep 3600\n",
        "its process is not a Python interpreter and was killed before",
    ),
    "one that says nothing": (
        "#!/bin/sh\nsleep 3600\n",
        r"gave no answer in 0\.5 seconds and was killed before it could serve\.$",
    ),
}


@pytest.mark.parametrize("what", NOT_PYTHON)
def test_a_python_that_is_none_is_reported_as_none(tmp_path, monkeypatch, capfd, what):
    monkeypatch.setattr(rewards.serving.subprocess, "EXIT_TIMEOUT", 0.5)
    content, sentence = NOT_PYTHON[what]
    file = tmp_path / "python"
    if content:
        file.write_text(content)
        file.chmod(0o644 if what == "a text" else 0o755)
    elif content is not None:
        file.mkdir()
    with pytest.raises(ValueError, match=sentence):
        Isolated("jpeg_size", python=str(file), timeout=0.5 if "nothing" in what else 60)
    assert capfd.readouterr().err == "", "what it says of its arguments, which are a program"


def test_an_isolated_reward_that_hangs_is_killed_with_its_process_and_one_that_exits_is_named(tmp_path, monkeypatch):
    """The next call has another process."""
    monkeypatch.setattr(rewards.serving.subprocess, "EXIT_TIMEOUT", 0.5)
    (tmp_path / "mine.py").write_text(
        "import os, threading, time\n"
        "def mine(images, prompts):\n"
        "    if prompts[0] != 'hang':\n"
        "        threading.Thread(target=lambda: os._exit(7)).start()\n"
        "    time.sleep(3600)\n"
    )
    isolated = Isolated(f"{tmp_path / 'mine.py'}:mine", timeout=60)
    isolated.seconds = isolated.client.timeout = 0.5
    first = isolated.process.pid
    with pytest.raises(ValueError, match=r"its process gave no answer in 0\.5 seconds and was killed"):
        isolated(pictures(1), ["hang"])
    assert not _alive(first)
    isolated.seconds = 60
    with pytest.raises(ValueError, match="its process ended with code 7"):
        isolated(pictures(1), ["exit"])


def test_where_a_reward_runs_is_one_place():
    for setting, words in (
        ("{remote: 'http://x', isolate: true}", "set one of `remote` and `isolate`"),
        ("{python: /usr/bin/python3}", "set isolate=/usr/bin/python3"),
    ):
        with pytest.raises(ValueError, match=words):
            FlowGRPOConfig.from_yaml("tiny_ocr", [f"rewards={{ocr: {setting}}}"])
    with pytest.raises(ValueError, match="either remote or isolated"):
        rewards.load("ocr", remote="http://x", isolate=True)
    with pytest.raises(ValueError, match="an interpreter is a value of isolate: give isolate=/usr/bin/python3"):
        rewards.load("ocr", python="/usr/bin/python3")


# -- attributes of a reward ---------------------------------------------------------------------------------------------


def test_an_isolated_reward_keeps_its_frames_and_its_cost_unless_frames_are_set_outside(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def paid(images, prompts):\n    return images.mean((1, 2, 3))\npaid.costly, paid.frames = True, 'last'\n"
    )
    name, videos = f"{tmp_path / 'mine.py'}:paid", torch.stack([pictures(2, seed) for seed in range(5)], 1)
    own, first = rewards.load(name, isolate=True), rewards.load(name, isolate=True, frames="first")
    assert (own.frames, own.costly) == ("last", True)
    torch.testing.assert_close(rewards.score("mine", own, videos, ["a", "b"]), videos[:, -1].mean((1, 2, 3)))
    first.process.send_signal(signal.SIGKILL)
    with pytest.raises(ValueError, match="was killed by signal 9"):
        first(pictures(2), ["a", "b"])
    again = rewards.score("mine", first, videos, ["a", "b"])  # by a second process
    torch.testing.assert_close(again, videos[:, 0].mean((1, 2, 3)))
    assert (first.frames, first.costly) == ("first", True)


class Stating(Scripted):
    """A server that states these attributes of its reward."""

    def __init__(self, **attributes) -> None:
        super().__init__([1.0])
        self.attributes = attributes

    def answer(self, path: str, body: bytes) -> tuple[int, dict]:
        return (200, {"rewards": ["stub"], **self.attributes}) if path == "/health" else super().answer(path, body)


def test_the_first_server_that_states_frames_decides_and_one_that_states_nothing_leaves_the_default():
    nothing, one, last = Stating(), Stating(frames={"stub": 1}, costly=["stub"]), Stating(frames={"stub": "last"}, costly=[])
    for servers, expected in (
        ([nothing], (4, False)),
        ([nothing, one, last], (1, True)),
        ([last, one], ("last", True)),
        ([last, nothing], ("last", False)),
    ):
        there = rewards.load("stub", remote=[server.url for server in servers])
        assert (frames_of(there), there.costly) == expected
    assert rewards.load("stub", remote=one.url, frames="first").frames == "first"
    assert frames_of(Remote(one.url)) == 1, "also without the reward's name"


@pytest.mark.parametrize("frames", [None, 2])
def test_a_server_whose_reward_sees_whole_videos_is_refused_at_once(frames):
    whole = Stating(frames={"stub": "all"})
    with pytest.raises(ValueError, match="reward stub: frames=all is for a reward in this process: leave remote"):
        rewards.load("stub", remote=whole.url, frames=frames)


# -- training -----------------------------------------------------------------------------------------------------------


def numbers(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_metrics(folder)]


@pytest.mark.slow
def test_a_run_with_two_servers_of_which_one_is_killed_has_the_metrics_of_one_without(pair, tmp_path):
    """Then the other is killed too: the run stops with a checkpoint, and goes on with a server elsewhere."""
    first, second = pair

    def run(name: str, urls: list[str]) -> FlowGRPOTrainer:
        where = f"{{weight: 1, remote: [{', '.join(urls)}], options: {{batch_size: 2, attempts: 2}}}}"
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / name, f"rewards={{'mine.py:slow': {where}}}", "microbatch=4"))
        assert trainer.stage.sampler.score_in_background, "the servers score while the next images are drawn"
        return trainer

    run("whole", [first.url, second.url]).train()
    (second.folder / "die").write_text("")
    run("killed", [first.url, second.url]).train()
    assert second.process.wait(10) == -signal.SIGKILL
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")

    (first.folder / "die").write_text("")
    with pytest.raises(ValueError, match=r"reward slow raised NoServer .*no server is left for the reward mine.py:slow"):
        run("stopped", [first.url]).train()
    assert list((tmp_path / "stopped" / "checkpoints").iterdir())
    (first.folder / "die").unlink()
    with serving(Server("mine.py:slow", folder=first.folder, token=TOKEN)) as (third,):
        run("stopped", [third.url]).train(resume=True)
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")


def test_a_run_with_an_isolated_reward_has_the_metrics_of_one_without(tmp_path, no_report):
    name = f"{SAMPLES}:brightness"
    for where, setting in (("here", "1"), ("apart", "{isolate: true}")):
        small.trainer(short_run(tmp_path / where, f"rewards={{{name}: {setting}}}", "steps=1")).train()
    assert numbers(tmp_path / "here") == numbers(tmp_path / "apart")
