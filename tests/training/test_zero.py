"""DeepSpeed's ZeRO on two processes: what one process does, with shares of the moments and gradients."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.embedded import short_run
from support.paths import ROOT
from support.process_runs import ACCELERATE, UNEVEN, WHOLE, config, run_alone, same

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.data.prompts import PromptSampler, load_prompts
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.run_folder import checkpoint
from flow_grpo.training.early_checks import check_settings

# one start of two processes for all runs, as importing takes longer than running
RUNS = """
import json
import os
import sys
from pathlib import Path

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.trainer import FlowGRPOTrainer

for folder in map(Path, sys.argv[1:]):
    args = FlowGRPOConfig.from_yaml(folder / "run.yaml")
    if args.memory.shard == "zero1":  # for the others it is accelerate that says what to share
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    trainer = FlowGRPOTrainer(args=args)
    trainer.train(resume=folder.name == "resumed")
    optimizer, parameters = trainer.stage.update.optimizer, list(trainer.policy.trainable_parameters().values())

    def everywhere(number):
        return sum((p * number).sum() for p in parameters)

    facts = {"all": sum(p.numel() for p in parameters)}
    [moments] = optimizer.adamw.state.values()
    facts["moments"] = [moments[name].numel() for name in ("exp_avg", "exp_avg_sq")]
    optimizer.backward(everywhere(1.0))
    kept = optimizer.engine.optimizer.all_grad_tensors.get(0) or []  # in stage 2
    facts["gradients"] = sum(g.numel() for g in kept) + sum(p.grad.numel() for p in parameters if p.grad is not None)
    facts["largest"] = max(p.numel() for p in parameters)
    optimizer.zero_grad()
    optimizer.backward(everywhere(0.0))
    facts["forgotten"] = optimizer.step(0.0)
    before = [p.detach().clone() for p in parameters]
    optimizer.backward(everywhere(float("nan") if trainer.processes.is_main else 1.0))
    facts["not_finite"] = optimizer.step(1.0) == float("inf")
    facts["moved"] = any(not torch.equal(p, former) for p, former in zip(parameters, before))
    (folder / f"facts_{trainer.processes.rank}.json").write_text(json.dumps(facts))
trainer.processes.destroy()
"""
FEW = (
    "evaluation.prompts=null",
    "microbatch=6",
    "sampling={steps: 2, transition: cps, noise_level: 0.8, window: {schedule: all}}",
)
STAGES = "stages=[{steps: 1}, {steps: 1, optimizer: {lr: 5.0e-4}}]"


def launched(folder: Path, *words: str, code: int = 0, **more: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
    completed = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=180
    )
    assert completed.returncode == code, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def half(folder: Path, into: Path, *settings: str) -> None:
    """A run's first of two steps, to be gone on with by other processes."""
    config(into, *settings)
    shutil.copytree(folder / "run", into / "run")
    shutil.rmtree(into / "run" / "checkpoints" / "step_000002")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each run by one process, and by two with ZeRO; and what was left half-way, gone on with by the others."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    root = tmp_path_factory.mktemp("zero")
    uneven = root / "uneven.py"
    uneven.write_text(UNEVEN)
    args = FlowGRPOConfig.from_yaml(config(root / "look"))
    dealt = PromptSampler(load_prompts(args.prompts), args.seed).sample(0, 6, 1).prompts
    (root / "loud.txt").write_text("\n".join([dealt[0], dealt[2]]))  # both of the first process
    settings = {
        "lora": ["updates=3", STAGES],
        "whole": [*WHOLE, "objective.kl_weight=0.1"],
        "uneven": [f"rewards={{'{uneven}:uneven': 1}}"],
        "first": ["memory.shard=zero1", "updates=3"],
    }
    for name, more in settings.items():
        for place in ("alone", "both"):
            config(root / place / name, *FEW, *more)
        run_alone(root / "alone" / name / "run.yaml")
    half(root / "alone" / "whole", root / "both" / "resumed", *FEW, *settings["whole"], "memory.shard=zero1")
    (root / "runs.py").write_text(RUNS)
    folders = [str(root / "both" / name) for name in (*settings, "resumed")]
    launcher = [
        word for word in ACCELERATE if word != "--multi_gpu"
    ]  # which accelerate takes for another kind than DeepSpeed
    output = launched(root, *launcher, "--use_deepspeed", "--zero_stage=2", str(root / "runs.py"), *folders)
    assert "DeepSpeed" not in output, "it keeps quiet"
    half(root / "both" / "whole", root / "alone" / "resumed", *FEW, *settings["whole"])
    run_alone(root / "alone" / "resumed" / "run.yaml", resume=True)
    return root


