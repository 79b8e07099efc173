"""The page on which a person ranks images: everything that a browser does, done by an HTTP client."""

import base64
import io
import json
import re
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from support.embedded import short_run

from flow_grpo import FlowGRPOTrainer
from flow_grpo.rewards.human import Human, rank_scores

EVIL = '</h1><script>alert(1)</script> \x1b[31mred\x1b[0m "quoted" $nonce'


@pytest.fixture
def human(tmp_path):
    return Human(str(tmp_path / "votes" / "votes.jsonl"))


class Person:
    """Looks at the page until there is something on it, and votes."""

    def __init__(self, human: Human) -> None:
        self.client = httpx.Client(base_url=human.url, trust_env=False)

    def look(self) -> tuple[int, str]:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                number = self.client.get("state").json()["ballot"]
            except httpx.ConnectError:
                number = None
            if number is not None:
                return number, self.client.get("").text
            time.sleep(0.02)
        raise AssertionError("nothing was shown")

    def pictures(self) -> list[np.ndarray]:
        shown = re.findall(r"data:image/png;base64,([^\"]+)", self.client.get("").text)
        return [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in shown]

    def vote(self, number, order) -> httpx.Response:
        return self.client.post("vote", json={"ballot": number, "order": order})


def in_background(human: Human, images: torch.Tensor, prompts: list[str]) -> tuple[threading.Thread, list]:
    values: list = []
    thread = threading.Thread(target=lambda: values.append(human(images, prompts)), daemon=True)
    thread.start()
    return thread, values


def test_places_become_scores():
    assert rank_scores([2, 0, 1], 3).tolist() == [0.5, 0, 1]
    assert rank_scores([1], 4).tolist() == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3])
    assert rank_scores([0, 1], 2).tolist() == [1, 0]
    for order in ([0], [3, 1], [2, 0, 1, 3]):
        assert rank_scores(order, 4).mean().item() == pytest.approx(0.5), "a ranking gives the group no points"


def test_a_person_ranks_two_prompts(human, tmp_path):
    images = torch.arange(5).view(5, 1, 1, 1).expand(5, 3, 6, 8) / 5
    thread, values = in_background(human, images, ["a fox", EVIL, "a fox", EVIL, EVIL])
    person = Person(human)
    first, page = person.look()
    assert "a fox" in page
    shown = person.pictures()
    assert [p[0, 0, 0] for p in shown] == [0, round(2 / 5 * 255)]
    assert person.vote(first, [1, 0]).status_code == 200
    second, page = person.look()
    assert second != first
    assert "<script>alert" not in page
    assert "&lt;/h1&gt;&lt;script&gt;" in page
    assert page.count("<button data-key") == 3
    assert person.vote(second, [2]).status_code == 200
    thread.join(10)
    assert values[0].tolist() == [0, 0.25, 1, 0.25, 1]

    lines = [json.loads(line) for line in human.votes.read_text().splitlines()]
    assert [set(line) for line in lines] == [{"prompt", "better", "worse"}] * 3
    assert [line["prompt"] for line in lines] == ["a fox", EVIL, EVIL]
    assert "\x1b" not in human.votes.read_text()
    levels = [
        tuple(Image.open(human.votes.parent / line[which]).getpixel((0, 0))[0] for which in ("better", "worse"))
        for line in lines
    ]
    assert levels == [(102, 0), (204, 51), (204, 153)]


def test_what_is_no_vote_is_refused_and_the_prompt_stays_open(human):
    thread, values = in_background(human, torch.rand(3, 3, 4, 4), ["a"] * 3)
    person = Person(human)
    number, _ = person.look()
    for order in ([], [0, 0], [3], [-1], ["x"], None, "01", [[0]]):
        assert person.vote(number, order).status_code == 400, order
    assert person.vote(number + 1, [0]).status_code == 409
    assert person.client.post("vote", content=b"{").status_code == 400
    assert not human.votes.exists()
    assert person.vote(number, [2, 1, 0]).status_code == 200
    assert person.vote(number, [2, 1, 0]).status_code == 409, "nobody votes twice"
    thread.join(10)
    assert values[0].tolist() == [0, 0.5, 1]
    assert "Nothing to rank" in person.client.get("").text


def test_nothing_is_there_without_the_key(human):
    Person(human).client.get("state")
    root = human.url.rsplit("/", 2)[0]
    for path in ("/", "/state", "/vote", "/wrong/", "/wrong/state", "/docs", "/openapi.json"):
        assert httpx.get(root + path, trust_env=False).status_code == 404
    policy = Person(human).client.get("").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'nonce-" in policy


def test_votes_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Human("~/votes.jsonl").votes == tmp_path / "votes.jsonl"


def test_an_image_alone_asks_nobody(human):
    assert human(torch.rand(2, 3, 4, 4), ["a", "b"]).tolist() == [0.5, 0.5]


def test_a_run_by_votes(human, tmp_path):
    """A person who likes bright pictures, and is quick."""
    done = threading.Event()

    def watch() -> None:
        person = Person(human)
        while not done.is_set():
            number = person.client.get("state").json()["ballot"]
            if number is None:
                time.sleep(0.02)
                continue
            bright = [p.mean() for p in person.pictures()]
            person.vote(number, sorted(range(4), key=lambda i: -bright[i]))

    threading.Thread(target=watch, daemon=True).start()
    try:
        last = FlowGRPOTrainer(reward_funcs=human, args=short_run(tmp_path / "run", "steps=1")).train()
    finally:
        done.set()
    assert last["Human"] == 0.5
    assert len(human.votes.read_text().splitlines()) == 2 * 6
