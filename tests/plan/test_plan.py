"""What a run will need is known from configs alone: bytes and operations are counted by hand, and nothing is loaded."""

import contextlib
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.families import TINY
from support.traces import two_blocks
from typer.testing import CliRunner

from flow_grpo.cli import app as cli
from flow_grpo.config.loading import bundled_file
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.plan import fit, hardware, meta_pipeline, trace
from flow_grpo.plan.estimate import StepEstimate, StepEstimator, text_encoder_bytes
from flow_grpo.plan.fit import fit_batch_sizes, print_plan
from flow_grpo.plan.hardware import GB, Hardware, Rates
from flow_grpo.plan.trace import ModelTrace
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.memory import repeated_blocks
from flow_grpo.trainer import FlowGRPOTrainer

PRESETS = sorted(file.stem for file in bundled_file("").glob("*.yaml"))
FAMILIES = {
    "sd35_medium_ocr_24gb": "sd3",
    "flux_dev_ocr": "flux",
    "flux2_klein_ocr": "flux2_klein",
    "qwen_image_ocr": "qwen_image",
    "z_image_ocr": "z_image",
    "sana_ocr": "sana",
    "wan21_ocr": "wan",
}
WEIGHTS = ("*.safetensors", "*.bin", "*.onnx")


pytestmark = pytest.mark.usefixtures("known_traces")


def follow(network: torch.nn.Module, x: torch.Tensor, backward: bool) -> tuple[int, int]:
    followed = meta_pipeline.MetaModule(network.to("meta"), torch.float32, cuda=False)
    alive, counter = trace.LiveBytesCounter(), trace.FlopCounter()
    for mode in (alive, counter):
        with followed.counting(mode, backward):
            out = followed(x)
    assert out.shape == (len(x), 5)
    assert not out.any()
    return alive.peak, counter.total


def test_bytes_and_operations_are_those_of_the_matrices():
    layers = torch.nn.Sequential(torch.nn.Linear(7, 11, bias=False), torch.nn.Linear(11, 5, bias=False)).requires_grad_(
        False
    )
    x = torch.zeros(3, 7)
    peak, operations = follow(layers, x, backward=False)
    assert operations == 2 * 3 * (7 * 11 + 11 * 5)
    assert peak == 4 * 3 * (11 + 5), "the hidden values and the output"
    layers[0].weight.requires_grad_(True)
    _, both = follow(layers, x, backward=True)
    assert both == operations + 2 * 3 * 11 * 5 + 2 * 3 * 7 * 11, "back through the second, and the first one's gradient"


# Fewer layers with a LoRA, and a reward without weights: what is asserted does not depend on them, and a model is followed twice as fast.
LEAN = ["lora.targets=[to_q, to_out.0]", "rewards={jpeg_size: 1}"]


@pytest.fixture(scope="module")
def lean(tmp_path_factory) -> list[str]:
    """The same with a third of the blocks."""
    return [*LEAN, f"model={two_blocks(tmp_path_factory.mktemp('lean') / 'model')}"]


@pytest.fixture(scope="module")
def default(lean) -> StepEstimator:
    """The default config, which has a KL, on a GPU."""
    return StepEstimator(FlowGRPOConfig.from_yaml("tiny_ocr", lean), cuda=True)


@pytest.fixture(scope="module")
def checkpointed(lean) -> StepEstimator:
    return StepEstimator(FlowGRPOConfig.from_yaml("tiny_ocr", [*lean, "memory.gradient_checkpointing=true"]), cuda=True)


def test_checkpointing_takes_less_memory_and_computes_forward_passes_again(default, checkpointed):
    checkpointed, plain = checkpointed.estimate(64), default.estimate(64)
    assert checkpointed.transient["update"] < 0.8 * plain.transient["update"]
    assert checkpointed.update > 1.05 * plain.update
    assert checkpointed.operations == plain.operations, "what is computed again is no operation of the model"


def test_offloaded_blocks_are_on_the_gpu_one_at_a_time(lean, checkpointed):
    args = FlowGRPOConfig.from_yaml("tiny_ocr", [*lean, "memory={gradient_checkpointing: true, offload: groups}"])
    offloaded = StepEstimator(args, cuda=True)
    blocks = offloaded.trace.policy.pipe.transformer.transformer_blocks
    frozen = [[p.numel() for name, p in block.named_parameters() if "lora_" not in name] for block in blocks]
    sizes = [2 * sum(numbers) for numbers in frozen]  # bytes in bf16
    one, other = offloaded.estimate(8), checkpointed.estimate(8)
    assert other.persistent["base weights"] - one.persistent["base weights"] == sum(sizes)
    for phase in ("rollout", "update"):
        assert one.transient[phase] - other.transient[phase] == pytest.approx(max(sizes))