@pytest.mark.parametrize("name", ["lora", "whole", "uneven", "first"])
def test_two_processes_with_zero_do_what_one_does(runs, name):
    same(runs / "alone" / name, runs / "both" / name)


@pytest.mark.parametrize("place", ["alone", "both"])
def test_a_checkpoint_of_one_kind_is_resumed_by_the_other(runs, place):
    actual, expected = (
        checkpoint.latest(runs / at / "run" / "checkpoints")[0] for at in (f"{place}/resumed", "alone/whole")
    )
    for part in ("adapter", "ema"):
        torch.testing.assert_close(actual[part], expected[part], rtol=0, atol=2e-5)
    moments, others = (state["optimizer"]["state"] for state in (actual, expected))
    assert {float(values["step"]) for values in moments.values()} == {2}
    for name in ("exp_avg", "exp_avg_sq"):
        one, other = (torch.cat([state[number][name].flatten() for number in others]) for state in (moments, others))
        assert (one - other).norm() < 1e-3 * other.norm()


@pytest.mark.parametrize(
    ("name", "shares_gradients"),
    [("first", False), ("uneven", True), ("lora", True), ("whole", True), ("resumed", False)],
)
def test_a_process_holds_half(runs, name, shares_gradients):
    facts = [json.loads((runs / "both" / name / f"facts_{rank}.json").read_text()) for rank in (0, 1)]
    for one in facts:
        assert all(one["all"] / 2 <= count <= one["all"] / 2 + 2 for count in one["moments"])
        if shares_gradients:  # a parameter on the border is kept by both
            assert one["all"] / 2 - one["largest"] <= one["gradients"] <= one["all"] / 2 + one["largest"]
        else:
            assert one["gradients"] == one["all"]
        assert one["forgotten"] == 0, "what was given up is not in the next step"
        assert one["not_finite"]
        assert not one["moved"]


def test_accelerate_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    plain = short_run(tmp_path)
    assert plain.with_launcher_settings().memory.shard == "zero2", "accelerate's own default"
    for stage, shares in (("0", None), ("1", "zero1")):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
        assert plain.with_launcher_settings().memory.shard == shares
    with pytest.raises(ValueError, match=r"memory.shard=zero2, but accelerate was launched with zero1"):
        short_run(tmp_path, "memory.shard=zero2").with_launcher_settings()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(ValueError, match="set fsdp2"):
        plain.with_launcher_settings()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json")
    with pytest.raises(ValueError, match="DeepSpeed's config file is not read here"):
        plain.with_launcher_settings()
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    assert plain.with_launcher_settings() is plain
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert plain.with_launcher_settings().memory.shard == "fsdp2"


def test_a_missing_deepspeed_is_reported_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    args = short_run(tmp_path, "memory.shard=zero2")
    with pytest.raises(ValueError, match=r"memory.shard=zero2 needs DeepSpeed.* pip install 'deepspeed"):
        check_settings(args, 2)


def test_the_plan_counts_shares(tmp_path):
    """Weights and their average on each of two, a copy to move and two moments in halves; then gradients in halves too."""
    none, one, two = (
        StepEstimator(short_run(tmp_path, *WHOLE, f"memory.shard={shard}"), cuda=True, count=2).estimate(8)
        for shard in ("false", "zero1", "zero2")
    )
    trained = none.persistent["transformer"] / 4
    assert one.persistent["transformer"] == two.persistent["transformer"] == trained * 3.5
    assert two.persistent["gradients"] == 2 * trained / 2, "the newest, and the sum so far"
    assert "gradients" not in one.persistent
    assert one.transient == none.transient
    assert none.transient["update"] - trained <= two.transient["update"] < none.transient["update"]
    lora = StepEstimator(short_run(tmp_path, "memory.shard=zero2"), cuda=True, count=2).estimate(8)
    assert lora.persistent["adapter"] == 3.5 * lora.persistent["gradients"]
    assert lora.persistent["base weights"] >= trained, "whole on each"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["memory.shard=zero3"], "set fsdp2, which spreads weights, gradients and moments"),
        (["memory.shard=zero2", "dtype=fp16"], "dtype=fp16 needs"),
        (["memory.shard=zero1", "optimizer.name=adamw_8bit"], "set optimizer.name=adamw"),
    ],
)
def test_what_zero_does_not_do_is_refused(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        short_run(tmp_path, *settings)


def test_true_is_fsdp2_and_false_nothing(tmp_path):
    assert short_run(tmp_path, "memory.shard=true").memory.shard == "fsdp2"
    assert short_run(tmp_path, "memory.shard=false").memory.shard is None
