"""A vision-language model as judge, behind an OpenAI-compatible endpoint (vLLM, SGLang, or a hosted one)."""

import asyncio
import base64
import functools
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

SCALE = "from {low} (not at all) to {high} (perfectly), and nothing else."


def questions(opening: str, how_well: str, whether: str, echo: str) -> dict[str, str]:
    """The question of each kind of answer."""
    return {
        "number": f"{opening}{how_well} Answer with one number {SCALE}",
        "yes_no": f"{opening}{whether} Answer with one word, Yes or No.",
        "expected": f"{opening}{how_well} Answer with one digit {SCALE}",
        "checklist": f"{opening}{{item}}\nAnswer with one word, Yes or No.",
        "echo": echo,
    }


QUESTIONS = questions(
    "An image was made for this request:\n{prompt}\n\n",
    "How well does the image show what was asked for?",
    "Does the image show everything that was asked for?",
    "Describe this image in detail.",
)
PAIR_QUESTION = (
    "Two images were made for this request:\n{prompt}\n\nWhich of them shows better what was asked for? Answer with one digit: 1 for "
    "the first image, 2 for the second."
)
EDIT_QUESTIONS = questions(
    "The first image was changed by this request, into the second:\n{prompt}\n\n",
    "How well does the second image show the change, with all else as it was?",
    "Does the second image show the change, with all else as it was?",
    "The first image was changed into the second. Say by which request.",
)
EDIT_PAIR_QUESTION = (
    "The first image was changed by this request, in two ways, into the second and the third:\n{prompt}\n\nWhich of the two shows "
    "the change better, with all else as it was? Answer with one digit: 1 for the second image, 2 for the third."
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)")
OUT_OF = re.compile(r"\s*(?:/|out of)\s*(\d+(?:\.\d+)?)")


