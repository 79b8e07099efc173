"""Whether a CPU generates and reads the embedded model's images faster by torch.compile, int8, another memory format or a small recogniser.

    python benchmarks/cpu_options.py [fp32|bf16]

Each option takes turns with the plain code, so nothing else may run beside it. The recogniser needs the package onnx. `share` is the
option's time over that of the plain code, the median of the turns; `difference` is the largest one of its output, as a share of the
output's standard deviation.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dev.tiny.pretrain import images_of
from dev.tiny.world import parse
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.policy.library_logging import quiet_libraries
from flow_grpo.rewards.ocr import LINE_HEIGHT, OCR, _engine
from flow_grpo.trainer import FlowGRPOTrainer

ROUNDS, WARMUP, IMAGES = 8, 2, 64
Run = Callable[[], Tensor]


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compared(plain: Run, option: Run) -> tuple[float, float, float]:
    """The seconds of an option's first call, its share of the plain code's time, and how far its output is from the plain one's."""
    first = seconds(option)
    difference = float((option() - plain()).abs().max() / plain().std())
    turns = [(seconds(option), seconds(plain)) for _ in range(WARMUP + ROUNDS)][WARMUP:]
    return first, statistics.median(option_seconds / plain_seconds for option_seconds, plain_seconds in turns), difference


def graph_of(module: torch.nn.Module, *inputs: Tensor) -> torch.nn.Module:
    """A frozen trace, which oneDNN's graph compiler fuses."""
    torch.jit.enable_onednn_fusion(True)
    return torch.jit.freeze(torch.jit.trace(module.eval(), inputs, strict=False))


def quantised_reader(trained: OCR, images: Tensor, folder: Path) -> Callable[[Tensor], list[str]]:
    """The same recogniser with int8 weights."""
    from onnxruntime import InferenceSession
    from onnxruntime.quantization import QuantType, quantize_dynamic

    height, width = images.shape[-2:]
    session = _engine(round(LINE_HEIGHT * width / height) + 16, trained.device, os.getpid()).text_rec.session
    options = session.session.get_session_options()
    quantize_dynamic(session.session._model_path, folder / "rec.onnx", weight_type=QuantType.QUInt8)
    small = InferenceSession(str(folder / "rec.onnx"), options, providers=["CPUExecutionProvider"])

    def read(batch: Tensor) -> list[str]:
        plain, session.session = session.session, small
        try:
            return trained._read(batch)
        finally:
            session.session = plain

    return read


class Velocity(torch.nn.Module):
    """The transformer with a tensor as output, on fixed inputs."""

    def __init__(self, trainer: FlowGRPOTrainer, prompts: list[str], autocast: torch.autocast) -> None:
        super().__init__()
        pipe, (schedule, shape) = trainer.policy.pipe, trainer.policy.schedule(5)
        self.transformer, self.autocast = pipe.transformer, autocast
        embeds, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=14
        )
        x = torch.randn(IMAGES, *shape, generator=torch.Generator().manual_seed(0))
        self.inputs = (x, schedule.timesteps[1].expand(IMAGES), embeds.detach().float(), pooled.detach().float())

    def forward(self, x: Tensor, timestep: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        return self.transformer(
            x, encoder_hidden_states=embeds, pooled_projections=pooled, timestep=timestep, return_dict=False
        )[0]

    def sampled(self, module: torch.nn.Module) -> Run:
        def run() -> Tensor:
            with torch.no_grad(), self.autocast:
                return module(*self.inputs).float()

        return run

    def trained(self, module: torch.nn.Module) -> Run:
        def run() -> Tensor:
            with self.autocast:
                out = module(*self.inputs).float()
            out.square().mean().backward()
            self.transformer.zero_grad(set_to_none=True)
            return out.detach()

        return run


def decoding(vae: torch.nn.Module, latents: Tensor, memory_format: torch.memory_format) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return vae.to(memory_format=memory_format).decode(latents.to(vae.dtype)).sample.float()

    return run


def add_row(table: Table, part: str, option: str, plain: Run, faster: Callable[[], Run]) -> None:
    """A row, or what the option fails with: what a version of torch cannot do is a result too."""
    try:
        first, share, difference = compared(plain, faster())
        table.add_row(part, option, f"{first:.1f}", f"{share:.2f}", f"{difference:.1e}")
    except Exception as error:
        table.add_row(part, option, "-", "-", " ".join(str(error).split())[:60])


def measure(trainer: FlowGRPOTrainer, dtype: str, folder: Path) -> Table:
    """A table with a row for each option."""
    prompts = trainer.prompt_sampler.sample(0, IMAGES // 4, 4).prompts
    table = Table(title=f"{IMAGES} images of the embedded model, {dtype}, torch {torch.__version__}")
    for column in ("part", "option", "first call, s", "share", "difference"):
        table.add_column(column, justify="left" if column in ("part", "option") else "right")

    plain = Velocity(trainer, prompts, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"))
    compiled, int8 = torch.compile(plain), torch.ao.quantization.quantize_dynamic
    sampled, trained = plain.sampled(plain), plain.trained(plain)
    add_row(table, "a velocity", "torch.compile", sampled, lambda: plain.sampled(compiled))
    add_row(table, "a velocity", "oneDNN graph", sampled, lambda: plain.sampled(graph_of(plain, *plain.inputs)))
    add_row(table, "a velocity", "int8 weights", sampled, lambda: plain.sampled(int8(plain, {torch.nn.Linear}, torch.qint8)))
    add_row(table, "forward and backward", "torch.compile", trained, lambda: plain.trained(compiled))

    vae, latents = trainer.policy.pipe.vae, plain.inputs[0]
    contiguous = decoding(vae, latents, torch.contiguous_format)
    add_row(table, "decoding", "channels last", contiguous, lambda: decoding(vae, latents, torch.channels_last))

    images = images_of([parse(prompt) for prompt in prompts]) / 2 + 0.5
    reader = OCR()
    small = quantised_reader(reader, images, folder)
    share = statistics.median(seconds(lambda: small(images)) / seconds(lambda: reader._read(images)) for _ in range(ROUNDS))
    same = sum(a == b for a, b in zip(reader._read(images), small(images), strict=True))
    table.add_row("reading", "int8 weights", "", f"{share:.2f}", f"{same} of {IMAGES} texts are the same")
    return table


def main() -> None:
    dtype = sys.argv[1] if len(sys.argv) > 1 else "fp32"
    quiet_libraries()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        trainer = FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml("tiny_ocr", [f"output_dir={folder}/run", f"dtype={dtype}"]))
        Console(width=120, emoji=False).print(measure(trainer, dtype, Path(folder)))


if __name__ == "__main__":
    main()
