"""A vision-language model as judge, behind an OpenAI-compatible endpoint (vLLM, SGLang, or a hosted one)."""

import asyncio
import base64
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import torch
from PIL import Image

from flow_grpo.errors import FlowGRPOError, RetryableError
from flow_grpo.rewards.images import SOURCES, has_sources, to_pil, to_png
from flow_grpo.rewards.scopes import IMAGE, PAIR
from flow_grpo.rewards.serving.retry import Client, InvalidResponse, NoResponse, gather, post_with_retries

QUESTIONS = {
    "number": (
        "An image was made for this request:\n{prompt}\n\nHow well does the image show what was asked for? Answer with one number "
        "from {low} (not at all) to {high} (perfectly), and nothing else."
    ),
    "yes_no": (
        "An image was made for this request:\n{prompt}\n\nDoes the image show everything that was asked for? Answer with one word, "
        "Yes or No."
    ),
}
PAIR_QUESTION = (
    "Two images were made for this request:\n{prompt}\n\nWhich of them shows better what was asked for? Answer with one digit: 1 for "
    "the first image, 2 for the second."
)
EDIT_QUESTIONS = {
    "number": (
        "The first image was changed by this request, into the second:\n{prompt}\n\nHow well does the second image show the change, "
        "with all else as it was? Answer with one number from {low} (not at all) to {high} (perfectly), and nothing else."
    ),
    "yes_no": (
        "The first image was changed by this request, into the second:\n{prompt}\n\nDoes the second image show the change, with all "
        "else as it was? Answer with one word, Yes or No."
    ),
}
EDIT_PAIR_QUESTION = (
    "The first image was changed by this request, in two ways, into the second and the third:\n{prompt}\n\nWhich of the two shows "
    "the change better, with all else as it was? Answer with one digit: 1 for the second image, 2 for the third."
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)")
OUT_OF = re.compile(r"\s*(?:/|out of)\s*(\d+(?:\.\d+)?)")


