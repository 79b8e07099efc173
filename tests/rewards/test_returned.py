"""What a reward may return and take besides a tensor and plain columns, and one sentence on everything else."""

import asyncio
import gc
import re
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from flow_grpo import rewards
from flow_grpo.rewards import scopes
from flow_grpo.rewards.threads import DaemonThread, call_interruptibly

IMAGES, PROMPTS = torch.stack([torch.full((3, 4, 4), value) for value in (0.25, 0.5)]), ["a fox", "a cat"]


def means(images) -> list[float]:
    return [float(image.mean()) for image in images]


class AwaitedJudge:
    async def __call__(self, images, prompts, **metadata):
        return await asyncio.gather(*[self.ask(image) for image in images])

    async def ask(self, image):
        await asyncio.sleep(0)
        return float(image.mean())


class Column:
    """As one of pandas: an array to NumPy alone."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values)


class KeepsItsLoop:
    """As an HTTP client that is kept: it may be used only in the loop in which it was made."""

    loop = None

    async def __call__(self, images, prompts):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return means(images)


class ModuleWithItsCall(torch.nn.Module):
    def __call__(self, images, prompts):
        return means(images)


async def coroutine_with_details(images, prompts):
    return means(images), {"seconds": 1}


def runs_a_loop(images, prompts):
    return asyncio.run(AwaitedJudge()(images, prompts))


ACCEPTED = {
    "(scores, details)": lambda images, prompts: (np.array(means(images)), {}),
    "a parameter metadata": lambda images, prompts, metadata: (means(images), {"rows": metadata}),
    "a generator": lambda images, prompts: (float(image.mean()) for image in images),
    "(a generator, details)": lambda images, prompts: ((float(image.mean()) for image in images), {}),
    "a reversed array": lambda images, prompts: np.array(means(images)[::-1])[::-1],
    "a column of a data frame": lambda images, prompts: Column(means(images)),
    "fractions": lambda images, prompts: [Fraction(value) for value in means(images)],
    "an array of decimals": lambda images, prompts: np.array([Decimal(value) for value in means(images)]),
    "a column of decimals": lambda images, prompts: Column([Decimal(value) for value in means(images)]),
    "a sparse tensor": lambda images, prompts: images.mean((1, 2, 3)).to_sparse(),
    "bfloat16": lambda images, prompts: images.mean((1, 2, 3)).bfloat16(),
    "0-d tensors": lambda images, prompts: [image.mean() for image in images],
    "inference mode": torch.inference_mode()(lambda images, prompts: images.mean((1, 2, 3))),
    "a coroutine": AwaitedJudge(),
    "a coroutine of both": coroutine_with_details,
    "a loop of its own": runs_a_loop,
    "one loop": KeepsItsLoop(),
    "a module with __call__": ModuleWithItsCall(),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_a_reward_may_return(what):
    for _ in range(2):
        assert rewards.score("mine", ACCEPTED[what], IMAGES, PROMPTS, word=["A", "B"]).tolist() == [0.25, 0.5]


def test_a_coroutine_is_awaited_inside_a_running_loop_too():
    async def cell():
        return rewards.score("mine", AwaitedJudge(), IMAGES, PROMPTS)

    assert asyncio.run(cell()).tolist() == [0.25, 0.5]


def test_a_client_is_kept_by_calls_of_several_threads():
    """A run scores each training step, and each evaluation, in another thread."""
    reward = KeepsItsLoop()
    for _ in range(3):
        call = call_interruptibly(lambda: rewards.score("mine", reward, IMAGES, PROMPTS), lambda: False)
        assert call.tolist() == [0.25, 0.5]

    async def cell():
        return rewards.score("mine", reward, IMAGES, PROMPTS)

    assert asyncio.run(cell()).tolist() == [0.25, 0.5]


def test_two_threads_may_await_at_a_time():
    async def meets(images, prompts):
        await asyncio.to_thread(barrier.wait, 60)
        return means(images)

    barrier, threads = threading.Barrier(2), [DaemonThread(), DaemonThread()]
    calls = [thread.submit(lambda: rewards.score("mine", meets, IMAGES, PROMPTS)) for thread in threads]
    assert [call.result(60).tolist() for call in calls] == [[0.25, 0.5]] * 2
    for thread in threads:
        thread.close()


def test_an_async_reward_may_call_another_one():
    async def inner(images, prompts):
        await asyncio.sleep(0)
        return means(images)

    async def outer(images, prompts):
        return rewards.score("inner", inner, images, prompts)

    thread = DaemonThread()  # which a test that fails does not wait for
    assert thread.submit(lambda: rewards.score("outer", outer, IMAGES, PROMPTS)).result(60).tolist() == [0.25, 0.5]
    thread.close()


def test_details_keep_no_graph():
    def with_graph(images, prompts):
        with torch.enable_grad():
            return torch.ones(2, requires_grad=True) * 2, {}

    assert not rewards.score("mine", with_graph, IMAGES, PROMPTS).requires_grad


@pytest.mark.parametrize("scope", scopes.SCOPES)
def test_no_images_have_no_values(scope):
    def not_called(*inputs):
        raise AssertionError

    not_called.scope, not_called.differentiable = scope, True
    nothing = torch.zeros(0, 3, 4, 4)
    assert rewards.score("mine", not_called, nothing, []).shape == (0,)
    if scope == scopes.IMAGE:
        assert rewards.value_and_gradient("mine", not_called, nothing, [], {}).gradient.shape == nothing.shape


def test_pil_images_in_place_of_every_tensor():
    @rewards.takes_pil
    def brighter(first, second, prompts):
        return [float(a.getpixel((0, 0)) > b.getpixel((0, 0))) for a, b in zip(first, second, strict=True)]

    @rewards.takes_pil
    def corner(images, prompts):
        return [image.getpixel((0, 0))[0] for image in images]

    brighter.scope = "pair"
    assert rewards.score("mine", brighter, IMAGES, ["a fox"] * 2).tolist() == [0, 1]
    assert corner(images=IMAGES, prompts=PROMPTS) == [64, 128]
    with pytest.raises(
        ValueError, match="takes_pil decorates a function: write it above the method __call__ of AwaitedJudge"
    ):
        rewards.takes_pil(AwaitedJudge)


def test_metadata_is_one_dict_for_each_image():
    rows = []

    def mine(images, prompts, metadata, word):
        rows.append(metadata)
        return means(images)

    rewards.score("mine", mine, IMAGES, PROMPTS, word=["A", "B"], number=[1, 2])
    assert rows == [[{"word": "A", "number": 1}, {"word": "B", "number": 2}]]
    rewards.score("mine", mine, IMAGES, PROMPTS, word=["A", "B"], metadata=["x", "y"])
    assert rows[1] == ["x", "y"], "a column of that name"


def test_options_of_a_function_are_no_columns(tmp_path):
    text = "def mine(images, prompts, metadata, factor):\n    return [factor * len(row) for row in metadata]\n"
    (tmp_path / "mine.py").write_text(text)
    reward = rewards.load(f"{tmp_path}/mine.py:mine", factor=2)
    assert rewards.score("mine", reward, IMAGES, PROMPTS, word=["A", "B"], factor=[7, 7]).tolist() == [4, 4]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def raises_it(images, prompts):
    raise Unprintable


async def many(images, prompts):
    yield 1.0


REFUSED = {
    "a dict": (lambda i, p: {"sharp": [1.0, 2.0]}, "returned a dict with sharp for 2 images; it must return one number each"),
    "a complex tensor": (lambda i, p: torch.zeros(2, dtype=torch.complex64), "they are complex; return their abs() or real."),
    "complex numbers": (lambda i, p: np.array([1j, 2j]), "returned a ndarray that can't be read as numbers for 2 images"),
    "texts as an array": (lambda i, p: np.array(["a", "b"]), "returned a ndarray that can't be read as numbers"),
    "a list with a dict": (lambda i, p: [1.0, {}], "returned a list that can't be read as numbers for 2 images"),
    "a ragged list": (lambda i, p: [[1.0], [1.0, 2.0]], "returned a list that can't be read as numbers for 2 images"),
    "one decimal": (lambda i, p: Decimal(1), "returned shape () for 2 images; it must return one number each: it is called once"),
    "an array with None": (lambda i, p: np.array([1.0, None]), "returned a ndarray that can't be read as numbers"),
    "an object": (lambda i, p: object(), "returned a object that can't be read as numbers"),
    "large numbers": (lambda i, p: [1.0, -3e38], "returned -3e+38, and values beyond 1e+15 can't be compared in float32: scale them."),
    "larger numbers": (lambda i, p: [1.0, 1e300], "returned 1e+300, and values beyond"),
    "an async generator": (many, "returned a async_generator that can't be read as numbers for 2 images"),
    "no text": (raises_it, "raised Unprintable on 2 images, the first for the prompt 'a fox': its text raised RuntimeError"),
    "pixels as PIL": (lambda i, p: [image.convert("L") for image in i], "images are a tensor: decorate it with flow_grpo.rewards."),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_reward_must_not_return_is_said_in_one_sentence(what):
    reward, sentence = REFUSED[what]
    with pytest.raises(ValueError, match=f"^reward mine .*{re.escape(sentence)}") as caught:
        rewards.score("mine", reward, IMAGES, PROMPTS)
    assert "\n" not in str(caught.value)


def by_trl(prompts, completions, **kwargs):
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (by_trl, "takes (prompts, completions, **kwargs), but it must take (images, prompts, **metadata): images come first"),
        (lambda prompts, images: means(images), "images come first, then prompts."),
        (torch.mean, "does not say what it takes: wrap it in a function(images, prompts)."),
    ],
)  # fmt: skip
def test_a_reward_of_another_shape_is_told_what_to_change(reward, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        rewards.score("mine", reward, IMAGES, PROMPTS)


def test_the_garbage_collector_stays_on(capfd):
    def off(images, prompts):
        gc.disable()
        return means(images)

    for _ in range(2):
        rewards.score("mine", off, IMAGES, PROMPTS)
    assert gc.isenabled()
    assert capfd.readouterr().err.count("Python's garbage collector") == 1, "one warning"
