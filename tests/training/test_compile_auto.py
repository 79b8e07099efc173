"""`memory.compile: auto`: which runs compile their transformer, and what they say of it. The CPU takes the place of a GPU."""

import json

import pytest
import torch
from support.embedded import PROMPTS, short_model, short_run, tiny_policy
from support.families import TINY, awake

from flow_grpo.compare import ComparedRun
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.run import run_checks
from flow_grpo.policy import devices
from flow_grpo.policy.policy import Policy
from flow_grpo.run_folder.opening import write_settings
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training import setup

CPU = torch.device("cpu")


class Compiler:
    """Returns the code as it is, or fails. `rows` are the numbers of images that it compiled for."""

    def __init__(self) -> None:
        self.calls, self.fails, self.rows = 0, False, set()

    def __call__(self, graph, inputs):
        self.calls += 1
        self.rows |= {len(x) for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 3}
        if self.fails:
            raise RuntimeError("no kernel")
        return graph.forward


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    compiler, own = Compiler(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **settings: own(block, backend=compiler, **settings))
    monkeypatch.setattr(setup, "compile_error", lambda device: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    with torch._dynamo.config.patch(suppress_errors=False):
        yield compiler
    torch._dynamo.reset()


@pytest.fixture
def as_gpu(monkeypatch):
    monkeypatch.setattr(setup, "COMPILED_DEVICES", ("cpu",))


def seconds(monkeypatch, needed: float) -> None:
    """Let compiling take that long, while nothing is measured."""
    monkeypatch.setattr(devices, "COMPILE_SECONDS", needed)


def test_a_cpu_compiles_only_if_it_is_told_to(tmp_path):
    assert short_run(tmp_path).memory.compile == "auto"
    left = FlowGRPOTrainer(args=short_run(tmp_path, "steps=1000000"))
    assert (left.policy.compiled, left.args.memory.compile) == (False, "auto")
    assert "compiled" not in left.headline
    told = FlowGRPOTrainer(args=short_run(tmp_path, "memory.compile=true"))
    assert told.policy.compiled
    assert ", compiled (in the first step): 2 steps" in told.headline


def test_a_run_that_is_long_enough_compiles(tmp_path, monkeypatch, as_gpu):
    """Its steps take 39 % less time, so that it must take 2.6 times as long as compiling."""
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, "steps=2"))
    assert not trainer.policy.compiled
    assert ", not compiled (compiling saves about" in trainer.headline
    assert "and takes about 2 min 0 s): 2 steps" in trainer.headline
    monkeypatch.setattr(setup, "fastest", lambda work, device, seconds: work() is not None and 0.4)
    # a step is 8 images with four sampling steps and two trained ones: 8 * (4 + 3 * 2) velocities of 0.1 s
    steps = short_run(tmp_path).objective.num_losses(4)
    step_seconds = 8 * (4 + 3 * steps) * 0.1
    for share, compiles in ((0.99, True), (1.01, False)):
        seconds(monkeypatch, 100 * step_seconds * 0.39 * share)
        assert FlowGRPOTrainer(args=short_run(tmp_path, "steps=100")).policy.compiled is compiles


