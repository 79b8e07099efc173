"""One list of checks: a run, a dry run and the doctor make each of them."""

import pytest
from support import small_policy as small
from support.embedded import short_run

from flow_grpo.data.prompts import PromptSet, join_sets
from flow_grpo.doctor.dry_run import dry_run
from flow_grpo.doctor.run import RunChecks
from flow_grpo.errors import FlowGRPOError
from flow_grpo.plan import hardware
from flow_grpo.training.start_checks import CHECKS

PARTS = list(CHECKS)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """The ways to start a run: what it is warned of by each."""
    monkeypatch.setattr(hardware, "SECONDS", 0.0)

    def run():
        return small.trainer(small.settings(output_dir=str(tmp_path / "run")), train_dataset=small.PROMPTS)

    def doctor():
        title, results = list(zip(range(2), RunChecks(run()).sections(), strict=False))[1][1]
        assert title == "start"
        return [result.message for result in results]

    return {
        "run": lambda: [sentence for found in run().start_checks.values() for sentence in found],
        "dry run": lambda: dry_run(short_run(tmp_path / "dry", "evaluation.prompts=null")),
        "doctor": doctor,
    }


@pytest.mark.parametrize("way", ["run", "dry run", "doctor"])
def test_a_check_of_the_list_is_made_by_each_way_to_start(way, start, monkeypatch):
    for part in PARTS:
        monkeypatch.setitem(CHECKS[part], f"mine of {part}", lambda known, part=part: [f"mind the {part}"])
    told = "\n".join(start[way]())
    found = [part for part in PARTS if f"mind the {part}" in told]
    assert found == PARTS


@pytest.mark.parametrize("part", PARTS)
def test_what_a_check_refuses_no_way_starts(part, start, monkeypatch):
    def refuse(known):
        raise FlowGRPOError("not so")

    monkeypatch.setitem(CHECKS[part], "mine", refuse)
    for way in start.values():
        with pytest.raises(FlowGRPOError, match="not so"):
            way()


def needs_answer(images, prompts, *, answer):
    return images.mean((1, 2, 3))


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def prompts_first(prompts, images):
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (needs_answer, "needs_answer needs answer, but the prompts have no column answer"),
        (prompts_first, "images come first"),
    ],
)
def test_a_run_does_not_start_with_a_reward_that_its_prompts_cant_be_given_to(reward, sentence, tmp_path):
    with pytest.raises(FlowGRPOError, match=sentence):
        small.trainer(small.settings(output_dir=str(tmp_path)), train_dataset=small.PROMPTS, reward_funcs=reward)
    args = short_run(tmp_path / "dry", "evaluation.prompts=null", f"rewards=[{__file__}:{reward.__name__}]")
    with pytest.raises(FlowGRPOError, match=sentence):
        dry_run(args)


def test_a_reward_needs_columns_only_of_the_sets_that_name_it(tmp_path):
    with_answer = PromptSet(
        ["a", "b"], [{"answer": i, "prompt_set": "asked", "rewards": {"needs_answer": None}} for i in range(2)]
    )
    plain = PromptSet(["c", "d"], [{"prompt_set": "plain", "rewards": {"brightness": None}}] * 2)
    args = small.settings(output_dir=str(tmp_path), evaluation={"max_prompts": None})
    both = join_sets(["asked", "plain"], [with_answer, plain], [1.0, 1.0])
    held_out = join_sets(["plain"], [plain], [1.0])
    rewards = [needs_answer, brightness]
    small.trainer(args, train_dataset=both, eval_dataset=held_out, reward_funcs=rewards)
    everywhere = PromptSet(["c", "d"], [{}] * 2)
    with pytest.raises(FlowGRPOError, match="no column answer"):
        small.trainer(args, train_dataset=both, eval_dataset=everywhere, reward_funcs=rewards)


def test_columns_of_other_prompts_do_not_count(tmp_path):
    answers = [{"prompt": f"{i}", "answer": i} for i in range(4)]
    args = small.settings(output_dir=str(tmp_path), evaluation={"max_prompts": None})
    small.trainer(args, train_dataset=answers, eval_dataset=answers, reward_funcs=needs_answer)
    with pytest.raises(FlowGRPOError, match="no column answer"):
        small.trainer(args, train_dataset=answers, eval_dataset=small.PROMPTS, reward_funcs=needs_answer)