class Judge:
    """The answer of a vision-language model to a question on image and prompt, or with the option `scope: pair` on two images.

    `yes_no` is P(yes) / (P(yes) + P(no)) from the log-probabilities of the first token, the VQAScore (arXiv 2404.01291), which
    is smooth; `number` is the number that the model writes, scaled from low..high to 0..1, which is coarse. A question can contain
    {prompt}, {low}, {high} and any metadata column by name. After a malformed answer the question is repeated with a higher
    temperature and another seed; an image without a usable answer is an error, never a 0.

    With `scope: pair` the question is which of two images is better, and the answer P(1) / (P(1) + P(2)) of the first token, or 1 or
    2 as the model writes it; an image's value is its win rate against the others of its group (Pref-GRPO, arXiv 2508.20751). Each
    pair is asked in both orders, since models prefer one position: K (K - 1) requests for K images, fewer with `opponents`.

    Where prompts have images, they are shown first, and the built-in questions ask for the change.

    Range [0, 1]. Weights and licence: the endpoint's model, for example Qwen/Qwen2.5-VL-7B-Instruct (Apache-2.0, 17 GB) by
    `vllm serve`. No memory here. Gamed by images and prompts that address the judge, such as text that says the image is
    perfect, and by what a small model can't see: counts and spelling first.

    Args:
        url: base URL of the endpoint, http://host:port/v1. The API key comes from the environment variable OPENAI_API_KEY.
        model: name of the model at the endpoint.
        question: a question that replaces the built-in one.
        concurrency: number of simultaneous requests.
        timeout: seconds that one request may take in total, from the connection to the last byte of the answer.
        scope: `image` or `pair`, see `rewards.scopes`.
        opponents: of scope pair, with about how many others of its group each image is compared; by default with all.
    """

    costly = True  # never called only to probe it
    frames = 1  # of a video: each one more is another question

    def __init__(
        self,
        url: str,
        model: str,
        answer: Literal["yes_no", "number"] = "yes_no",
        question: str | None = None,
        low: float = 0,
        high: float = 10,
        concurrency: int = 16,
        timeout: float = 60.0,
        attempts: int = 6,
        scope: Literal["image", "pair"] = "image",
        opponents: int | None = None,
    ) -> None:
        if answer not in QUESTIONS:
            raise FlowGRPOError(f"judge: answer={answer!r} is neither yes_no nor number.")
        if not low < high:
            raise FlowGRPOError(f"judge: low={low} must be below high={high}.")
        if scope not in (IMAGE, PAIR):
            raise FlowGRPOError(f"judge: scope={scope!r} is neither image nor pair.")
        if opponents is not None and scope != PAIR:
            raise FlowGRPOError(f"judge: opponents={opponents} is for scope=pair: set it as well, or leave opponents out.")
        self.scope, self.opponents = scope, opponents
        self.model, self.answer = model, answer
        self.question = question
        self.low, self.high, self.concurrency, self.attempts = low, high, concurrency, attempts
        if not timeout > 0 or attempts < 1 or concurrency < 1:
            raise FlowGRPOError("judge: timeout, attempts and concurrency must be positive.")
        self.client = Client(os.environ.get("OPENAI_API_KEY"), timeout, concurrency)
        self.url = f"{self.client.without_credentials(url.rstrip('/'))}/chat/completions"

    def __call__(self, *inputs: Any, **metadata: Any) -> torch.Tensor:
        """As `score`, or as `compare` with scope pair."""
        return self.compare(*inputs, **metadata) if self.scope == PAIR else self.score(*inputs, **metadata)

    def score(self, images: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError if an image got no usable answer."""
        questions = EDIT_QUESTIONS if has_sources(metadata) else QUESTIONS
        return self._ask(
            [to_pil(image[None]) for image in images], prompts, metadata, self.question or questions[self.answer], self._read
        )

    def compare(self, first: torch.Tensor, second: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
        """Two times (n, 3, H, W) in [0, 1]; returns (n,), how sure it is that the first is better. FlowGRPOError as of `score`."""
        question = self.question or (EDIT_PAIR_QUESTION if has_sources(metadata) else PAIR_QUESTION)
        pairs = [to_pil(torch.stack(pair)) for pair in zip(first, second, strict=True)]
        return self._ask(pairs, prompts, metadata, question, self._read_pair)

    def _ask(
        self,
        shown: list[list[Image.Image]],
        prompts: list[str],
        metadata: dict[str, list],
        question: str,
        read: Callable[[httpx.Response], float],
    ) -> torch.Tensor:
        """The answers (n,) to the question on one or two images each, after those of the prompt."""
        if has_sources(metadata):
            shown = [[*of_prompt, *images] for of_prompt, images in zip(metadata[SOURCES], shown, strict=True)]
        rows = [{name: column[i] for name, column in metadata.items()} for i in range(len(prompts))]
        questions = [self._question(question, {**row, "prompt": prompt}) for row, prompt in zip(rows, prompts, strict=True)]
        try:
            return torch.tensor(self.client.run(self._all(shown, questions, read)))
        except NoResponse as error:
            raise RetryableError(f"the judge {self.model} gave no usable answer for an image: {error}") from error

    async def _all(
        self, shown: list[list[Image.Image]], questions: list[str], read: Callable[[httpx.Response], float]
    ) -> list[float]:
        semaphore = asyncio.Semaphore(self.concurrency)

        async def judged(images: list[Image.Image], question: str) -> float:
            async with semaphore:
                return await self._judge(images, question, read)

        return await gather([judged(images, question) for images, question in zip(shown, questions, strict=True)])

    def _question(self, question: str, values: dict[str, Any]) -> str:
        """Fill the known placeholders of the question, such as {prompt}; leave other braces unchanged."""
        known = {"low": f"{self.low:g}", "high": f"{self.high:g}", **values}
        return re.sub(r"\{(\w+)\}", lambda m: str(known.get(m[1], m[0])), question)

    async def _judge(self, images: list[Image.Image], question: str, read: Callable[[httpx.Response], float]) -> float:
        encoded = [base64.b64encode(await asyncio.to_thread(to_png, image)).decode() for image in images]
        content: list[dict] = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}} for png in encoded
        ]
        content.append({"type": "text", "text": question})
        request: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        if self.answer == "yes_no":
            request |= {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        else:
            request |= {"max_tokens": 64}

        def attempt(number: int) -> dict[str, Any]:
            return {"json": {**request, "temperature": 0.0 if number == 0 else 0.7, "seed": number}}

        return await post_with_retries(self.client, self.url, attempt, read, self.attempts)

    def _read(self, response: httpx.Response) -> float:
        with _readable(response) as choice:
            if self.answer == "yes_no":
                return yes_share(choice["logprobs"]["content"][0]["top_logprobs"])
            return (parse_number(choice["message"]["content"], self.low, self.high) - self.low) / (self.high - self.low)

    def _read_pair(self, response: httpx.Response) -> float:
        with _readable(response) as choice:
            if self.answer == "yes_no":
                return token_share(choice["logprobs"]["content"][0]["top_logprobs"], "1", "2")
            return 2 - parse_number(choice["message"]["content"], 1, 2)


@contextmanager
def _readable(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The first choice of a response. InvalidResponse if it has none, or what is done with it fails."""
    try:
        yield response.json()["choices"][0]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidResponse(f"it answered {response.text[:300]!r}") from error


def yes_share(tokens: list[dict[str, Any]]) -> float:
    """P(yes) / (P(yes) + P(no)) of the top first tokens, in any spelling of yes and no. FlowGRPOError if neither is among them."""
    return token_share(tokens, "yes", "no")


def token_share(tokens: list[dict[str, Any]], first: str, second: str) -> float:
    """P(first) / (P(first) + P(second)) of the top first tokens. FlowGRPOError if neither is among them."""
    chance = {first: 0.0, second: 0.0}
    for token in tokens:
        word = token["token"].strip(" \n\t.,!\"'*▁Ġ").lower()
        if word in chance:
            chance[word] += math.exp(token["logprob"])
    share = chance[first] / total if (total := sum(chance.values())) else math.nan
    if not math.isfinite(share):
        raise FlowGRPOError(f"neither {first} nor {second}")
    return share


def parse_number(text: str, low: float, high: float) -> float:
    """Parse the number from low to high in an answer, `7` or `Score: 7/10`. FlowGRPOError if there is none, or several."""
    rest, numbers = text, []
    while match := NUMBER.search(rest):
        numbers.append(float(match[0]))
        rest = rest[match.end() :]
        if (out_of := OUT_OF.match(rest)) and float(out_of[1]) == high:
            rest = rest[out_of.end() :]
    if len(set(numbers)) != 1 or not low <= numbers[0] <= high:
        raise FlowGRPOError("not one number in the range")
    return numbers[0]
