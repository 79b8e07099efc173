"""A reward of a file may use processes, however they are started: they can import the file's module."""

import multiprocessing
import pickle

import pytest
import torch
from support.cli_process import FORKS

from flow_grpo import rewards, user_files

POOLED = """
import multiprocessing as mp
import os
from concurrent.futures import ProcessPoolExecutor

def one(array):
    return float(array.mean())

def dies(array):
    os._exit(3)

def pool(images, prompts, start="fork"):
    with mp.get_context(start).Pool(1) as pool:
        return pool.map(one, [image.numpy() for image in images])

def executor(images, prompts, start="spawn", work=one):
    with ProcessPoolExecutor(1, mp_context=mp.get_context(start)) as pool:
        return list(pool.map(work, [image.numpy() for image in images]))

def broken(images, prompts):
    return executor(images, prompts, "fork", dies)
"""
IMAGES, PROMPTS = torch.full((2, 3, 4, 4), 0.25), ["a fox", "a cat"]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my pool-1.py").write_text(POOLED)
    return tmp_path / "my pool-1.py"


def _pool(file, start):
    rewards.load(f"{file}:executor")  # another reward of the file, whose module stays the same
    reward = rewards.load(f"{file}:pool", start=start)
    rewards.load(f"{file}:executor")
    assert rewards.score("mine", reward, IMAGES, PROMPTS).tolist() == [0.25, 0.25]


def _broken(file, name):
    with pytest.raises(ValueError, match=r"^reward mine raised BrokenProcessPool on 2 images.*terminated abruptly"):
        rewards.score("mine", rewards.load(f"{file}:{name}"), IMAGES, PROMPTS)


def in_a_process_without_threads(check, *args):
    """Run a check in a process of its own: pytest's has threads of other tests, with which a fork can hang."""
    process = FORKS.Process(target=check, args=args)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_a_pool_of_a_file_works(file, start):
    in_a_process_without_threads(_pool, file, start)


def test_an_executor_works_and_says_when_a_worker_died(file):
    assert rewards.score("mine", rewards.load(f"{file}:executor"), IMAGES, PROMPTS).tolist() == [0.25, 0.25]
    in_a_process_without_threads(_broken, file, "broken")


def test_another_interpreter_finds_the_module_by_its_name(file):
    one = rewards.locate("reward", f"{file}:one")
    assert pickle.loads(pickle.dumps(one)) is one
    assert one.__module__ == user_files.module_name(file)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(one, (IMAGES[0].numpy(),)) == 0.25
