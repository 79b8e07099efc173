"""A person's ranking as a reward, given on a local web page that shows the images of a prompt."""

import base64
import hashlib
import html
import itertools
import json
import secrets
import socket
import string
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import expanded
from flow_grpo.rewards.images import SOURCES, has_sources, to_png
from flow_grpo.rewards.serving.client import png

KEYS = "123456789abcdefghijklmnopqrstuvwxyz"
TEMPLATE = Path(__file__).parent / "human.html"
HELP = (
    "Click the images from the best to the worst, or press their keys; as many as you have an opinion on. <kbd>Backspace</kbd> "
    "takes one back, <kbd>Enter</kbd> sends."
)


@dataclass
class Ballot:
    """The images of a prompt as PNG, those that the prompt itself has, and the ranking once it was made: indices, the best first."""

    prompt: str
    images: list[bytes]
    sources: list[bytes]
    order: list[int] = field(default_factory=list)
    voted: threading.Event = field(default_factory=threading.Event)


class Human:
    """A person's ranking of the images of each prompt, made on a local web page.

    The best image scores 1, the worst 0, the others by their rank; images that were not ranked share the remaining ranks. A
    single image of a prompt, as in an evaluation, scores 0.5 without asking. All images of a prompt must come in one call.
    Every pair of a ranking is recorded as a line {"prompt": ..., "better": path, "worse": path} of JSON, with the images
    in a folder next to the file, as `preference_head` reads them.

    Range [0, 1]. No weights, no memory; the votes are yours. Takes about ten seconds of a person's time for each prompt. Gamed by
    what pleases at first sight, such as saturated colours and smooth faces, and by the person's fatigue.

    Args:
        votes: the file of votes; images are written to the folder `pictures` next to it.
        port: port of the page on this machine; 0 takes a free one. Its URL contains a secret key.
    """

    costly = True  # never called only to probe it
    frames = 1  # of a video: each one more is another question

    def __init__(self, votes: str = "votes/votes.jsonl", port: int = 0) -> None:
        self.votes = expanded(votes)
        self.ballots: dict[int, Ballot] = {}
        self.numbers, self.lock = itertools.count(), threading.Lock()
        listening = socket.create_server(("127.0.0.1", port))
        key = secrets.token_urlsafe(16)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/{key}/"
        server = uvicorn.Server(uvicorn.Config(self._pages(key), log_level="error"))
        threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()

    def __call__(self, images: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,) once the person has ranked all prompts."""
        scores = torch.full((len(prompts),), 0.5)
        open_ballots = []
        for prompt in dict.fromkeys(prompts):
            rows = [i for i, other in enumerate(prompts) if other == prompt]
            if len(rows) > 1:
                sources = metadata[SOURCES][rows[0]] if has_sources(metadata) else []
                ballot = Ballot(prompt, [png(images[i]) for i in rows], [to_png(image) for image in sources])
                open_ballots.append((rows, ballot))
        if open_ballots:
            with self.lock:
                self.ballots |= {next(self.numbers): ballot for _, ballot in open_ballots}
            print(f"{len(open_ballots)} prompts are waiting to be ranked at {self.url}", file=sys.stderr, flush=True)
        for rows, ballot in open_ballots:
            ballot.voted.wait()
            scores[rows] = rank_scores(ballot.order, len(rows))
        return scores

    def vote(self, number: int, order: list[int]) -> None:
        """Accept a ranking and record its pairs. KeyError if the ballot is not open, FlowGRPOError if the ranking is malformed."""
        with self.lock:
            ballot = self.ballots[number]
            known = range(len(ballot.images))
            if not isinstance(order, list) or not order or len(set(order)) < len(order) or not set(order) <= set(known):
                raise FlowGRPOError("give the indices of different images, the best first.")
            self._record(ballot, order)
            del self.ballots[number]
        ballot.order = order
        ballot.voted.set()

    def _record(self, ballot: Ballot, order: list[int]) -> None:
        names = []
        for image in ballot.images:
            file = self.votes.parent / "pictures" / f"{hashlib.sha256(image).hexdigest()[:24]}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image)
            names.append(file.relative_to(self.votes.parent).as_posix())
        rest = [i for i in range(len(names)) if i not in order]
        pairs = [(a, b) for rank, a in enumerate(order) for b in order[rank + 1 :] + rest if names[a] != names[b]]
        with self.votes.open("a", encoding="utf-8") as lines:
            for a, b in pairs:
                lines.write(json.dumps({"prompt": ballot.prompt, "better": names[a], "worse": names[b]}) + "\n")

    def _open(self) -> tuple[int, Ballot] | None:
        return next(iter(self.ballots.items()), None)

    def _pages(self, key: str) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.get(f"/{key}/")
        def page() -> Response:
            nonce = secrets.token_urlsafe(16)
            policy = f"default-src 'none'; img-src data:; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
            headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
            return Response(_page(self._open(), nonce), media_type="text/html", headers=headers)

        @app.get(f"/{key}/state")
        def state() -> dict[str, int | None]:
            open_ballot = self._open()
            return {"ballot": open_ballot and open_ballot[0]}

        @app.post(f"/{key}/vote")
        async def vote(request: Request) -> dict[str, bool]:
            try:
                answer = await request.json()
                self.vote(answer["ballot"], answer["order"])
            except KeyError as error:
                raise HTTPException(409, "this prompt is no longer open.") from error
            except (ValueError, TypeError) as error:
                raise HTTPException(400, str(error)) from error
            return {"voted": True}

        return app


def rank_scores(order: list[int], count: int) -> torch.Tensor:
    """Scores (count,) of a ranking, 1 for the best to 0 for the worst; unranked images get the mean of the remaining ranks."""
    scores = torch.full((count,), (count - 1 - len(order)) / 2 / (count - 1))
    for rank, i in enumerate(order):
        scores[i] = 1 - rank / (count - 1)
    return scores


def _page(open_ballot: tuple[int, Ballot] | None, nonce: str) -> str:
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    blank = dict.fromkeys(("ballot", "images", "sources", "send", "help"), "")
    if open_ballot is None:
        waiting = "The next images will appear here by themselves."
        return template.substitute(blank, title="Nothing to rank", prompt="Nothing to rank", help=waiting, nonce=nonce)
    number, ballot = open_ballot
    images = "".join(
        f'<button data-key="{key}" aria-pressed="false" aria-label="image {key}"><img src="{_data_uri(image)}" alt="">'
        f'<span class="key">{key}</span><span class="place"></span></button>'
        for image, key in zip(ballot.images, itertools.chain(KEYS, itertools.repeat("")), strict=False)
    )
    return template.substitute(
        title="Which is best?",
        prompt=html.escape(ballot.prompt),
        help=HELP,
        ballot=number,
        images=images,
        sources="".join(f'<img src="{_data_uri(source)}" alt="the image of the prompt">' for source in ballot.sources),
        send='<button id="send">Send</button>',
        nonce=nonce,
    )


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
