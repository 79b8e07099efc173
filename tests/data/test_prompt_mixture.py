"""Several prompt sets mixed by weight: how often each is drawn, in which order its prompts come, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import PromptSetConfig
from flow_grpo.data.prompt_sources import load_run_prompts
from flow_grpo.data.prompts import PromptSampler, PromptSet, join_sets, rows_by_set, sampler_of

WEIGHTS = (1.0, 2.5, 0.5)


def mixture(sizes=(30, 40, 20), weights=WEIGHTS):
    names = [f"set{i}" for i in range(len(sizes))]
    parts = [
        PromptSet([f"{name} {i}" for i in range(size)], [{"prompt_set": name}] * size)
        for name, size in zip(names, sizes, strict=True)
    ]
    return join_sets(names, parts, weights)


def drawn(sampler, steps, prompts=6):
    return [sampler.sample(step, prompts, 1).prompts for step in steps]


@pytest.mark.parametrize("seed", [0, 1])
def test_sets_are_drawn_by_their_weights(seed):
    prompts = [prompt.split()[0] for step in drawn(sampler_of(mixture(), seed), range(500)) for prompt in step]
    for number, weight in enumerate(WEIGHTS):
        share = weight / sum(WEIGHTS)
        error = math.sqrt(share * (1 - share) / len(prompts))
        assert abs(prompts.count(f"set{number}") / len(prompts) - share) < 4 * error


def test_the_number_of_prompts_of_a_set_varies_between_steps_as_independent_draws_do():
    counts = torch.tensor(
        [sum(p.startswith("set1") for p in step) for step in drawn(sampler_of(mixture(), 3), range(500))]
    ).float()
    share = WEIGHTS[1] / sum(WEIGHTS)
    assert counts.var().item() == pytest.approx(6 * share * (1 - share), rel=0.25)


def test_within_a_set_every_prompt_comes_once_an_epoch_in_the_order_of_the_set_alone():
    of_first = [
        p for step in drawn(sampler_of(mixture(weights=(1.0, 1.0, 1.0)), 0), range(12)) for p in step if p.startswith("set0")
    ]
    alone = PromptSampler(PromptSet([f"set0 {i}" for i in range(30)], [{}] * 30), 0).sample(0, 30, 1).prompts
    assert 15 < len(of_first) <= 30, "an epoch, else this tests nothing"
    assert of_first == alone[: len(of_first)]


def test_the_sets_of_a_step_are_mixed_and_its_groups_numbered_in_order():
    batch = sampler_of(mixture(weights=(1.0, 1.0, 1.0)), 0).sample(2, 12, 2)
    assert batch.group.tolist() == [i // 2 for i in range(24)]
    names = [row["prompt_set"] for row in batch.metadata]
    assert names != sorted(names), "else an update would have prompts of one set alone"
    rows = rows_by_set(batch.metadata)
    assert list(rows) == sorted(set(names))
    assert torch.stack([*rows.values()]).sum(0).tolist() == [1] * 24
    assert rows_by_set([{}, {}]) == {}


def test_a_resumed_run_draws_what_it_would_have_drawn():
    whole, first, second = (sampler_of(mixture(), 4) for _ in range(3))

    def run(sampler, steps):
        found = []
        for step in steps:
            batch = sampler.sample(step, 6, 2)
            found.append(batch.prompts)
        return found

    expected = run(whole, range(20))
    assert run(first, range(9)) == expected[:9]
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert run(second, range(9, 20)) == expected[9:]


def files(tmp_path: Path) -> list[PromptSetConfig]:
    (tmp_path / "signs.txt").write_text("a red fox\na blue owl\n")
    rows = [{"prompt": "two cats", "count": 2}, {"prompt": "a dog", "count": 1}]
    (tmp_path / "counts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        PromptSetConfig(file=f"{tmp_path}/signs.txt", rewards=["ocr"]),
        PromptSetConfig(file=f"{tmp_path}/counts.jsonl", rewards={"geneval": 0.5}, name="objects"),
    ]


def test_each_prompt_knows_its_set_and_its_rewards(tmp_path):
    loaded = load_run_prompts(files(tmp_path))
    assert loaded.prompts == ["a red fox", "a blue owl", "two cats", "a dog"]
    assert [row["prompt_set"] for row in loaded.metadata] == ["signs", "signs", "objects", "objects"]
    assert [row["rewards"] for row in loaded.metadata] == [{"ocr": None}, {"ocr": None}, {"geneval": 0.5}, {"geneval": 0.5}]
    assert loaded.metadata[2]["count"] == 2
    assert loaded.head(1).prompts == ["a red fox", "two cats"], "of each set"
    assert load_run_prompts(["a list", "as before"]).prompts == ["a list", "as before"]


def test_a_column_that_is_the_name_of_the_set_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "prompt_set": "mine"}')
    with pytest.raises(ValueError, match="has a column `prompt_set`, a name that is reserved"):
        load_run_prompts([PromptSetConfig(file=f"{tmp_path}/x.jsonl")])


def test_that_column_is_refused_of_prompts_without_sets_too_since_rows_without_a_name_would_be_in_no_set(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "prompt_set": "mine"}\n{"prompt": "b", "prompt_set": ""}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl has a column `prompt_set`, a name that is reserved .*: give it"):
        load_run_prompts(f"{tmp_path}/x.jsonl")
    with pytest.raises(ValueError, match="the PromptSet has a column `prompt_set`"):
        load_run_prompts(PromptSet(["a"], [{"prompt_set": None}]))
    loaded = mixture()
    assert load_run_prompts(loaded) is loaded


@pytest.mark.parametrize("in_a_set", [True, False])
def test_a_column_by_which_a_prompt_chose_its_rewards_is_refused(tmp_path, in_a_set):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "rewards": ["ocr"]}\n{"prompt": "b"}\n')
    source = [PromptSetConfig(file=f"{tmp_path}/x.jsonl")] if in_a_set else f"{tmp_path}/x.jsonl"
    with pytest.raises(ValueError, match=r"x\.jsonl has a column `rewards`, by which prompts no longer choose .* as a set"):
        load_run_prompts(source)


def test_a_set_that_may_run_out_within_a_step_is_refused():
    with pytest.raises(ValueError, match="prompts_per_step=6, but the prompt set set1 has 3"):
        sampler_of(mixture(sizes=(9, 3, 9)), 0).sample(0, 6, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompts": []}, "prompts is an empty list: give a file, or a list of sets"),
        ({"prompts": [{"file": "a.txt"}, {"file": "b/a.txt"}]}, "two sets of prompts are called a: give each a name"),
        (
            {"prompts": [{"file": "a.txt", "weight": 0}]},
            "prompt set 1: prompts.weight is 0, but it should be greater than 0",
        ),
        ({"prompts": ["a.txt", {"weight": 1}]}, "^prompt set 2: prompts.file is missing"),
        (
            {"evaluation": {"prompts": [None]}},
            r"^prompt set 1: evaluation.prompts is None, but it should be a file or \{file: ",
        ),
        ({"evaluation": {"prompts": [{"file": "a.txt", "weight": 2}]}}, "measures all prompts of a: leave its weight out"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, words):
    with pytest.raises(ValueError, match=words) as error:
        FlowGRPOConfig(rewards={"ocr": 1.0}, **settings)
    assert "\n" not in str(error.value)


def test_a_config_with_sets_is_written_and_read_again(tmp_path):
    sets = [{"file": "a.txt", "weight": 2.0, "rewards": ["ocr"]}, {"file": "b.txt", "rewards": {"color": 0.5}}]
    args = FlowGRPOConfig(rewards={"ocr": 1.0, "color": 1.0}, prompts=sets)
    (tmp_path / "run.yaml").write_text(args.to_yaml())
    assert FlowGRPOConfig.from_yaml(tmp_path / "run.yaml").prompts == args.prompts
    assert args.prompts[0].weight == 2
