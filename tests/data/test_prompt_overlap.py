"""No prompt is both trained on and measured by: not in the shipped files, and not in a run without a warning."""

import itertools
import json
import sys
from collections import Counter

import pytest
from support.embedded import short_run

from dev.prompts import geneval_prompts
from flow_grpo.config.loading import bundled_file
from flow_grpo.data.prompt_sources import benchmark_overlap, held_out_overlap, load_prompts, normal_form
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.start_checks import sentences

FILES = sorted(file.name for file in bundled_file("prompts").iterdir() if file.suffix in (".txt", ".jsonl"))


def prompts_of(name: str) -> list[str]:
    return load_prompts(f"prompts/{name}").prompts


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a photo of a cat and a dog", "A photo of  a dog and a cat.", True),
        ("a photo of an orange dog and a red cat", "a photo of a red cat and an orange dog", True),
        ("a photo of an orange dog and a red cat", "a photo of an orange cat and a red dog", False),
        ("a photo of a cat left of a dog", "a photo of a dog left of a cat", False),
        ("a photo of a cat", "a photo of two cats", False),
        ("the end", "end", True),
    ],
)
def test_prompts_are_the_same_up_to_case_articles_and_the_order_of_a_pair(one, other, same):
    assert (normal_form(one) == normal_form(other)) == same
    assert held_out_overlap([one], [other]) == same


# files that are a category of another one, of the same part
SUBSETS = {f"shapes_counting_{part}.jsonl": f"shapes_{part}.jsonl" for part in ("train", "eval")}


@pytest.mark.parametrize(("one", "other"), itertools.combinations(FILES, 2))
def test_no_shipped_prompt_is_in_two_files(one, other):
    texts, others = prompts_of(one), prompts_of(other)
    if SUBSETS.get(one) == other:
        assert {*texts} < {*others}
        return
    assert held_out_overlap(texts, others) == 0


# files that name two objects in both orders, since a model reads the orders differently
BOTH_ORDERS = {"shapes_train.jsonl"}


@pytest.mark.parametrize("name", FILES)
def test_no_shipped_prompt_is_in_a_file_twice(name):
    texts = prompts_of(name)
    count = Counter(map(normal_form, texts))
    twice = [text for text in texts if count[normal_form(text)] > 1]
    if name not in BOTH_ORDERS:
        assert not twice
        return
    assert max(count.values()) == 2
    assert {" and ".join(reversed(text.split(" and "))) for text in twice} == {*twice}


def test_the_shipped_geneval_prompts_are_what_their_generator_gives(tmp_path, monkeypatch):
    train, held_out, benchmark = tmp_path / "train.jsonl", tmp_path / "eval.jsonl", bundled_file("prompts/geneval.jsonl")
    words = ["1500", str(train), "240", str(held_out), "--without", str(benchmark)]
    monkeypatch.setattr(sys, "argv", ["geneval", *words])
    geneval_prompts.main()
    assert train.read_text() == bundled_file("prompts/geneval_train.jsonl").read_text()
    assert held_out.read_text() == bundled_file("prompts/geneval_eval.jsonl").read_text()


def test_no_geneval_prompt_asks_for_what_another_files_prompt_asks_for():
    """Also not with its objects in another order, or with a position told from the other side."""
    seen: set = set()
    for name in ("geneval", "geneval_train", "geneval_eval"):
        rows = [json.loads(line) for line in bundled_file(f"prompts/{name}.jsonl").read_text().splitlines()]
        meanings = {geneval_prompts.meaning(row) for row in rows}
        assert len(meanings) == len(rows) or name == "geneval", "the benchmark has one twice"
        assert not meanings & seen
        seen |= meanings


def test_the_meaning_of_a_position_is_the_same_from_both_sides():
    def row(one: str, where: str, other: str) -> dict:
        return {"include": [{"class": other, "count": 1}, {"class": one, "count": 1, "position": [where, 0]}]}

    meaning = geneval_prompts.meaning
    assert meaning(row("cat", "left of", "dog")) == meaning(row("dog", "right of", "cat"))
    assert meaning(row("cat", "above", "dog")) == meaning(row("dog", "below", "cat"))
    others = [("dog", "left of", "cat"), ("cat", "above", "dog"), ("dog", "above", "cat")]
    assert len({meaning(row("cat", "left of", "dog")), *(meaning(row(*words)) for words in others)}) == 4


def test_test_sets_are_known_by_their_prompts_or_their_name():
    bench = prompts_of("geneval.jsonl")
    assert benchmark_overlap(bench[:7], []) == {"geneval": 7}
    assert benchmark_overlap(bench[:7], bench) == {}, "held-out prompts are counted as such"
    assert benchmark_overlap(["a"] * 3, [], "DrawBench") == benchmark_overlap(["a"] * 3, [], "sayakpaul/drawbench")
    assert benchmark_overlap(["a"] * 3, [], "DrawBench") == {"drawbench": 3}
    assert benchmark_overlap(prompts_of("signs_train.txt"), [], "prompts/signs_train.txt") == {}
    assert held_out_overlap(prompts_of("signs_train.txt"), prompts_of("signs_eval.txt")) == 0


def test_a_users_file_with_the_name_of_a_test_set_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "geneval.jsonl").write_text('{"caption": "own"}\n')
    assert benchmark_overlap(["a photo of a bench"], []) == {"geneval": 1}


def test_a_run_warns_of_prompts_that_it_is_measured_by(tmp_path, capsys):
    held_out, signs = prompts_of("signs_eval.txt")[:2], prompts_of("signs_train.txt")[:3]
    train = [held_out[1].upper(), "A photo of a bench", *signs]
    args = short_run(tmp_path / "run", "steps=1", "prompts_per_step=2")
    trainer = FlowGRPOTrainer(args=args, train_dataset=train, eval_dataset=held_out)
    trainer.train()
    said = capsys.readouterr().out
    warnings = [row["warning"] for row in read_metrics(tmp_path / "run") if "warning" in row and row["step"] == 0]
    assert warnings == sentences(trainer.start_checks)
    assert len(warnings) == 2
    assert warnings[0].startswith("the training prompts include 1 of the 2 held-out prompts")
    assert warnings[1].startswith("the training prompts include 1 of the test set geneval")
    assert all(f"warning: {sentence}" in said for sentence in warnings)