@pytest.mark.parametrize("cuda", [True, False])
def test_on_cuda_an_upsampled_image_is_in_float32(cuda):
    """As autocast has it there: the VAE's upsampling then takes twice the bytes."""
    network = meta_pipeline.MetaModule(torch.nn.Upsample(scale_factor=2).to("meta"), torch.bfloat16, cuda)
    counter = trace.LiveBytesCounter()
    with network.counting(counter, False):
        network(torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16))
    upsampled, x = 3 * 16 * 16, 3 * 8 * 8
    assert counter.peak == (4 * (upsampled + x) if cuda else 2 * upsampled), "and the input is cast first"


@pytest.fixture
def compiled(lean):
    """The transient bytes of a plan with compiled blocks."""

    def planned(*more, cuda=True):
        args = FlowGRPOConfig.from_yaml("tiny_ocr", [*lean, "memory.compile=true", *more])
        return StepEstimator(args, cuda).estimate(8).transient

    return planned


def test_compiled_blocks_keep_fewer_bytes_for_the_backward_pass(default, compiled):
    """As measured on a GPU with SD3.5-M."""
    plain, fewer = default.estimate(8).transient, compiled()
    assert fewer.pop("update") < 0.75 * plain["update"]
    assert fewer.items() <= plain.items()


@pytest.mark.slow
def test_checkpointed_blocks_and_those_of_a_cpu_keep_what_they_keep_uncompiled_and_kept_graphs_are_fewer_bytes(
    checkpointed, compiled
):
    assert compiled("memory.gradient_checkpointing=true") == checkpointed.estimate(8).transient, "not measured"
    assert compiled(cuda=False) == compiled("memory.compile=false", cuda=False), "nor is this"
    kept = [
        "objective={name: grpo, transition: cps, noise_level: 0.7, keep_graphs: true, window: {schedule: fixed, size: 2}, kl_weight: 0}",
    ]
    assert 0.6 < compiled(*kept)["update"] / compiled(*kept, "memory.compile=false")["update"] < 0.7


@pytest.mark.parametrize(("dtype", "counted"), [(torch.bfloat16, True), (torch.float32, False)])
def test_cudnn_takes_memory_for_a_convolution_in_16_bits(dtype, counted):
    convolution = torch.nn.Conv2d(4, 8, 3, padding=1, device="meta", dtype=dtype)
    x = torch.zeros(2, 4, 16, 16, device="meta", dtype=dtype)
    peaks = []
    for cuda in (False, True):
        with torch.no_grad(), trace.LiveBytesCounter(cuda) as counter:
            y = convolution(x)
        peaks.append(counter.peak)
    assert peaks[0] == y.nbytes
    assert peaks[1] - peaks[0] == (trace.CUDNN_WORKSPACE * (x.nbytes + y.nbytes) if counted else 0)


@pytest.mark.parametrize(
    ("family", "offload"),
    [
        ("sana", "null"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("flux", "null"), ("flux", "groups"), ("sana", "groups"))),
    ],
)
@pytest.mark.slow
def test_layers_in_float8_are_planned_as_they_are_stored(family, offload, tmp_path, monkeypatch):
    """Base weights to the byte; graphs without copies of linear layers' weights; and blocks are timed with their casts."""
    tiny = TINY[family]
    tiny.build().save_pretrained(tmp_path)
    size = [
        f"model={tmp_path}",
        f"height={tiny.size[0]}",
        f"width={tiny.size[1]}",
        f"pipeline_kwargs={json.dumps(tiny.call)}",
    ]
    words = [*size, "lora.targets=null", "evaluation.prompts=null", "rewards={jpeg_size: 1}"]

    def estimator(quantize: str, cuda: bool) -> StepEstimator:
        memory = f"memory={{quantize: {quantize}, gradient_checkpointing: true, offload: {offload}}}"
        return StepEstimator(FlowGRPOConfig.from_yaml("tiny_grpo", [*words, "dtype=bf16", memory]), cuda=cuda)

    call = {"height": tiny.size[0], "width": tiny.size[1], **tiny.call}
    layerwise = MemoryConfig(quantize="fp8_layerwise")
    transformer = load_policy(str(tmp_path), "cpu", "bf16", memory=layerwise, **call).pipe.transformer
    offloaded = {p for block in repeated_blocks(transformer, "") for p in (*block.parameters(), *block.buffers())}
    tensors = {*transformer.parameters(), *transformer.buffers()}
    on_gpu = tensors if offload == "null" else tensors - offloaded
    real = {False: sum(t.nbytes for t in tensors), True: sum(t.nbytes for t in on_gpu)}
    for cuda in (False, True):
        planned = estimator("fp8_layerwise", cuda)
        assert planned.estimate(4).persistent["base weights"] == real[cuda]
        assert planned.trace.graph_bytes(2) <= estimator("null", cuda).trace.graph_bytes(2)
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    assert "blocks of the model" in estimator("fp8_layerwise", cuda=False).rates(2).how


