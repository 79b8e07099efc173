"""Rewards behind HTTP and in processes of their own: real servers, killed in mid-run, and requests that mean no good."""

import base64
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from conftest import short_run
from serving import Server, Stub, serving

import rewards
from flow_grpo import FlowGRPOTrainer
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.tiny import pretrain, world
from flow_grpo.tracking import read_metrics
from rewards.isolated import Isolated
from rewards.remote import Remote, png
from rewards.server import Limits, serve

HERE = Path(__file__).parent
SAMPLES = HERE / "sample_rewards.py"
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
def token(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)


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
    images = pretrain.pictures([world.parse(prompt) for prompt in shown]) / 2 + 0.5
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


def test_an_error_of_the_reward_is_said_and_not_tried_elsewhere(pair):
    there = Remote([pair[0].url], f"{SAMPLES}:raises")
    started = time.monotonic()
    with pytest.raises(ValueError, match="the camera is off") as error:
        rewards.score("mine", there, pictures(2), [EVIL, EVIL])
    assert "\x1b" not in str(error.value)
    assert time.monotonic() - started < 2


def test_health_says_what_is_served(pair):
    health = httpx.get(f"{pair[0].url}/health", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert health["rewards"][:3] == ["mine.py:slow", "ocr", "color"]
    assert health["versions"]["torch"] == torch.__version__


# -- hostile requests -------------------------------------------------------------------------------------------------


def asked(prompts=1, images=None, **more) -> dict:
    return {"json": {"reward": "mine.py:slow", "prompts": ["a"] * prompts, "images": images, **more}}


def raw(content: bytes) -> dict:
    return {"content": content, "headers": {"Content-Type": "application/x-safetensors"}}


def in_base64(content: bytes) -> list[str]:
    return [base64.b64encode(content).decode()]


GOOD = png(torch.zeros(3, 8, 8))
SHAPE = b'{"images":{"dtype":"F32","shape":[%s],"data_offsets":[0,12]},"__metadata__":{"request":"{}"}}'
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
    "a tensor of petabytes": (raw(struct.pack("<Q", len(HUGE)) + HUGE + bytes(12)), 413),
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
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_bad_request_is_refused_in_a_sentence(pair, what):
    request, status = HOSTILE[what]
    headers = {"Authorization": f"Bearer {TOKEN}", **request.get("headers", {})}
    started = time.monotonic()
    response = httpx.post(f"{pair[0].url}/score", **{**request, "headers": headers}, trust_env=False)
    assert response.status_code == status, response.text
    assert response.json()["detail"].rstrip(".")
    assert "\n" not in response.json()["detail"]
    assert time.monotonic() - started < 2, "nothing large was decoded"


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


def test_others_are_not_listened_to_without_a_token():
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.com"):
        with pytest.raises(ValueError, match="give --token"):
            serve({}, host, 0, None, Limits(), print)


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


def test_a_busy_server_and_a_senseless_answer_are_asked_again():
    stub = Scripted(503, [1.0, 2.0], "nonsense", [0.5])
    assert Remote(stub.url, "stub")(pictures(1), ["a"]).tolist() == [0.5]
    assert stub.asked == 4
    stub.close()


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
    for server in servers:
        server.close()


def test_a_server_that_fails_is_replaced_and_looked_after_when_it_is_back():
    good, gone = Scripted([1.0]), Scripted([1.0])
    there = Remote([good.url, gone.url], "stub", batch_size=1, attempts=1)
    gone.close()
    assert there(pictures(6), list("abcdef")).tolist() == [1.0] * 6
    assert list(there.down) == [gone.url]
    back = Scripted([1.0], port=gone.server_port)
    assert there(pictures(6), list("abcdef")).tolist() == [1.0] * 6
    assert there.down == {}
    good.close()
    back.close()


def test_when_no_server_is_left_it_is_an_error_and_never_a_score():
    healthy_but_failing = Scripted(500)
    there = Remote(healthy_but_failing.url, "stub", attempts=2)
    with pytest.raises(
        ValueError, match=r"no server is left for the reward stub: .*in 2 attempts, lastly: it answered 500 busy"
    ):
        there(pictures(2), ["a", "b"])
    healthy_but_failing.close()
    with pytest.raises(ValueError, match="no server for the reward stub answers"):
        Remote(healthy_but_failing.url, "stub")
    with pytest.raises(ValueError, match="is no address of a server"):
        Remote("localhost:8000")


def test_a_server_that_never_answers_is_given_up_after_its_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url, good = f"http://127.0.0.1:{silent.getsockname()[1]}", Scripted([1.0])
        there = Remote([good.url, good.url], "stub", batch_size=1, timeout=0.3, attempts=1)
        there.urls[1] = silent_url
        assert there(pictures(4), list("abcd")).tolist() == [1.0] * 4
        good.close()


# -- isolated -----------------------------------------------------------------------------------------------------------


def test_an_isolated_reward_has_the_local_values_in_another_process_that_may_die(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\ndef pid(images, prompts):\n    print('noise')\n    return [os.getpid()] * len(prompts)\n"
    )
    isolated = Isolated(f"{tmp_path / 'mine.py'}:pid")
    assert isolated(pictures(2), ["a", "b"]).tolist() == [float(isolated.process.pid)] * 2
    isolated.process.send_signal(signal.SIGKILL)
    with pytest.raises(ValueError, match="no server is left"):
        isolated(pictures(2), ["a", "b"])
    with pytest.raises(ValueError, match="Did you mean ocr"):
        Isolated("orc")


def test_an_isolated_reward_ends_when_its_parent_is_killed():
    code = "from rewards.isolated import Isolated; import time; r = Isolated('jpeg_size'); print(r.process.pid, flush=True); time.sleep(60)"
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


def test_another_environment_is_really_another(tmp_path):
    """Nothing that is installed beside this package is seen by the other python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    with pytest.raises(ValueError, match="its process ended with code 1 before it could serve; its environment needs torch"):
        Isolated("jpeg_size", python=str(tmp_path / "bin" / "python"))
    with pytest.raises(ValueError, match="No such file or directory; set `python` to an interpreter"):
        Isolated("jpeg_size", python=str(tmp_path / "missing"))


def test_where_a_reward_runs_is_one_place():
    for setting, words in (
        ("{remote: 'http://x', isolate: true}", "set one of `remote` and `isolate`"),
        ("{python: /usr/bin/python3}", "set isolate=true as well"),
    ):
        with pytest.raises(ValueError, match=words):
            FlowGRPOConfig.read("tiny_ocr", [f"rewards={{ocr: {setting}}}"])


# -- training -----------------------------------------------------------------------------------------------------------


def numbers(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder)]


def test_a_run_with_two_servers_of_which_one_is_killed_has_the_metrics_of_one_without(pair, tmp_path):
    """Then the other is killed too: the run stops with a checkpoint, and goes on with a server elsewhere."""
    first, second = pair

    def run(name: str, urls: list[str]) -> FlowGRPOTrainer:
        where = f"{{weight: 1, remote: [{', '.join(urls)}], options: {{batch_size: 2, attempts: 2}}}}"
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / name, f"rewards={{'mine.py:slow': {where}}}", "microbatch=4"))
        assert trainer.source.beside, "the servers score while the next images are drawn"
        return trainer

    run("whole", [first.url, second.url]).train()
    (second.folder / "die").write_text("")
    run("killed", [first.url, second.url]).train()
    assert second.process.wait(10) == -signal.SIGKILL
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")

    (first.folder / "die").write_text("")
    with pytest.raises(ValueError, match=r"reward slow raised ValueError .*no server is left for the reward mine.py:slow"):
        run("stopped", [first.url]).train()
    assert list((tmp_path / "stopped" / "checkpoints").iterdir())
    (first.folder / "die").unlink()
    with serving(Server("mine.py:slow", folder=first.folder, token=TOKEN)) as (third,):
        run("stopped", [third.url]).train(resume=True)
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")


def test_a_run_with_an_isolated_reward_has_the_metrics_of_one_without(tmp_path):
    name = f"{SAMPLES}:brightness"
    for where, setting in (("here", "1"), ("apart", "{isolate: true}")):
        FlowGRPOTrainer(args=short_run(tmp_path / where, f"rewards={{{name}: {setting}}}", "steps=1")).train()
    assert numbers(tmp_path / "here") == numbers(tmp_path / "apart")