def test_stages_and_given_images_count_by_what_they_compute(tmp_path, monkeypatch, as_gpu):
    monkeypatch.setattr(setup, "fastest", lambda work, device, seconds: 0.4)
    said = []
    for stages in ("[{steps: 10}, {steps: 30}]", "[{steps: 10}, {steps: 30, sampling: {steps: 8}}]"):
        said.append(FlowGRPOTrainer(args=short_run(tmp_path, "steps=40", f"stages={stages}")).headline)
    one, two = (8 * (steps + 3 * short_run(tmp_path).objective.num_losses(steps)) * 0.1 for steps in (4, 8))
    assert f"of {setup.duration(40 * one)} and" in said[0]
    assert f"of {setup.duration(10 * one + 30 * two)} and" in said[1]
    best = FlowGRPOTrainer(args=short_run(tmp_path, "steps=40", "sampling={steps: 4}", "objective={name: sft}"))
    assert (best.args.prompts_per_step, best.args.objective.num_losses(4)) == (2, 1)
    assert f"of {setup.duration(40 * (8 * 4 + 3 * 2) * 0.1)} and" in best.headline


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("memory.offload=groups", "memory.offload=groups"),
        ("memory.quantize=fp8_layerwise", "memory.quantize=fp8_layerwise"),
    ],
)
def test_what_was_not_measured_is_not_compiled_by_itself(tmp_path, monkeypatch, as_gpu, setting, reason):
    seconds(monkeypatch, 0.0)
    assert FlowGRPOTrainer(args=short_run(tmp_path)).policy.compiled
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, setting))
    assert not trainer.policy.compiled
    assert f", not compiled ({reason}): 2 steps" in trainer.headline


def test_prompts_of_many_lengths_are_not_compiled_by_themselves(tmp_path, monkeypatch, as_gpu):
    seconds(monkeypatch, 0.0)
    args = short_run(tmp_path)
    policy = tiny_policy()
    policy.add_lora(4, 8, ["to_q"], 0)
    policy.encode(PROMPTS)
    monkeypatch.setattr(policy.encoder, "pads_to_one_length", False)
    trainer = FlowGRPOTrainer(policy, args=args)
    assert not trainer.policy.compiled
    assert ", not compiled (its prompts differ in length)" in trainer.headline


def test_a_machine_without_a_compiler_trains_as_before(tmp_path, monkeypatch, as_gpu):
    seconds(monkeypatch, 0.0)
    monkeypatch.setattr(setup, "compile_error", devices.compile_error)
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        trainer = FlowGRPOTrainer(args=short_run(tmp_path))
    assert ", not compiled (torch.compile fails here: " in trainer.headline
    trainer.train()
    assert trainer.step == 2


@pytest.mark.slow  # the compiler
def test_a_compiler_that_works_is_found():
    assert devices.compile_error(CPU) is None


def test_code_that_fails_to_compile_runs_as_it_is(tmp_path, monkeypatch, as_gpu, compiler):
    """A run that nobody told to compile does not end by it."""
    expected = FlowGRPOTrainer(args=short_run(tmp_path / "left", "memory.compile=false")).training_step()
    seconds(monkeypatch, 0.0)
    compiler.fails = True
    trainer = FlowGRPOTrainer(args=short_run(tmp_path / "auto"))
    metrics = trainer.training_step()
    assert compiler.calls
    assert metrics["grad_norm"] == expected["grad_norm"]
    assert metrics["ratio/first_update_max_deviation"] == 0


def test_a_compiled_run_says_what_the_first_step_took_and_goes_on_compiled(tmp_path, monkeypatch, as_gpu, capsys, compiler):
    seconds(monkeypatch, 0.0)
    FlowGRPOTrainer(args=short_run(tmp_path, "steps=2")).train()
    said = capsys.readouterr().out
    assert compiler.calls
    assert ", compiled (compiling saves about" in said
    assert "compiling took about" in said
    assert FlowGRPOConfig.from_yaml(tmp_path / "config.yaml").memory.compile is True
    [(name, kept)] = json.loads((tmp_path / "kernels" / "flow_grpo_seconds.json").read_text()).items()
    assert name.startswith(f"{short_model()}, ")
    assert kept > 0
    assert devices.compile_seconds(str(short_model()), CPU) == kept
    seconds(monkeypatch, 1e9)  # a new run would not compile
    (tmp_path / "kernels" / "flow_grpo_seconds.json").unlink()
    resumed = FlowGRPOTrainer(args=short_run(tmp_path, "steps=3"))
    assert resumed.policy.compiled
    assert "compiled (as the run began)" in resumed.headline
    resumed.train(resume=True)
    assert "resumed with other settings: steps=3 (it was 2)\n" in capsys.readouterr().out