@pytest.mark.slow
def test_a_vae_takes_less_memory_for_slices_and_less_again_for_tiles():
    size = [*LEAN, "height=96", "width=96", "objective.keep_graphs=false"]
    peaks = []
    for settings in ("{}", "{vae_slicing: true}", "{vae_slicing: tiles}"):
        args = FlowGRPOConfig.from_yaml("tiny_grpo", [*size, f"memory={settings}"])
        peaks.append(StepEstimator(args, cuda=True).estimate(8).transient["decoding"])
    whole, sliced, tiled = peaks
    assert tiled < sliced < whole
    words = ["plan", "tiny_grpo", *size, "memory={vae_slicing: tiles}", "--gpu", "L4"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "VAE" in result.output


@pytest.mark.slow
def test_trajectories_take_what_a_rollout_leaves(tmp_path):
    small = [
        *LEAN,
        "prompts_per_step=2",
        "images_per_prompt=2",
        "microbatch=4",
        "objective.keep_graphs=false",
        "evaluation.prompts=null",
    ]
    settings = [*small, "trackers=[]", f"output_dir={tmp_path}"]
    source = FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml("tiny_grpo", settings)).stage
    window = source.sampler.window(0)
    left = source.sampler.trajectory(0, source.prompt_sampler.sample(0, 2, 2), window)
    records = sum(states.nbytes for states in (left.x, left.x_next, left.mean))
    state = left.final.nbytes

    def planned(*more: str) -> float:
        args = FlowGRPOConfig.from_yaml("tiny_grpo", [*settings, *more])
        return StepEstimator(args, cuda=True).estimate(4).persistent["trajectories"]

    assert planned() == records + (2 + len(window)) * state  # with the first and last state, and the noise
    assert planned("memory.offload_trajectories=true") == planned() - records


def test_a_forecast_is_linear_in_the_rows_and_the_largest_fits(default):
    for memory in (0.8 * GB, 1.5 * GB):
        largest = default.largest_microbatch(memory)
        assert default.estimate(largest).peak <= memory < default.estimate(largest + 2).peak


@pytest.mark.parametrize(("count", "updates"), [(1, 1), (3, 2), (8, 1)])
def test_sizes_divide(count, updates):
    args = fit_batch_sizes(FlowGRPOConfig.from_yaml("tiny_ocr", [f"updates={updates}"]), 50, count)
    assert args.prompts_per_step % (count * updates) == 0
    assert args.prompts_per_step * args.images_per_prompt // count % args.microbatch == 0
    assert args.microbatch <= 50


def test_a_kl_needs_the_reference_beside_the_graph(lean, default):
    without = StepEstimator(FlowGRPOConfig.from_yaml("tiny_ocr", [*lean, "objective.kl_weight=0"]), cuda=True)
    one, other = without.estimate(8), default.estimate(8)
    assert other.transient["update"] == one.transient["update"] + one.transient["rollout"]
    assert other.operations > one.operations


def with_kept_graphs(keep: bool, *words: str) -> FlowGRPOConfig:
    window = "objective.window={schedule: fixed, size: 2, first_step: 0}"
    size = [
        *LEAN,
        "prompts_per_step=2",
        "images_per_prompt=4",
        "microbatch=4",
        "updates=1",
        "dtype=fp32",
        "evaluation.prompts=null",
    ]
    return FlowGRPOConfig.from_yaml(
        "tiny_grpo", [*size, window, "sampling.steps=3", f"objective.keep_graphs={keep}", *words]
    )


@functools.cache
def planned(keep: bool) -> StepEstimator:
    return StepEstimator(with_kept_graphs(keep), cuda=True)