class Judge:
    """The answer of a vision-language model to a question on image and prompt, or with the option `scope: pair` on two images.

    `yes_no` is P(yes) / (P(yes) + P(no)) from the log-probabilities of the first token, the VQAScore (arXiv 2404.01291), which
    is smooth; `number` is the number that the model writes, scaled from low..high to 0..1, which is coarse. `expected` is the mean of
    the digits low..high by their probabilities as the first token, scaled to 0..1 (UniWorld-V2, arXiv 2510.16888). `checklist` asks
    the yes/no questions of the prompt's metadata column `checklist`, a list of questions or of {question, weight}, and is the weighted
    mean of their P(yes). `echo` is the mean log-probability of the prompt's tokens as the answer to a question that does not show
    the prompt (PromptEcho, arXiv 2604.12652): one pass and no word written, at an endpoint that has vLLM's `prompt_logprobs`. A
    question can contain {prompt}, {low}, {high}, {item} of a checklist and any metadata column by name. After a malformed answer the
    question is repeated with a higher temperature and another seed; an image without a usable answer is an error, never a 0.

    With `scope: pair` the question is which of two images is better, and the answer P(1) / (P(1) + P(2)) of the first token, or 1 or
    2 as the model writes it; an image's value is its win rate against the others of its group (Pref-GRPO, arXiv 2508.20751). Each
    pair is asked in both orders, since models prefer one position: K (K - 1) requests for K images, fewer with `opponents`.

    Where prompts have images, they are shown first, and the built-in questions ask for the change.

    Range [0, 1], of `echo` any number up to 0. Weights and licence: the endpoint's model, for example Qwen/Qwen2.5-VL-7B-Instruct
    (Apache-2.0, 17 GB) by `vllm serve`. No memory here. Gamed by images and prompts that address the judge, such as text that says
    the image is perfect, and by what a small model can't see: counts and spelling first.

    Args:
        url: base URL of the endpoint, http://host:port/v1. The API key comes from the environment variable OPENAI_API_KEY.
        model: name of the model at the endpoint.
        question: a question that replaces the built-in one.
        low, high: the range of `number`, by default 0 to 10, and of `expected`, by default 0 to 5.
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
        answer: Literal["yes_no", "number", "expected", "checklist", "echo"] = "yes_no",
        question: str | None = None,
        low: float = 0,
        high: float | None = None,
        concurrency: int = 16,
        timeout: float = 60.0,
        attempts: int = 6,
        scope: Literal["image", "pair"] = "image",
        opponents: int | None = None,
    ) -> None:
        if answer not in QUESTIONS:
            raise FlowGRPOError(f"judge: answer={answer!r} is none of {', '.join(QUESTIONS)}.")
        if high is None:
            high = 5 if answer == "expected" else 10
        if answer == "expected" and not {low, high} <= set(range(10)):
            raise FlowGRPOError(
                f"judge: low={low} and high={high} must be digits: answer=expected takes the mean of digits."
            )
        if not low < high:
            raise FlowGRPOError(f"judge: low={low} must be below high={high}.")
        if scope not in (IMAGE, PAIR):
            raise FlowGRPOError(f"judge: scope={scope!r} is neither image nor pair.")
        if scope == PAIR and answer not in ("yes_no", "number"):
            raise FlowGRPOError(f"judge: answer={answer} is for one image: with scope=pair set yes_no or number.")
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
        question = self.question or (EDIT_QUESTIONS if has_sources(metadata) else QUESTIONS)[self.answer]
        shown = [to_pil(image[None]) for image in images]
        if self.answer != "checklist":
            return self._ask(shown, prompts, metadata, question, self._read)
        checklists = [_checklist(column, prompt) for column, prompt in zip(_checklists(metadata), prompts, strict=True)]
        rows = torch.tensor([row for row, checklist in enumerate(checklists) for _ in checklist])
        items, weights = zip(*(entry for checklist in checklists for entry in checklist), strict=True)
        columns = {name: [column[row] for row in rows] for name, column in metadata.items()}
        answers = self._ask(
            [shown[row] for row in rows],
            [prompts[row] for row in rows],
            {**columns, "item": list(items)},
            question,
            self._read,
        )
        sums, weight = torch.zeros(2, len(prompts)), torch.tensor(weights)
        sums.index_add_(1, rows, torch.stack([weight * answers, weight]))
        return sums[0] / sums[1]

    def compare(self, first: torch.Tensor, second: torch.Tensor, prompts: list[str], **metadata: Any) -> torch.Tensor:
        """Two times (n, 3, H, W) in [0, 1]; returns (n,), how sure it is that the first is better. FlowGRPOError as in `score`."""
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
            return torch.tensor(self.client.run(self._all(shown, questions, prompts, read)))
        except NoResponse as error:
            raise RetryableError(f"the judge {self.model} gave no usable answer for an image: {error}") from error

    async def _all(
        self,
        shown: list[list[Image.Image]],
        questions: list[str],
        prompts: list[str],
        read: Callable[[httpx.Response], float],
    ) -> list[float]:
        semaphore = asyncio.Semaphore(self.concurrency)

        async def judged(images: list[Image.Image], question: str, prompt: str) -> float:
            async with semaphore:
                return await self._judge(images, question, prompt, read)

        return await gather([judged(*asked) for asked in zip(shown, questions, prompts, strict=True)])

    def _question(self, question: str, values: dict[str, Any]) -> str:
        """Fill the known placeholders of the question, such as {prompt}; leave other braces unchanged."""
        known = {"low": f"{self.low:g}", "high": f"{self.high:g}", **values}
        return re.sub(r"\{(\w+)\}", lambda m: str(known.get(m[1], m[0])), question)

    async def _judge(
        self, images: list[Image.Image], question: str, prompt: str, read: Callable[[httpx.Response], float]
    ) -> float:
        encoded = [base64.b64encode(await asyncio.to_thread(to_png, image)).decode() for image in images]
        content: list[dict] = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}} for png in encoded
        ]
        content.append({"type": "text", "text": question})
        request: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        if self.answer == "echo":
            request["messages"].append({"role": "assistant", "content": str(prompt)})
            request |= {
                "max_tokens": 1,
                "prompt_logprobs": 1,
                "add_generation_prompt": False,
                "continue_final_message": True,
            }
            read = functools.partial(echo, prompt=str(prompt))
        elif self.answer == "number":
            request |= {"max_tokens": 64}
        else:
            request |= {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}

        def attempt(number: int) -> dict[str, Any]:
            return {"json": {**request, "temperature": 0.0 if number == 0 else 0.7, "seed": number}}

        return await post_with_retries(self.client, self.url, attempt, read, self.attempts)

    def _read(self, response: httpx.Response) -> float:
        with _readable(response) as choice:
            if self.answer == "number":
                value = parse_number(choice["message"]["content"], self.low, self.high)
                return (value - self.low) / (self.high - self.low)
            tokens = choice["logprobs"]["content"][0]["top_logprobs"]
            if self.answer == "expected":
                return expected_digit(tokens, int(self.low), int(self.high))
            return token_share(tokens, "yes", "no")

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


def echo(response: httpx.Response, prompt: str) -> float:
    """The mean log-probability of the prompt's tokens, which end what the model has read. InvalidResponse if they are not there."""
    total, text, count = 0.0, "", 0
    try:
        for position in reversed(response.json()["prompt_logprobs"]):
            token = next(iter(position.values()))  # the one that was read, and after it the likeliest
            total, text, count = total + token["logprob"], token["decoded_token"] + text, count + 1
            if prompt.strip() in text:
                return total / count
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        pass
    raise InvalidResponse(
        "its prompt_logprobs do not end with the prompt: answer=echo needs an endpoint that has `prompt_logprobs` and "
        "`continue_final_message`, as vLLM"
    )