def test_images_that_are_left_over_are_not_compiled_for(tmp_path, compiler):
    """Each number of images would take the time of a compilation."""
    held_out = "evaluation={prompts: prompts/signs_eval.txt, max_prompts: 6, every: 0, steps: 2}"
    args = short_run(tmp_path, "memory.compile=true", "images_per_prompt=2", "microbatch=4", held_out)
    images = []
    for compiles in (True, False):
        trainer = FlowGRPOTrainer(args=args if compiles else args.with_overrides(["memory.compile=false"]))
        trainer.training_step()
        images.append(trainer.evaluate().images)
    assert compiler.rows == {4}
    assert all(torch.equal(images[0][i], images[1][i]) for i in range(6))


def test_the_doctor_does_not_wait_for_a_compiler(tmp_path, monkeypatch, as_gpu):
    seconds(monkeypatch, 0.0)
    compiled = []
    monkeypatch.setattr(Policy, "compile", lambda policy, **settings: compiled.append(settings))
    run_checks(short_run(tmp_path))
    assert not compiled
    run_checks(short_run(tmp_path, "memory.compile=true"))
    FlowGRPOTrainer(args=short_run(tmp_path))
    assert compiled == [{"falls_back": False}, {"falls_back": True}]


def test_a_run_that_began_without_goes_on_without(tmp_path, monkeypatch, as_gpu):
    FlowGRPOTrainer(args=short_run(tmp_path)).train()
    seconds(monkeypatch, 0.0)
    assert not FlowGRPOTrainer(args=short_run(tmp_path, "steps=3")).policy.compiled
    assert FlowGRPOTrainer(args=short_run(tmp_path, "steps=3", "memory.compile=true")).policy.compiled, "it is told to"


def test_a_run_that_is_lost_before_its_first_step_decides_nothing(tmp_path, monkeypatch, as_gpu):
    lost = FlowGRPOTrainer(args=short_run(tmp_path))
    write_settings(lost.args, {})
    assert FlowGRPOConfig.from_yaml(tmp_path / "config.yaml").memory.compile is False
    seconds(monkeypatch, 0.0)
    assert FlowGRPOTrainer(args=short_run(tmp_path)).policy.compiled


def test_a_resumed_run_with_a_setting_that_does_not_go_with_compiled_blocks_is_not_compiled(tmp_path, monkeypatch, as_gpu):
    seconds(monkeypatch, 0.0)
    FlowGRPOTrainer(args=short_run(tmp_path)).train()
    resumed = FlowGRPOTrainer(args=short_run(tmp_path, "steps=3", "memory.offload=groups"))
    assert not resumed.policy.compiled
    assert not resumed.args.memory.compile
    assert ", not compiled (memory.offload=groups)" in resumed.headline


def test_a_comparison_compiles_only_if_it_is_told_to(tmp_path):
    """Each of its processes would compile anew, and not in every config."""
    (tmp_path / "short.yaml").write_text(short_run(tmp_path).to_yaml())
    run = ComparedRun(str(tmp_path / "short.yaml"), 0, tmp_path / "compared")
    assert [run.settings(words).memory.compile for words in ([], ["memory.compile=true"])] == [False, True]


def test_a_transformer_without_named_blocks_is_left_as_it_is(tmp_path, monkeypatch, as_gpu):
    seconds(monkeypatch, 0.0)
    torch.manual_seed(0)
    pipe = awake(TINY["flux"].build())
    monkeypatch.setattr(type(pipe.transformer), "_repeated_blocks", [])
    monkeypatch.setattr(type(pipe.transformer), "_no_split_modules", [])
    size = ["height=32", "width=48", "pipeline_kwargs={max_sequence_length: 16}", "lora.targets=null", "dtype=fp32"]
    trainer = FlowGRPOTrainer(pipe, args=short_run(tmp_path, *size))
    assert (
        ", not compiled (memory.compile: diffusers does not name the repeated blocks of FluxTransformer2DModel)"
        in trainer.headline
    )