def test_kept_graphs_take_what_they_take_in_a_rollout(tmp_path):
    """The bytes alive at the end of a real one, and the most at once."""
    args = with_kept_graphs(True, f"output_dir={tmp_path}")
    trainer, counter = FlowGRPOTrainer(args=args), trace.LiveBytesCounter()
    trainer.state.enter_stage(0)
    sampler, batch = trainer.stage.sampler, trainer.prompt_sampler.sample(0, 2, 4)
    sampler.trajectory(0, batch, [])  # what is cached
    with counter:
        trajectory = sampler.trajectory(0, batch, [0, 1], keep_graphs=True)
    assert sorted(trajectory.graphs) == [0, 4]
    plan = planned(True)
    assert counter.now == pytest.approx(plan.estimate(4).transient["rollout"] - plan.trace.bytes[4]["rollout"], rel=0.03)
    assert counter.peak == pytest.approx(plan.estimate(4).transient["rollout"], rel=0.03)


def test_kept_graphs_are_of_all_images_of_a_step_and_save_a_forward_pass():
    replayed, kept = planned(False), planned(True)
    one, other = replayed.estimate(4), kept.estimate(4)
    graph = kept.trace.graph_bytes(4)
    for name, own in (("rollout", 0), ("decoding", 0), ("update", graph)):
        assert other.transient[name] == pytest.approx(one.transient[name] - own + 2 * 2 * graph), (
            "two steps of two micro-batches"
        )
    assert other.forward == one.forward
    assert other.update == one.update - 8 * 2 * replayed.trace.operations["rollout"] / 2
    for memory in (0.8 * GB, 1.5 * GB):
        largest = kept.largest_microbatch(memory)
        assert kept.estimate(largest).peak <= memory < kept.estimate(largest + 2).peak
        assert largest < replayed.largest_microbatch(memory)


@pytest.fixture
def small_model(tmp_path):
    """Saves a small model of a preset's family; returns the preset's settings for it."""

    def saved(preset: str) -> list[str]:
        tiny = TINY[FAMILIES[preset]]
        torch.manual_seed(0)
        tiny.build().save_pretrained(tmp_path)
        size = [f"height={tiny.size[0]}", f"width={tiny.size[1]}", f"pipeline_kwargs={json.dumps(tiny.call)}"]
        return [f"model={tmp_path}", "microbatch=2", "evaluation.prompts=null", "rewards={jpeg_size: 1}", *size]

    return saved


@pytest.mark.parametrize(
    "preset",
    [pytest.param(p, marks=[pytest.mark.slow] * (p != "wan21_ocr")) for p in FAMILIES],
)
def test_a_preset_is_planned_on_the_configs_of_its_model_alone(preset, small_model, tmp_path, monkeypatch):
    """The real config with a small model of its family in place of the hub's."""
    words = small_model(preset)
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    for kind in WEIGHTS:
        for file in tmp_path.rglob(kind):
            file.unlink()
    forecasts = StepEstimator(FlowGRPOConfig.from_yaml(preset, words), cuda=False)
    assert forecasts.estimate(2).peak > 0
    assert "blocks of the model" in forecasts.rates(2).how, "each family's own blocks were timed"


@pytest.mark.parametrize("preset", ["flux_dev_ocr", pytest.param("sana_ocr", marks=pytest.mark.slow)])
def test_a_preset_is_tried_on_this_machine(preset, small_model, monkeypatch):
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    result = CliRunner().invoke(cli.app, ["train", preset, *small_model(preset), "--dry-run"])
    assert result.exit_code == 0, result.output
    args, size = FlowGRPOConfig.from_yaml(preset), TINY[FAMILIES[preset]].size
    images = args.prompts_per_step * args.images_per_prompt
    assert f"a step: {images} images of {size[0]} x {size[1]}" in " ".join(result.output.split())
    assert "The settings go together; nothing was trained." in result.output


@pytest.mark.parametrize("preset", [name for name in FAMILIES if FlowGRPOConfig.from_yaml(name).lora.targets])
def test_every_lora_target_of_a_preset_is_a_layer_of_its_model(preset):
    modules = TINY[FAMILIES[preset]].build().transformer.named_modules()
    layers = [f".{name}" for name, module in modules if isinstance(module, torch.nn.Linear)]
    for target in FlowGRPOConfig.from_yaml(preset).lora.targets:
        assert any(name.endswith(f".{target}") for name in layers), target


def repeats_a_model_and_its_rewards() -> list[str]:
    """Return the presets whose family of models an earlier preset has, with all of their rewards: their dry runs take the same way."""
    seen: dict[str, list[set[str]]] = {}
    repeats = []
    for preset in PRESETS:
        args = FlowGRPOConfig.from_yaml(preset)
        earlier = seen.setdefault(re.split(r"[.-]", args.model.rsplit("/", 1)[-1])[0], [])
        if any(rewards >= set(args.rewards) for rewards in earlier):
            repeats.append(preset)
        earlier.append(set(args.rewards))
    return repeats