def token_share(tokens: list[dict[str, Any]], first: str, second: str) -> float:
    """P(first) / (P(first) + P(second)) of the top first tokens, in any spelling. FlowGRPOError if neither is among them."""
    return _shares(tokens, [first, second])[first]


def expected_digit(tokens: list[dict[str, Any]], low: int, high: int) -> float:
    """The mean of the digits low..high among the top first tokens by their probabilities, scaled to 0..1. FlowGRPOError if none is."""
    shares = _shares(tokens, [str(digit) for digit in range(low, high + 1)])
    return sum((int(digit) - low) * share for digit, share in shares.items()) / (high - low)


def _shares(tokens: list[dict[str, Any]], words: list[str]) -> dict[str, float]:
    """The probability of each word among the top first tokens, of the sum over these words. FlowGRPOError if none is among them."""
    chance = dict.fromkeys(words, 0.0)
    for token in tokens:
        word = token["token"].strip(" \n\t.,!\"'*▁Ġ").lower()
        if word in chance:
            chance[word] += math.exp(token["logprob"])
    total = sum(chance.values())
    shares = {word: value / total if total else math.nan for word, value in chance.items()}
    if not all(map(math.isfinite, shares.values())):
        raise FlowGRPOError(f"none of {', '.join(words)}")
    return shares


def _checklists(metadata: dict[str, list]) -> list[Any]:
    if "checklist" not in metadata:
        raise FlowGRPOError(
            'judge: answer=checklist needs a column checklist of the prompts, such as {"prompt": ..., "checklist": ["Is the fox red?"]}.'
        )
    return metadata["checklist"]


def _checklist(entries: Any, prompt: str) -> list[tuple[str, float]]:
    """The questions of a prompt with their weights. FlowGRPOError if it has none, or not in this form."""
    entries = entries if isinstance(entries, list) else []
    items: list[Any] = [{"question": entry} if isinstance(entry, str) else entry for entry in entries]
    if not items or not all(isinstance(item, dict) and _is_item(**item) for item in items):
        raise FlowGRPOError(
            f"judge: the checklist of {str(prompt)!r} should be a list of questions, or of {{question: ..., weight: ...}} with weights "
            "above 0."
        )
    return [(item["question"], float(item.get("weight", 1.0))) for item in items]


def _is_item(question: Any = None, weight: Any = 1.0, **others: Any) -> bool:
    return isinstance(question, str) and bool(question.strip()) and isinstance(weight, int | float) and 0 < weight < math.inf


def parse_number(text: str, low: float, high: float) -> float:
    """Parse the number from low to high in an answer, `7` or `Score: 7/10`. FlowGRPOError if there is none, or several."""
    rest, numbers = text, []
    while match := NUMBER.search(rest):
        numbers.append(float(match[0]))
        rest = rest[match.end() :]
        if out_of := OUT_OF.match(rest):
            numbers += [] if float(out_of[1]) == high else [math.nan]  # 5/5 does not mean 5 of 10
            rest = rest[out_of.end() :]
    if len(set(numbers)) != 1 or not low <= numbers[0] <= high:
        raise FlowGRPOError("not one number in the range")
    return numbers[0]
