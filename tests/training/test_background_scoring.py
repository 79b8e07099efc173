"""Rewards scored in the background while further images are drawn, with the same numbers."""

import threading

import pytest
from support import small_policy as small
from support.embedded import short_run
from support.run_contents import MEASURED

from flow_grpo.tracking.tracker import read_metrics

PARTS = ("microbatch=4", "steps=1", "evaluation.prompts=null")  # two prompts, each a part


def test_a_part_is_scored_while_the_next_is_drawn_and_the_numbers_are_the_same(tmp_path):
    second_drawn = threading.Event()
    was_drawn = []

    def brightness(images, prompts):
        return images.mean((1, 2, 3))

    def patient(images, prompts):
        """Does not end before the second part has been drawn: were it in the way of the drawing, it would wait in vain."""
        was_drawn.append(second_drawn.wait(20))
        return images.mean((1, 2, 3))

    plain = small.trainer(short_run(tmp_path / "plain", *PARTS), reward_funcs=brightness)
    trainer = small.trainer(short_run(tmp_path / "background", *PARTS), reward_funcs=patient)
    trainer.stage.sampler.score_in_background = True
    decode, drawn = trainer.policy.decode, []

    def counted(*given):
        images = decode(*given)
        drawn.append(len(images))
        if len(drawn) == 2:
            second_drawn.set()
        return images

    trainer.policy.decode = counted
    plain.train()
    trainer.train()
    assert was_drawn == [True, True]
    assert drawn[:2] == [4, 4]  # the images that are kept are decoded after them
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith((*MEASURED, "rewards/"))}
            for row in read_metrics(tmp_path / name)
        ]
        for name in ("plain", "background")
    ]
    assert rows[0] == rows[1]


def test_an_error_in_the_background_stops_the_run_and_leaves_nothing_behind(tmp_path):
    called, before = [], threading.enumerate()

    def fails(images, prompts):
        called.append(prompts[0])
        raise RuntimeError("the camera is off")

    trainer = small.trainer(short_run(tmp_path, *PARTS), reward_funcs=fails)
    trainer.stage.sampler.score_in_background = True
    with pytest.raises(ValueError, match=r"reward fails raised RuntimeError on 4 images.*the camera is off"):
        trainer.train()
    assert list((tmp_path / "checkpoints").iterdir())
    left = [thread for thread in threading.enumerate() if thread.name == "rewards" and thread not in before]
    for thread in left:
        thread.join(60)
    assert not [thread for thread in left if thread.is_alive()]