REPEATS = repeats_a_model_and_its_rewards()


def untraceable(*_args):
    raise trace.UntraceableModel("not tried")


@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=[pytest.mark.slow] * (p in (*REPEATS, "tiny_grpo", "tiny_all"))) for p in PRESETS]
)
def test_every_preset_passes_a_dry_run_where_the_hub_is_out_of_reach(preset, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    args = FlowGRPOConfig.from_yaml(preset)
    is_bundled = args.model in BUNDLED_MODELS
    if not is_bundled:  # tracing the code of large models takes most of the time: test_published has that
        monkeypatch.setattr("flow_grpo.doctor.dry_run.StepEstimator", untraceable)
    size = [] if is_bundled else ["height=128", "width=128"]
    result = CliRunner().invoke(cli.app, ["train", preset, *size, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "The settings go together" in result.output
    assert len(result.output.splitlines()) < 8


def test_plan_says_what_a_gpu_will_hold(lean):
    result = CliRunner().invoke(
        cli.app,
        ["plan", "tiny_grpo", *lean, "images_per_prompt=4", "prompts_per_step=16", "--gpu", "rtx 4090", "--gpus", "3"],
    )
    assert result.exit_code == 0, result.output
    assert "3 x RTX 4090, 24 GB" in result.output
    assert "prompts_per_step=18" in result.output, "the next number that three processes can share"


@pytest.mark.parametrize(
    ("name", "known", "gigabytes"),
    [
        ("RTX4090", "RTX 4090", 24),
        ("rtx 4090", "RTX 4090", 24),
        ("4090", "RTX 4090", 24),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("A100-SXM4-40GB", "A100", 40),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("l4", "L4", 24),
    ],
)
def test_a_gpu_is_known_however_its_name_is_written(name, known, gigabytes):
    machine = Hardware.from_name(name)
    assert (machine.name, machine.memory) == (known, gigabytes * GB)


def test_a_gpu_in_float32_is_said_to_be_slower_than_its_peak(lean):
    plans = {
        dtype: CliRunner().invoke(cli.app, ["plan", "tiny_grpo", *lean, f"dtype={dtype}", "--gpu", "H100"]).output
        for dtype in ("fp32", "bf16")
    }
    assert {dtype for dtype, text in plans.items() if "a GPU is slower in fp32: set dtype=bf16" in text} == {"fp32"}


def test_of_a_run_with_stages_the_one_that_takes_most_memory_is_planned(lean):
    sizes = [{"steps": 3, "microbatch": 2}, {"steps": 3, "microbatch": 8}, {"steps": 3, "microbatch": 4}]
    staged = [*lean, "prompts_per_step=4", "images_per_prompt=2", "microbatch=2", f"stages={json.dumps(sizes)}"]
    estimator = StepEstimator(FlowGRPOConfig.from_yaml("tiny_grpo", staged), cuda=True)
    heaviest = estimator.heaviest_stage()
    assert heaviest.args.microbatch == 8
    assert heaviest.trace is estimator.trace
    text = CliRunner().invoke(cli.app, ["plan", "tiny_grpo", *staged, "--gpu", "H100"]).output
    assert "stage 2 of 3 takes most memory" in text
    assert "memory with microbatch=8" in text
    assert "9 steps" in text


def test_an_unknown_gpu_is_refused_in_a_clear_error_unless_its_memory_is_given(lean):
    with pytest.raises(ValueError, match=r"there is no GPU Voodoo in the list. Give one of A100.*--gpu-memory"):
        Hardware.from_name("Voodoo")
    with pytest.raises(ValueError, match=r"no GPU RTX 4090 Laptop in the list. Did you mean RTX 4090\?"):
        Hardware.from_name("RTX 4090 Laptop")
    with pytest.raises(ValueError, match=r"no GPU 100 in the list\. If it is the memory in GB, write 100GB\."):
        Hardware.from_name("100")  # not the A100 or the H100
    assert Hardware.from_name("100GB").memory == 100 * GB
    given = Hardware.from_name("Voodoo", 30.0)
    assert given.memory == 30 * GB
    assert given.peak_flops == 210e12, "of those with the nearest memory"
    assert "as fast as the RTX 5090, 210 TFLOP/s" in given.assumption
    assert Hardware.from_name("Voodoo", 30.0, tflops=50.0) == Hardware("Voodoo", 30 * GB, 50e12)
    result = CliRunner().invoke(cli.app, ["plan", "tiny_grpo", *lean, "--gpu", "Voodoo", "--gpu-memory", "24"])
    assert result.exit_code == 0, result.output
    assert "it is assumed to be as fast as the RTX 3090" in " ".join(result.output.split())


def test_a_first_run_holds_its_text_encoders_and_offloaded_ones_while_it_encodes(default):
    """Embeddings on disk save the encoders in a later run alone, whose prompts are all there."""

    def planned(memory: str) -> StepEstimate:
        args = FlowGRPOConfig.from_yaml("tiny_ocr", [*LEAN, f"memory={memory}"])
        return StepEstimator(args, cuda=True, trace=default.trace).estimate(8)

    encoders = text_encoder_bytes(default.trace.policy.pipe)
    plain, cached, offloaded = planned("{}"), planned("{embedding_cache_dir: x}"), planned("{offload_text_encoders: true}")
    assert plain.persistent["text encoders"] == encoders > 0
    assert cached == plain
    assert cached.encoded_peak == plain.peak - encoders
    assert offloaded.persistent["text encoders"] == 0
    assert offloaded.transient["encoding"] == encoders
    assert offloaded.encoded_peak == cached.encoded_peak
    args = FlowGRPOConfig.from_yaml("tiny_ocr", [*LEAN, "memory={offload_text_encoders: true}"])
    least = sum(offloaded.persistent.values()) + encoders
    estimator = StepEstimator(args, cuda=True, trace=default.trace)
    assert estimator.largest_microbatch(least - 1) == 0, "no room to encode, however small the micro-batch"


def test_a_phase_of_one_image_at_a_time_does_not_limit_the_micro_batch(lean):
    args = FlowGRPOConfig.from_yaml("compare/flowbp", [*lean, "memory.vae_slicing=true"])
    estimator = StepEstimator(args, cuda=True)
    assert 0 in estimator._per_row.values()
    largest = estimator.largest_microbatch(24 * GB)
    assert estimator.estimate(largest).peak <= 24 * GB < estimator.estimate(largest + 1).peak
    assert estimator.largest_microbatch(estimator.estimate(1).peak - 1) == 0


def test_what_does_not_fit_says_what_is_missing_and_which_setting_saves_it(checkpointed):
    lines = fit.advice(checkpointed, checkpointed.estimate(1).peak - 1)
    missing = "It does not fit: with microbatch=1, 0.0 GB are missing."
    assert lines == [missing, "It fits with: memory.offload_text_encoders=true"], "the cheapest that is not on"


def test_what_fits_with_no_setting_says_how_much_stays_missing(checkpointed):
    lines = fit.advice(checkpointed, 0.5 * GB)
    assert "gradient_checkpointing" not in lines[1], "it is on"
    assert re.match(r"With memory\..* \d\.\d GB are still missing; what is left are smaller images", lines[1])


def test_settings_that_a_stronger_one_makes_needless_are_not_named(checkpointed):
    needed = StepEstimator(checkpointed.args.with_overrides(["memory.quantize=nf4"]), cuda=True)
    lines = fit.advice(checkpointed, needed.estimate(1).peak)
    assert len(lines[1].split()) == 4, lines


def test_nothing_fits_into_no_memory(checkpointed, capsys, monkeypatch):
    monkeypatch.setattr(fit, "StepEstimator", lambda *given: checkpointed)
    assert not print_plan(Console(), checkpointed.args, Hardware("small", 0.5 * GB, 1e12))
    assert "It does not fit" in capsys.readouterr().out


def test_a_run_takes_its_steps_and_the_operations_of_its_evaluations(default):
    rates, machine = Rates(1e12, 1e12), Hardware("card", 24 * GB, 1e12)
    time = fit.run_time(default, machine, rates, 64, held_out=20)
    step = default.estimate(64).seconds(rates)
    forward, _, decoding = (default.trace.operations[name] / 2 for name in ("rollout", "update", "decoding"))
    one = (20 + 16) * (default.args.evaluation.steps * forward + decoding) / 1e12
    assert time.seconds == pytest.approx(default.args.steps * step + time.evaluations * one)


def test_no_weights_are_read(monkeypatch):
    """Not of the model: a plan opens its json files alone."""
    import safetensors.torch

    monkeypatch.setattr(safetensors.torch, "load_file", lambda *a, **k: pytest.fail("weights were read"))
    opened = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or real(self, *a, **k))
    ModelTrace(FlowGRPOConfig.from_yaml("tiny_ocr", LEAN), torch.float32, cuda=False, release_gradients=False)
    assert not [file for file in opened if file.suffix == ".safetensors"]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(7, 11, bias=False).requires_grad_(False)
        self.trained = torch.nn.Linear(11, 5, bias=False)

    def forward(self, x, places=None):
        assert places is None or places.dtype == torch.long
        return self.trained(self.frozen(x))


def test_the_speed_of_blocks_is_their_operations_by_their_seconds(monkeypatch):
    """Two kinds of blocks, one of them three times: forward, and back to the trained weights and the block before."""
    took = iter([2.0, 4.0, 10.0, 20.0])
    ran = []
    monkeypatch.setattr(hardware, "fastest", lambda work, device, seconds: (ran.append(work()), next(took))[1])
    x, places = torch.zeros(3, 7, device="meta", requires_grad=True), torch.zeros(3, dtype=torch.long, device="meta")
    block = Block().to("meta")
    calls = [hardware.BlockCall(block, (x,), {"places": places}, 1), hardware.BlockCall(block, (x[:2],), {}, 3)]
    rates = hardware.measure_rates(calls, torch.device("cpu"), torch.float32, contextlib.nullcontext())
    forward = 2 * (7 * 11 + 11 * 5)
    update = forward + 2 * (7 * 11 + 2 * 11 * 5)
    assert rates.forward == (3 * forward + 3 * 2 * forward) / (2 + 3 * 10)
    assert rates.update == (3 * update + 3 * 2 * update) / (4 + 3 * 20)
    assert len(ran) == 4, "each of them was run"
    assert all(parameter.grad is None for parameter in block.parameters())


def test_blocks_are_timed_with_the_runs_shapes_and_dtype(followed, monkeypatch):
    """Base weights in bf16; the LoRA is in float32."""
    seen = []
    real = hardware._real

    def noted(call, device, kind):
        made = real(call, device, kind)
        seen.append(made)
        return made

    monkeypatch.setattr(hardware, "_real", noted)
    monkeypatch.setattr(hardware, "SECONDS", 0.0)
    rates = followed.rates(6)
    assert "blocks of the model" in rates.how
    (call,) = seen
    assert call.count == 6, "the embedded model's blocks are of one kind"
    assert call.kwargs["hidden_states"].shape == (6, 40, 128)
    kinds = {name: parameter.dtype for name, parameter in call.block.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {torch.bfloat16}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
    trained = [name for name, parameter in call.block.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert call.kwargs["hidden_states"].requires_grad, "the gradient goes back through the block"


@pytest.fixture(scope="module")
def followed() -> StepEstimator:
    """The embedded model in bf16 on a CPU."""
    return StepEstimator(FlowGRPOConfig.from_yaml("tiny_grpo", [*LEAN, "dtype=bf16"]), cuda=False)


def test_a_step_takes_its_operations_by_the_rates(followed, monkeypatch):
    forecast = followed.estimate(64)
    assert forecast.seconds(Rates(1e9, 1e12)) == pytest.approx(forecast.forward / 1e9 + forecast.update / 1e12)
    monkeypatch.setattr(followed, "args", FlowGRPOConfig.from_yaml("tiny_grpo", ["images_per_prompt=8"]))
    assert followed.estimate(64).forward == 2 * forecast.forward
    monkeypatch.setattr(followed, "args", FlowGRPOConfig.from_yaml("tiny_grpo", ["sampling.steps=20"]))
    assert followed.estimate(64).update == forecast.update, "as many steps are trained"
    assert followed.estimate(64).forward > 1.8 * forecast.forward
    monkeypatch.setattr(followed, "args", FlowGRPOConfig.from_yaml("tiny_grpo", ["sampling.solver=dpm_2m"]))
    assert followed.estimate(64).forward == forecast.forward


def test_a_mean_over_groups_takes_a_forward_pass_more_of_each_policy_where_micro_batches_split_them(followed, monkeypatch):
    monkeypatch.setattr(followed, "args", FlowGRPOConfig.from_yaml("compare/crd"))
    whole, split = followed.estimate(64), followed.estimate(6)
    forward = followed.trace.operations["rollout"] / 2
    assert split.forward - whole.forward == pytest.approx(64 * 3 * 2 * forward), "at three noise levels"
    assert split.update == whole.update


def test_draft_takes_a_velocity_of_each_noised_copy_before_they_are_trained():
    draft = StepEstimator(FlowGRPOConfig.from_yaml("compare/draft", LEAN), cuda=False)
    args, rollout = draft.args, draft.trace.operations["rollout"] / 2
    images, copies, kl = args.prompts_per_step * args.images_per_prompt, 2, args.objective.num_losses(args.sampling.steps)
    assert draft.estimate(8).forward == pytest.approx(images * (args.sampling.steps + copies + kl) * rollout)


@pytest.mark.parametrize(("objective", "velocities"), [("awm", 1), ("nft", 0), ("pepg", 1)])
def test_several_updates_on_a_rollout_take_the_velocities_of_the_policy_that_sampled(
    followed, monkeypatch, objective, velocities
):
    forward = followed.trace.operations["rollout"] / 2
    estimates = []
    for updates in (1, 2):
        config = FlowGRPOConfig.from_yaml(
            f"compare/{objective}" if objective != "awm" else "tiny_ocr", [f"updates={updates}", "epochs=1"]
        )
        monkeypatch.setattr(followed, "args", config)
        estimates.append(followed.estimate(64))
    noised = config.prompts_per_step * config.images_per_prompt * config.objective.num_noise_levels
    assert estimates[1].forward - estimates[0].forward == pytest.approx(velocities * noised * forward)
    assert estimates[1].update == estimates[0].update, "each update has a share of the images"


def test_plan_of_this_machine_says_how_its_speed_is_known(followed, monkeypatch):
    monkeypatch.setattr(StepEstimator, "rates", lambda self, microbatch: Rates(1e9, 1e9, "as injected"))
    words = ["plan", "tiny_grpo", *LEAN, "evaluation.prompts=null", "prompts_per_step=2", "dtype=bf16"]
    output = " ".join(CliRunner().invoke(cli.app, words).output.split())
    seconds = followed.estimate(8).operations / 8 / 1e9  # of 2 prompts in place of 16
    assert f"a step: {seconds:.3g} s, without rewards, if every group has signal (as injected)" in output


def test_rewards_are_measured_on_few_images_however_many_a_step_has(monkeypatch):
    counts = []
    monkeypatch.setattr(fit, "peak_memory", lambda device: 5.0)
    monkeypatch.setattr(
        fit, "build_rewards", lambda args, **_: (lambda images, *rest, **more: counts.append(len(images)), [])
    )
    args = FlowGRPOConfig.from_yaml("tiny_grpo", ["prompts_per_step=16", "images_per_prompt=10000", "microbatch=64"])
    assert fit.baseline_memory(args) == 5 + (160_000 - 128) * 3 * 32 * 80 * 4
    assert counts == [128]


def test_a_reward_that_costs_time_or_money_is_not_called_to_measure_memory(tmp_path):
    (tmp_path / "paid.py").write_text(
        "class Paid:\n    costly = True\n    def __call__(self, images, prompts):\n        raise RuntimeError('an invoice')\n\n"
        f"def free(images, prompts):\n    open({str(tmp_path / 'called')!r}, 'w')\n    return images.mean((1, 2, 3))\n"
    )
    rewards = f"rewards={{{tmp_path / 'paid.py'}:Paid: 1, human: {{weight: 1, options: {{port: -1}}}}, {tmp_path / 'paid.py'}:free: 1}}"
    args = FlowGRPOConfig.from_yaml("tiny_grpo", [rewards, "evaluation.prompts=null"])
    assert fit.baseline_memory(args) > 0, "a page of human would fail on this port"
    assert (tmp_path / "called").is_file()


def test_a_reward_that_would_be_downloaded_is_left_out_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    args = FlowGRPOConfig.from_yaml("tiny_grpo", ["rewards={pickscore: 1}", "evaluation.prompts=null"])
    with pytest.warns(
        UserWarning, match="The memory of the reward pickscore is not counted: its weights are not on this machine"
    ):
        assert fit.baseline_memory(args) > 0


def test_a_rollout_with_guidance_takes_two_passes_a_step_and_the_update_none_more(lean, default):
    guided = StepEstimator(FlowGRPOConfig.from_yaml("tiny_ocr", [*lean, "sampling.guidance=3"]), cuda=True)
    forward, images = default.trace.forward_operations / 2, 64
    assert guided.trace.forward_operations == default.trace.forward_operations
    assert guided.estimate(64).forward - default.estimate(64).forward == images * 5 * forward
    assert guided.estimate(64).update == default.estimate(64).update
    steps, once = (
        StepEstimator(FlowGRPOConfig.from_yaml("tiny_grpo", [*lean, *more]), cuda=True, trace=one.trace)
        for one, more in ((guided, ["sampling.guidance=3"]), (default, []))
    )
    trained = steps.args.objective.num_losses(steps.args.sampling.steps)
    count = steps.args.prompts_per_step * steps.args.images_per_prompt
    more = steps.estimate(64).forward - once.estimate(64).forward
    assert more >= count * trained * forward, "a step records the probability by the trained velocity too"
    assert steps.estimate(64).update == once.estimate(64).update
