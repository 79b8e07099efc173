"""Prompts that the trainer is given: from memory with metadata, recorded in the run's config, compared when a run is resumed."""

import datasets
import pytest
from support import small_policy as small
from support.embedded import short_run

from flow_grpo import FlowGRPOConfig, PromptSet
from flow_grpo.cli.evaluate import evaluate
from flow_grpo.config.sections import FROM_PYTHON
from flow_grpo.export.export import export
from flow_grpo.run_folder import layout

pytestmark = pytest.mark.usefixtures("no_report")
ROWS = [{"prompt": f"a {word}", "share": n / 6} for n, word in enumerate(("cat", "dog", "sun", "owl", "tree", "boat"))]
HELD_OUT = ["a cat and a dog", "an owl"]
received: set[float] = set()


def redness(images, prompts, share):
    received.update(share)
    return images[:, 0].mean((1, 2))


def trainer(folder, train_dataset, steps=1, **more):
    args = short_run(
        folder, f"steps={steps}", "save_every=1", "rewards={jpeg_size: 1}", "evaluation.rewards={}", "trackers=[]"
    )
    return small.trainer(args, train_dataset=train_dataset, **more)


def test_columns_of_a_data_set_reach_the_rewards(tmp_path):
    received.clear()
    own = trainer(tmp_path / "run", datasets.Dataset.from_list(ROWS), reward_funcs=redness, eval_dataset=ROWS[:2])
    assert own.train_set == PromptSet([row["prompt"] for row in ROWS], [{"share": row["share"]} for row in ROWS])
    own.train()
    assert received
    assert received <= {row["share"] for row in ROWS}


def test_a_run_says_that_its_prompts_were_given_from_python(tmp_path):
    run, texts = tmp_path / "run", [row["prompt"] for row in ROWS]
    trainer(run, (text for text in texts), eval_dataset=HELD_OUT).train()
    recorded = FlowGRPOConfig.from_yaml(run / layout.CONFIG)
    assert (recorded.prompts, recorded.evaluation.prompts) == (FROM_PYTHON, FROM_PYTHON)
    assert "signs_train" not in (run / layout.CONFIG).read_text()
    export(run, tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    assert "signs_" not in card
    assert "The prompts were given from Python and are in no file. `flow-grpo train config.yaml prompts=FILE` trains" in card
    with pytest.raises(ValueError, match="given from Python and are in no file: give a file of prompts"):
        evaluate(targets=[str(run)])
    trainer(run, tuple(texts), steps=2, eval_dataset=HELD_OUT).train(resume=True)
    with pytest.raises(ValueError, match="the content of prompts has changed"):
        trainer(run, [*texts[:-1], "a ship"], steps=3, eval_dataset=HELD_OUT).train(resume=True)


def test_a_path_that_the_trainer_is_given_is_recorded(tmp_path):
    (tmp_path / "p.txt").write_text("a cat\na dog\na sun\n")
    args = trainer(tmp_path / "run", tmp_path / "p.txt").args
    assert args.prompts == str(tmp_path / "p.txt")
    assert args.evaluation.prompts == "prompts/signs_eval.txt"


def test_a_run_of_0_4_on_given_prompts_goes_on(tmp_path):
    run = tmp_path / "run"
    trainer(run, ROWS, eval_dataset=HELD_OUT).train()
    text = (run / layout.CONFIG).read_text()
    (run / layout.CONFIG).write_text(text.replace(FROM_PYTHON, "prompts/signs_train.txt"))
    (run / layout.INPUTS).unlink()
    own = trainer(run, ROWS, steps=2, eval_dataset=HELD_OUT)
    own.train(resume=True)
    assert own.step == 2
