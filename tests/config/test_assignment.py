"""Config objects in Python: assignment, pickle, and texts that are paths."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from support import small_policy as small
from support.paths import ROOT

from flow_grpo import FlowGRPOConfig
from flow_grpo.config.forward_process_objectives import Nft
from flow_grpo.config.objective_by_name import OBJECTIVES
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.hub import resolve_lora


@pytest.mark.parametrize(
    ("section", "name", "value", "sentence"),
    [
        ("", "steps", "ten", "steps is 'ten', but it should be a whole number"),
        ("", "stepz", 3, "there is no setting stepz. Did you mean steps?"),
        ("", "rewards", {}, "rewards is empty"),
        ("optimizer", "lr", -1, "lr is -1, but it should be greater than 0"),
        ("objective", "clip_high", "auo", "clip_high"),
        ("memory", "quantize", "int3", "quantize is 'int3'"),
    ],
)
def test_an_assignment_that_does_not_fit_is_refused_and_changes_nothing(section, name, value, sentence):
    args = FlowGRPOConfig()
    target = getattr(args, section) if section else args
    with pytest.raises(ValueError, match=sentence):
        setattr(target, name, value)
    assert args == FlowGRPOConfig()


def test_an_assignment_may_use_the_short_forms_of_a_file():
    args = FlowGRPOConfig(stages=[{"steps": 1}, {"steps": 2}])
    args.rewards, args.trackers, args.steps = ["clip"], "wandb", 3
    args.optimizer.lr = 1
    assert args.rewards["clip"].weight == 1
    assert (args.trackers, args.optimizer.lr) == ({"wandb": {}}, 1.0)


def test_the_steps_of_stages_and_the_prompts_of_a_model_follow_an_assignment():
    args = FlowGRPOConfig()
    args.stages = [{"steps": 3}]
    assert args.steps == 3
    args.stages = [{"steps": 2}, {"steps": 5}]
    assert args.steps == 7
    args.model = "tiny_shapes"
    assert args.prompts == FlowGRPOConfig(model="tiny_shapes").prompts
    args.prompts, args.model = "mine.txt", "tiny"
    assert args.prompts == "mine.txt"


def test_overrides_keep_what_was_set_in_python():
    args = FlowGRPOConfig(objective=Nft(beta=2))
    args.lora.rank, args.objective.advantage_max = 5, 3
    args.trackers["wandb"] = {}
    changed = args.with_overrides(["seed=4"])
    assert (changed.seed, changed.lora.rank, changed.trackers) == (4, 5, args.trackers)
    assert changed.objective == args.objective
    assert FlowGRPOConfig(objective=Nft()).with_overrides(["seed=4"]).objective.name == "nft"
    args = FlowGRPOConfig()
    args.objective.window.schedule, args.objective.window.size = "fixed", 50
    with pytest.raises(FlowGRPOError, match=r"objective\.window\.size=50 does not fit"):
        args.with_overrides(["seed=4"])


@pytest.mark.parametrize("name", ["", *OBJECTIVES])
def test_a_config_can_be_pickled(name):
    if name in OBJECTIVES and not OBJECTIVES[name].stepwise:
        section = {"name": name, **({"dataset": "a.jsonl"} if "dataset" in OBJECTIVES[name].model_fields else {})}
        args = FlowGRPOConfig(objective=section)
    else:
        args = FlowGRPOConfig(**({"objective": name} if name else {}))
    assert pickle.loads(pickle.dumps(args)) == args


def test_a_config_is_unpickled_in_a_new_process(tmp_path):
    args = FlowGRPOConfig(objective={"name": "mine.py:loss", "options": {"a": 1}})
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(args))
    script = "import pickle; print(pickle.load(open('config.pickle', 'rb')).objective.options['a'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    args = FlowGRPOConfig(
        model="~/model",
        prompts=["~/a.txt", {"file": "~/b.txt"}],
        output_dir="~/runs/x",
        lora={"init_from": "~/lora"},
        evaluation={"prompts": "~/c.txt"},
        memory={"embedding_cache_dir": "~/cache"},
    )
    paths = [args.model, *(one.file for one in args.prompts), args.output_dir, args.lora.init_from, args.evaluation.prompts]
    assert [Path(path).parts[:3] for path in [*paths, args.memory.embedding_cache_dir]] == [("/", "home", "me")] * 7
    assert FlowGRPOConfig.from_yaml("tiny_ocr", ["output_dir=~/{name}"]).output_dir == "/home/me/tiny_ocr"


def test_a_tilde_without_a_home_folder_is_one_sentence(no_home):
    with pytest.raises(FlowGRPOError, match="there is no home folder for ~: set HOME, or give the whole path"):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["output_dir=~/x"])
    with pytest.raises(FlowGRPOError, match="there is no home folder for ~/lora"):
        resolve_lora("~/lora")


@pytest.mark.parametrize(
    "override", ["output_dir=null", 'output_dir=""', "prompts=' '", "model=null", "output_dir=${HOME}/x"]
)
def test_an_empty_path_or_one_with_a_variable_is_refused(override):
    with pytest.raises(ValueError, match=r"(is '.*'|is None), but (it should be|variables are not replaced)") as error:
        FlowGRPOConfig.from_yaml("tiny_ocr", [override])
    assert override.partition("=")[0] in str(error.value)


def test_a_misspelt_option_of_an_objective_is_refused_before_training(tmp_path):
    from flow_grpo.training.start_checks import Start, custom_functions

    (tmp_path / "mine.py").write_text("def loss(step, advantage, strength=1.0):\n    return step.log_prob * advantage\n")
    objective = {"name": f"{tmp_path / 'mine.py'}:loss", "options": {"strenght": 2.0}}
    with pytest.raises(ValueError, match=r"strenght.* Did you mean strength\? Its options are strength\."):
        custom_functions(Start(FlowGRPOConfig(objective=objective)))
    custom_functions(Start(FlowGRPOConfig(objective={**objective, "options": {"strength": 2.0}})))


def test_an_advantage_of_other_arguments_is_refused_before_training(tmp_path):
    from flow_grpo.training.start_checks import Start, custom_functions

    (tmp_path / "mine.py").write_text(
        "def one(reward):\n    return reward\n\n\ndef both(reward, group):\n    return reward\n"
    )
    with pytest.raises(
        FlowGRPOError, match=r"advantage .*mine\.py:one: too many positional arguments\. It gets \(reward, group\)"
    ):
        custom_functions(Start(FlowGRPOConfig(objective={"advantage": f"{tmp_path / 'mine.py'}:one"})))
    custom_functions(Start(FlowGRPOConfig(objective={"advantage": f"{tmp_path / 'mine.py'}:both"})))


def test_a_misspelt_weight_of_a_function_is_refused(tmp_path):
    def redness(images, prompts):
        return images[:, 0].mean((1, 2))

    args = small.settings(rewards={"rednes": 0.5}, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"rewards\.rednes is for none of reward_funcs\. Did you mean redness\?"):
        small.trainer(args, reward_funcs=[redness], train_dataset=["a", "b"])
