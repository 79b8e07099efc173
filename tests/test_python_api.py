"""The trainer from Python: callbacks, what it saves and shares, and what it prints."""

import asyncio
import copy
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import HfApi
from PIL import Image
from safetensors.torch import load, load_file
from support import small_policy as small
from support.embedded import short_run, stir
from support.fake_run import synthetic_run
from support.hub_server import local_hub, settings, uploaded
from support.paths import ROOT

from flow_grpo import FlowGRPOConfig, ImagePrompt, PromptSet, load_policy, rewards
from flow_grpo.cli.evaluate import evaluate
from flow_grpo.cli.options import rewards_to_measure
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.errors import FlowGRPOError, Interrupted
from flow_grpo.evaluation.targets import TargetOptions, resolve_targets
from flow_grpo.export.export import export
from flow_grpo.policy.hub import WEIGHTS
from flow_grpo.report import summary
from flow_grpo.rewards.pixels import jpeg_size
from flow_grpo.run_folder import layout
from flow_grpo.run_folder.reader import RunReader
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer


class Recorder:
    """Writes down which events came, and at which step."""

    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.global_step))

    def on_log(self, args, state, control, logs, **kwargs):
        self.events.append(("log", state.global_step, "eval/reward" in logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.events.append(("evaluate", metrics["eval/reward"]))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, model, **kwargs):
        self.events.append(("end", state.global_step, model))


def test_a_callback_sees_every_row_of_metrics_in_its_order(tmp_path):
    recorder = Recorder()
    trainer = small.trainer(short_run(tmp_path / "run"), callbacks=[recorder])
    measures = trainer.train()
    rows = read_metrics(tmp_path / "run")
    logged = [event[1:] for event in recorder.events if event[0] == "log"]
    assert logged == [(row["step"], "eval/reward" in row) for row in rows]
    assert trainer.callbacks.state.log_history == rows
    assert [event[1] for event in recorder.events if event[0] == "evaluate"][-1] == measures["reward"]
    assert [event[1] for event in recorder.events if event[0] == "save"] == [0, 2]
    assert recorder.events[0] == ("save", 0)
    assert recorder.events[-1] == ("end", 2, trainer.policy)


class StopAfterOne(transformers.TrainerCallback):
    """As users of transformers write it."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_save = control.should_evaluate = state.global_step == 1


def test_a_transformers_callback_stops_saves_and_evaluates(tmp_path):
    trainer = small.trainer(short_run(tmp_path / "run", "steps=4"), callbacks=[StopAfterOne()])
    trainer.train()
    assert trainer.step == 1
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "eval/reward" in row] == [0, 1]
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    assert "for 1 of 4 planned steps" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.usefixtures("no_report")
def test_transformers_own_callbacks_print_and_stop_early(tmp_path, capsys):
    """With patience 1 the run stops at the first evaluation that is not better: of a flat reward, the second one."""

    def flat(images, prompts):
        return [0.5] * len(prompts)

    callbacks = [transformers.EarlyStoppingCallback(), transformers.PrinterCallback()]
    recorder = Recorder()
    args = short_run(tmp_path / "run", "steps=4", "evaluation.every=1", "trackers=[]", "rewards={flat: 1}")
    trainer = small.trainer(args, reward_funcs=[flat], callbacks=[*callbacks, recorder])
    trainer.train()
    assert trainer.step == 1
    assert "'eval/reward': '0.5'" in capsys.readouterr().out
    assert trainer.callbacks.state.best_metric == 0.5


class Popping(Recorder):
    """Changes what it is given, as transformers' PrinterCallback does."""

    def on_log(self, args, state, control, logs, **kwargs):
        logs.clear()


@pytest.mark.usefixtures("no_report")
def test_a_callback_that_changes_its_metrics_changes_nobody_else_s(tmp_path):
    recorder = Recorder()
    trainer = small.trainer(short_run(tmp_path / "run", "steps=1", "trackers=[]"), callbacks=[Popping(), recorder])
    trainer.train()
    assert ("log", 0, True) in recorder.events
    assert trainer.callbacks.state.log_history == read_metrics(tmp_path / "run")


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save"])
def test_a_callback_that_raises_ends_the_run_with_a_checkpoint_and_its_own_error(tmp_path, event):
    def fail(self, args, state, control, **kwargs):
        if state.global_step >= (event != "on_train_begin"):
            raise ZeroDivisionError("of the callback")

    args = short_run(tmp_path / "run", "steps=3", "save_every=2", "evaluation.every=1", "trackers=[]")
    with pytest.raises(ZeroDivisionError, match="of the callback"):
        small.trainer(args, callbacks=[type("Failing", (), {event: fail})()]).train()
    step = {"on_train_begin": 0, "on_save": 2}.get(event, 1)
    assert (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").is_dir()


class InterruptAfterOne:
    """As Ctrl-C does in the first step."""

    def __init__(self):
        self.interrupts = 0

    def on_step_end(self, args, state, control, **kwargs):
        if not self.interrupts:
            self.interrupts += 1
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_is_reported_so_far_and_a_resumed_one_no_longer_as_ended(tmp_path):
    args = short_run(tmp_path / "run", "steps=4", "evaluation={prompts: null}")
    with pytest.raises(Interrupted):
        small.trainer(args, callbacks=[InterruptAfterOne()]).train()
    assert "for 1 of 4 steps so far" in summary.headline(RunReader(tmp_path / "run"))
    small.trainer(args, callbacks=[StopAfterTwo()]).train(resume=True)
    assert "for 2 of 4 planned steps" in summary.headline(RunReader(tmp_path / "run"))
    headlines = HeadlineAtEachStep(tmp_path / "run")
    small.trainer(args, callbacks=[headlines]).train(resume=True)
    assert ["so far" in headline for headline in headlines.seen] == [True, False], "the last step is the end"
    assert "for 4 steps:" in summary.headline(RunReader(tmp_path / "run"))


class StopAfterTwo:
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2  # which also saves


class HeadlineAtEachStep:
    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(summary.headline(RunReader(self.folder)))


def test_the_settings_that_a_callback_gets_can_be_copied_and_pickled(tmp_path):
    args = small.trainer(short_run(tmp_path / "run")).callbacks.args
    again = pickle.loads(pickle.dumps(args))
    assert again.output_dir == copy.copy(args).output_dir == str(tmp_path / "run")
    with pytest.raises(AttributeError):
        _ = again.no_such_setting


def test_an_objective_that_was_edited_since_the_last_run_of_a_notebook_is_read_again(tmp_path):
    file = tmp_path / "own.py"
    for run, scale in (("first", 1.0), ("second", 2.0)):
        file.write_text(
            "import torch\nfrom flow_grpo.objectives import Loss\n\ndef mine(step, advantage):\n"
            f"    return Loss(-advantage * step.log_prob, {{'scale': torch.full_like(advantage, {scale})}})\n"
        )
        metrics = small.trainer(short_run(tmp_path / run, f"objective={{name: {file}:mine}}")).training_step()
        assert metrics["scale"] == scale


def test_an_object_that_is_no_callback_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has none of the methods on_train_begin"):
        FlowGRPOTrainer(args=short_run(tmp_path / "run"), callbacks=[print])
    with pytest.raises(ValueError, match="give an object"):
        FlowGRPOTrainer(args=short_run(tmp_path / "run"), callbacks=[StopAfterOne])


def test_save_model_writes_what_the_run_leaves(tmp_path):
    trainer = FlowGRPOTrainer(args=short_run(tmp_path / "run"))
    trainer.train()
    file = trainer.save_model(tmp_path / "mine")
    assert file.read_bytes() == (tmp_path / "run" / "lora" / file.name).read_bytes()


def test_push_to_hub_needs_a_name_and_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr("flow_grpo.export.export.get_token", lambda: None)
    trainer = FlowGRPOTrainer(args=short_run(tmp_path / "run"))
    with pytest.raises(ValueError, match="is no name for the hub"):
        trainer.push_to_hub("signs")
    with pytest.raises(ValueError, match="needs a token"):
        trainer.push_to_hub("me/signs")


def test_push_to_hub_uploads_the_last_or_the_best_weights_and_returns_the_address(tmp_path, monkeypatch):
    run = tmp_path / "run"
    trainer = FlowGRPOTrainer(args=short_run(run, "trackers=[]"))
    trainer.train()
    stir(trainer.policy)
    trainer.policy.save(run / layout.BEST)  # weights unlike the last ones
    for best, weights in ((False, run / layout.LORA), (True, run / layout.BEST)):
        with local_hub() as server:
            here = settings(server)
            monkeypatch.setenv("HF_TOKEN", here["HF_TOKEN"])
            monkeypatch.setattr("flow_grpo.export.export.HfApi", partial(HfApi, endpoint=here["HF_ENDPOINT"]))
            address = trainer.push_to_hub("me/signs", private=True, **({"best": True} if best else {}))
        sent = uploaded(server)
        assert address == f"{here['HF_ENDPOINT']}/me/signs"
        there, local = load(sent[WEIGHTS]), load_file(weights / WEIGHTS)  # the headers have other dates
        assert there.keys() == local.keys()
        assert all(torch.equal(there[name], value) for name, value in local.items())
        listed = json.loads((run / "export" / layout.EXPORT_MANIFEST).read_text())["files"]
        assert sent == {name: (run / "export" / name).read_bytes() for name in listed}
    assert (run / layout.LORA / WEIGHTS).read_bytes() != (run / layout.BEST / WEIGHTS).read_bytes()


def test_a_setting_that_does_not_exist_is_one_sentence():
    with pytest.raises(ValueError, match="there is no setting lr") as error:
        FlowGRPOConfig(lr=1e-3)
    assert "Did you mean optimizer.lr" in str(error.value)
    assert type(error.value) is FlowGRPOError
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_a_reward_takes_pil_images():
    @rewards.takes_pil
    def red(images, prompts, level):
        return [level[i] * image.getpixel((0, 0))[0] for i, image in enumerate(images)]

    class Green:
        @rewards.takes_pil
        def __call__(self, images, prompts):
            return [image.getpixel((0, 0))[1] for image in images]

    images = torch.zeros(2, 3, 4, 5)
    images[0, 0], images[1, 1] = 1.0, 0.5
    assert rewards.score("red", red, images, ["a", "b"], level=[2.0, 3.0], other=[0, 0]).tolist() == [510, 0]
    assert rewards.score("green", Green(), images, ["a", "b"], level=[2.0, 3.0]).tolist() == [0, 128]


@pytest.mark.slow
def test_the_trainer_prints_its_own_lines_alone(tmp_path):
    """In a new interpreter, as a script of a user's own runs, without the command line's settings for other libraries."""
    script = tmp_path / "script.py"
    settings = {"height": 32, "width": 80, "steps": 1, "prompts_per_step": 2, "images_per_prompt": 2, "microbatch": 4}
    script.write_text(
        "from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer\n"
        "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
        f"args = FlowGRPOConfig(**{json.dumps(settings)}, sampling={{'transition': 'cps', 'steps': 2}}, output='run')\n"
        "FlowGRPOTrainer('tiny', redness, args, ['a red fox', 'a street at night']).train()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    for line in completed.stdout.splitlines():
        if re.fullmatch(r".*: (\d+ of \d+ .*, )?\d+ s", line):  # a phase that was slow, on a busy machine
            continue
        assert line.startswith(("tiny on", "step 1/1", "LoRA:", "curve:", "report:")), completed.stdout


def from_functions(folder, reward_funcs, steps=1, **trainer):
    """A trainer on a small policy, of a run that is given these rewards and whose settings name another one."""
    args = short_run(folder, f"steps={steps}", "save_every=1", "rewards={ocr: 1, redness: 0.5}", "trackers=[]")
    return small.trainer(args, reward_funcs=reward_funcs, **trainer)


@pytest.mark.usefixtures("no_report")
def test_functions_that_can_be_imported_are_in_the_config_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n\n\n"
        "def ocr(images, prompts):\n    return images.mean((1, 2, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_rewards")
    given, run = [own.redness, jpeg_size, own.ocr], tmp_path / "run"
    last = from_functions(run, given).train()
    recorded = FlowGRPOConfig.from_yaml(run / layout.CONFIG)
    weights = {"own_rewards:redness": 0.5, "jpeg_size": 1.0, "own_rewards:ocr": 1.0}
    assert {name: reward.weight for name, reward in recorded.rewards.items()} == weights
    loaded, is_sum = rewards_to_measure(None, recorded, resolve_targets([str(run)], TargetOptions()))
    assert is_sum
    assert set(loaded.rewards) == set(RunReader(run).trained) == {"redness", "jpeg_size", "ocr_2"}
    assert set(loaded.rewards) <= set(last)
    images, prompts = torch.rand(3, 3, 8, 8), ["a"] * 3
    assert torch.equal(loaded.rewards["redness"](images, prompts), own.redness(images, prompts))
    from_functions(run, given, steps=2).train(resume=True)
    with pytest.raises(ValueError, match=r"was begun with rewards\.ocr"):
        from_functions(run, [own.redness, jpeg_size], steps=3).train(resume=True)
    export(run, tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    assert "- Rewards: `redness` x 0.5, `jpeg_size` x 1.0, `ocr` x 1.0" in card
    assert "trains with these settings" in card


@pytest.mark.usefixtures("no_report")
def test_a_run_on_functions_that_no_name_leads_to_says_so_and_is_not_measured_by_others(tmp_path):
    def redness(images, prompts):
        return images[:, 0].mean((1, 2))

    run = tmp_path / "run"
    for steps in (1, 2):
        from_functions(run, [redness, "jpeg_size"], steps).train(resume=steps == 2)
    with pytest.raises(ValueError, match=r"config.yaml has no name to load redness by, .*--reward") as error:
        evaluate(targets=[str(run)])
    assert str(error.value).count(". ") == 0, "one sentence"
    args = FlowGRPOConfig.from_yaml(run / layout.CONFIG)
    chosen, given = (resolve_targets([str(run)], TargetOptions(overrides=words)) for words in (["rewards={ocr: 1}"], []))
    assert list(rewards_to_measure(None, chosen[0].args, chosen)[0].rewards) == ["ocr"]
    assert list(rewards_to_measure(["jpeg_size"], args, given)[0].rewards) == ["jpeg_size"]
    export(run, tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    assert "- Rewards: `redness`, `jpeg_size`\n" in card
    assert "can't use them as they are, since they have no name to load `redness` by:" in card
    assert "trains with these settings" not in card


def test_a_run_of_an_earlier_version_with_functions_is_not_measured_by_the_default_reward(tmp_path):
    run = synthetic_run(tmp_path / "run", reward="redness")
    (run / layout.CONFIG).write_text(FlowGRPOConfig.from_yaml("tiny_ocr").to_yaml())
    (run / layout.LORA).mkdir()
    with pytest.raises(ValueError, match="has no name to load redness by"):
        evaluate(targets=[str(run)])


def test_a_local_function_may_not_have_the_name_of_an_included_reward(tmp_path):
    def ocr(images, prompts):
        return images.mean((1, 2, 3))

    with pytest.raises(ValueError, match="ocr is an included reward: give it another name"):
        from_functions(tmp_path / "run", ocr)
    assert "<lambda>" in from_functions(tmp_path / "run", lambda images, prompts: images.mean((1, 2, 3))).args.rewards


@pytest.mark.usefixtures("no_report")
def test_a_run_in_a_notebooks_loop_has_rewards_with_loops_of_their_own(tmp_path):
    def asks(images, prompts):
        async def mean(image):
            await asyncio.sleep(0)
            return float(image.mean())

        async def means():
            return await asyncio.gather(*[mean(image) for image in images])

        return asyncio.run(means())

    async def cell():
        return from_functions(tmp_path / "run", [asks, jpeg_size]).train()

    asyncio.run(cell())
    rows = read_metrics(tmp_path / "run")
    assert 0 < next(row["rewards/asks/mean"] for row in rows if "rewards/asks/mean" in row) < 1


@pytest.mark.usefixtures("no_report")
def test_paths_have_spaces_quotes_brackets_and_any_letters(tmp_path):
    folder = tmp_path / 'it\'s [1] "w\u00f6rter", \u65e5\u672c {x}'
    folder.mkdir()
    (folder / "my prompts, 1.txt").write_text("a cat\na dog\na sun\n")
    (folder / "my reward (1).py").write_text("def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n")
    reward = f"{folder / 'my reward (1).py'}:redness"
    args = small.settings(
        steps=1, prompts=str(folder / "my prompts, 1.txt"), rewards={reward: 1.0}, output_dir=str(folder / "r u n"),
        evaluation={"prompts": None},
    )  # fmt: skip
    small.trainer(args).train()
    recorded = FlowGRPOConfig.from_yaml(folder / "r u n" / layout.CONFIG)
    assert (recorded.prompts, list(recorded.rewards)) == (args.prompts, [reward])
    assert (folder / "r u n" / "lora" / WEIGHTS).is_file()


WRONG = {
    "prompts of another number": (lambda: PromptSet(["a", "b"], [{}]), "2 prompts and 1 dicts of metadata"),
    "one image": (lambda: ImagePrompt("a", Image.new("RGB", (8, 8))), "the prompt 'a': give a list of its images"),
    "an image of another type": (
        lambda: ImagePrompt("a", [torch.zeros(3, 8, 8)]),
        "has an image of type Tensor: give a path",
    ),
    "a config that is no path": (
        lambda: FlowGRPOConfig.from_yaml({"steps": 3}),
        "the config is of type dict: give the path of a file",
    ),
    "overrides that are one text": (lambda: FlowGRPOConfig.from_yaml("tiny_ocr", "steps=3"), "give a list of texts"),
    "a guidance that is no number": (
        lambda: load_policy("tiny", guidance="high"),
        "guidance is 'high', but it should be a number",
    ),
    "an unknown memory setting": (lambda: load_policy("tiny", memory={"gb": 8}), "there is no setting memory.gb"),
    "a height that is no number": (
        lambda: load_policy("tiny", height="x"),
        "height is 'x', but it should be a whole number",
    ),
    "a reward that is no name": (
        lambda: rewards.load(print),
        "the reward is of type builtin_function_or_method: give a name",
    ),
    "a rank of 0": (lambda: small.policy(lora=False).add_lora(0, 4, None, seed=0), "lora.rank is 0"),
    "a target that is one text": (lambda: small.policy(lora=False).add_lora(2, 4, "to_q", seed=0), "lora.targets is 'to_q'"),
    "a LoRA that is no path": (lambda: small.policy(lora=False).load_lora(3), "3 is of type int: give a path"),
    "a policy without a LoRA": (lambda: small.policy(lora=False).save("out"), "no trained weights to save"),
    "a file in place of a folder": (lambda: small.policy().save(__file__), "could not be written: file exists"),
    "a prompt that is no list": (lambda: small.policy().encode("a cat"), "'a cat' is no list of prompts"),
    "no prompts": (lambda: small.policy().encode([]), "is no list of prompts"),
    "no sampling steps": (lambda: small.policy().schedule(0), "0 sampling steps: give a whole number"),
    "a step to resume from": (lambda: small.trainer(short_run("run")).train(resume=1), "1 is of type int: give a path"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_of_a_public_name_is_one_sentence(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, sentence = WRONG[wrong]
    with pytest.raises(FlowGRPOError, match=sentence):
        call()


def test_arrays_of_texts_are_prompts_and_whole_numbers_of_numpy_are_steps():
    """As the column of a data frame is."""
    texts = np.array(["a cat", "a dog"])
    assert list(load_prompts(PromptSet(texts, [{}, {}])).prompts) == list(texts)
    policy = small.policy()
    assert policy.encode(texts).prompts_of(torch.arange(2)) == list(texts)
    assert torch.equal(policy.schedule(np.int64(4))[0].sigmas, policy.schedule(4)[0].sigmas)


class AnyPath:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)

    __str__ = __fspath__


def test_a_path_object_is_a_path(tmp_path):
    (tmp_path / "steps.yaml").write_text("steps: 3")
    assert FlowGRPOConfig.from_yaml(AnyPath(tmp_path / "steps.yaml")).steps == 3
    assert small.policy().save(AnyPath(tmp_path / "any")).parent == tmp_path / "any"
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    assert ImagePrompt("a", [AnyPath(tmp_path / "one.png")]) == ImagePrompt("a", [tmp_path / "one.png"])
    file = tmp_path / "signs.txt"
    args = FlowGRPOConfig(output_dir=tmp_path / "run", prompts=file, lora={"init_from": tmp_path})
    assert (args.output_dir, args.prompts, args.lora.init_from) == (str(tmp_path / "run"), str(file), str(tmp_path))
    policy = small.policy()
    assert policy.save(str(tmp_path / "a")) == policy.save(tmp_path / "a", write=False), (
        "the file, also where another writes it"
    )
