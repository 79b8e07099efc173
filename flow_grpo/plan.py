"""Before a run: what it will need of memory and time, from the model's configs alone.

The pipeline's own code is followed without numbers (see `flow_grpo.hollow`), so the forecast knows any family, with its guidance, its
checkpointing and its adapter.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

import rewards as reward_kit
from flow_grpo import hub
from flow_grpo.config import FlowGRPOConfig
from flow_grpo.dashboards import check_installed
from flow_grpo.evaluate import build_rewards
from flow_grpo.hollow import Alive, Encoder, Operations, hollow
from flow_grpo.memory import arrange, peak_bytes
from flow_grpo.parallel import MESSAGE, Processes
from flow_grpo.policy import DTYPES, Policy, fast_dtype
from flow_grpo.prompt_sets import source_of
from flow_grpo.prompts import REMOTE, Dealer, load_prompts
from flow_grpo.terms import own_function
from flow_grpo.trainable import add_trained
from flow_grpo.zero import STAGES, library

GB = 1e9
# memory in GB and dense bf16 TFLOP/s of the makers' data sheets
GPUS = {
    "A100": (80, 312),
    "A100-40GB": (40, 312),
    "H100": (80, 989),
    "H200": (141, 989),
    "B200": (180, 2250),
    "L4": (24, 121),
    "L40S": (48, 362),
    "RTX 3090": (24, 71),
    "RTX 4090": (24, 165),
    "RTX 5090": (32, 210),
}
UTILISATION = {True: 0.45, False: 0.12}  # of that peak, on a GPU and by the embedded model on a CPU
CUDA_CONTEXT = 0.6 * GB  # of torch's own, before the first tensor
# times what passes: a CPU's allocator keeps pieces of it, and its kernels pack copies of their own
HELD = {True: 1.0, False: 1.3}
DOING = {"rollout": "images are drawn", "update": "the weights are trained", "decoding": "images are decoded"}
BITS = {"int8": 8.1, "int4": 4.5, "nf4": 4.5}  # of a weight, with its share of the scales


@dataclass(frozen=True)
class Machine:
    """What a run is planned for: `count` devices with so many bytes and floating point operations a second, each."""

    name: str
    memory: float
    speed: float
    count: int = 1
    cuda: bool = True

    @classmethod
    def named(cls, gpu: str, memory_gb: float | None, count: int) -> "Machine":
        """A GPU by its name. ValueError if it is not known."""
        known = {name.lower(): (name, *numbers) for name, numbers in GPUS.items()}
        if gpu.lower() not in known:
            raise ValueError(
                f"there is no GPU {gpu} in the list: give one of {', '.join(GPUS)}, and --gpu-memory if yours has other."
            )
        name, memory, speed = known[gpu.lower()]
        return cls(name, (memory_gb or memory) * GB, speed * 1e12, count)

    @classmethod
    def here(cls, dtype: str, memory_gb: float | None, count: int) -> "Machine":
        """This machine's GPU, or its CPU. `dtype` as in the config."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        name = torch.cuda.get_device_name() if cuda else "this CPU"
        memory = torch.cuda.get_device_properties(0).total_memory if cuda else psutil.virtual_memory().total
        return cls(name, memory_gb * GB if memory_gb else memory, matmul_speed(device, _dtype(dtype, cuda)), count, cuda)


@dataclass(frozen=True)
class Forecast:
    """Of a training step on one device: bytes that stay, by part, and bytes that come and go, by what is done then."""

    microbatch: int
    staying: dict[str, float]
    passing: dict[str, float]
    operations: float  # of all devices

    @property
    def peak(self) -> float:
        return sum(self.staying.values()) + max(self.passing.values())


class NotFollowed(ValueError):
    """A model whose code needs its numbers."""


class Plan:
    """Forecasts for a config.

    Args:
        cuda: for a GPU; else for a CPU, where rewards and libraries lie in the same memory.
        count: devices, which share weights, gradients or moments where the config says so.

    Raises:
        NotFollowed: the model's code can't be followed without its numbers.
        ValueError: the model can't be trained so.
        OSError: its configs can't be had.
    """

    def __init__(self, args: FlowGRPOConfig, cuda: bool, count: int = 1) -> None:
        self.args, self.cuda, shard = args, cuda, args.memory.shard if count > 1 else None
        self.dtype = _dtype(args.dtype, cuda)
        pipe = hollow(hub.locate(args.model), self.dtype, cuda)
        arrange(pipe, args.memory.model_copy(update={"attention": None}))  # a kernel that only the GPU's machine has
        self.policy = Policy(pipe, self.dtype, **args.call())
        add_trained(self.policy, args)
        whole = self.policy.trains_all
        self.shares = {  # in which there lie, of what is meant by each
            "base": count if shard == "fsdp2" else 1,
            "trained": count if shard == "fsdp2" and whole else 1,
            "gradients": count if shard == "zero2" or (shard == "fsdp2" and whole) else 1,
            "moments": count if shard in STAGES or (shard == "fsdp2" and whole) else 1,
        }
        self.copied = shard in STAGES  # DeepSpeed moves a copy of each process's share of what is trained
        self.sums = 2 if shard == "zero2" else 1  # it adds the newest gradients to the sum of those before
        prompts = load_prompts(args.training_prompts).prompts
        self.prompt = max(prompts, key=len)
        try:
            self.schedule, self.state_shape = self.policy.schedule(args.sampling.steps)
            two, four = ({name: HELD[cuda] * v for name, v in self._passing(rows, Alive).items()} for rows in (2, 4))
            self.operations = self._passing(2, Operations)
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotFollowed(f"{type(pipe).__name__} can't be followed without its weights: {reason}") from error
        if self._references:
            for one in (two, four):
                one["update"] += one["rollout"]  # the reference is computed while the graph is there
        self._slope = {name: (four[name] - two[name]) / 2 for name in two}
        self._start = {name: two[name] - 2 * self._slope[name] for name in two}

    def forecast(self, microbatch: int, base: float = 0.0) -> Forecast:
        """Of a step with that micro-batch, in which bytes are linear; `base` is what else lies in the memory."""
        passing = {name: self._start[name] + microbatch * slope for name, slope in self._slope.items()}
        more = {"libraries and rewards": base} if base else {}
        return Forecast(microbatch, {**self._staying(), **more}, passing, self._operations())

    def largest(self, memory: float, base: float = 0.0) -> int:
        """The largest micro-batch that fits, 0 if none does."""
        left = memory - base - sum(self._staying().values())
        return max(0, int(min((left - self._start[name]) / slope for name, slope in self._slope.items())))

    def _passing(self, rows: int, counter: Callable[[], Any]) -> dict[str, float]:
        """What a counter finds of so many rows: in a forward pass without gradients, in one with its backward pass, in decoding."""
        return {
            "rollout": self._velocity(rows, counter(), False),
            "update": self._velocity(rows, counter(), True),
            "decoding": self._decoding(rows, counter()),
        }

    def _velocity(self, rows: int, counter: Any, training: bool) -> float:
        policy = self.policy
        conditioning = policy.encode([self.prompt] * rows)
        x, index = torch.zeros(rows, *self.state_shape), torch.arange(rows)
        with policy.pipe.transformer.counted(counter, training, self.shares["gradients"] > 1):
            policy.velocity(x, self.schedule.timesteps[0], conditioning, index)
        return _count(counter)

    def _decoding(self, rows: int, counter: Any) -> float:
        with self.policy.pipe.vae.counted(counter, False):
            self.policy.decode(torch.zeros(rows, *self.state_shape), rows)
        return _count(counter)

    def _staying(self) -> dict[str, float]:
        args, memory, transformer = self.args, self.args.memory, self.policy.pipe.transformer
        trained = 4 * sum(p.numel() for p in self.policy.parameters().values())
        moments = 2 * (8 / 32 if args.optimizer.name == "adamw_8bit" else 1) + self.copied
        copies = 1 + bool(args.ema_decay) + (args.objective.name == "nft")
        whole, shares = self.policy.trains_all, self.shares
        kept = whole and (not self.cuda or self._references)  # the base model's, which is else on the CPU
        encoders = 0 if memory.offload_encoders or memory.embeddings else self._encoders()
        return {
            "base weights": (trained * kept if whole else _weights(transformer, memory.quantize)) / shares["base"],
            "text encoders": encoders,
            "VAE": _weights(self.policy.pipe.vae, None),
            ("transformer" if whole else "adapter"): trained * (copies / shares["trained"] + moments / shares["moments"]),
            **({"gradients": trained * self.sums / shares["gradients"]} if shares["gradients"] > 1 else {}),  # else passing
            **({"messages": min(trained, 4 * MESSAGE)} if self.copied else {}),
            **({"CUDA": CUDA_CONTEXT} if self.cuda else {}),
        }

    def _encoders(self) -> float:
        return sum(part.bytes for part in self.policy.pipe.components.values() if isinstance(part, Encoder))

    @property
    def _references(self) -> int:
        """Forward passes without a gradient beside each one with it."""
        o = self.args.objective
        return bool(o.kl_weight or o.name == "dpo") + (o.name == "nft")

    def _operations(self) -> float:
        """Of a step in which every group has signal."""
        args = self.args
        s, o = args.sampling, args.objective
        w, last = s.window, s.steps - 2 if s.window.last is None else s.window.last
        trained = o.draws if s.transition == "ode" else last - w.first + 1 if w.kind == "all" else w.size
        drawn = 0 if o.data else (2 * s.steps - 1 if s.solver == "heun" else s.steps)
        forward, both, decoding = (count / 2 for count in self.operations.values())  # of a row
        update = args.epochs * trained * (both + self._references * forward)
        return args.prompts_per_step * args.images_per_prompt * (drawn * forward + decoding + update)


def fitting(args: FlowGRPOConfig, largest: int, count: int) -> FlowGRPOConfig:
    """The config with sizes of a step that divide, on so many processes: prompts rounded up, and the largest micro-batch that fits."""
    share = args.updates * count
    prompts = -(-args.prompts_per_step // share) * share
    pairs = args.objective.name == "dpo"
    microbatch = Processes(0, count).check_sizes(prompts, args.images_per_prompt, largest, args.updates, pairs)
    return args.model_copy(update={"prompts_per_step": prompts, "microbatch": microbatch})


def rehearse(args: FlowGRPOConfig, count: int) -> list[str]:
    """Looks at all that a run of `count` processes would begin with, and loads of the model its configs alone.

    Returns what there is to say of it, sentences for the user. ValueError for what does not fit.
    """
    check_installed(args.trackers)
    settings = {**args.evaluation.rewards, **args.rewards}
    for name, setting in settings.items():
        if setting.remote is None and not setting.isolate:  # else it is at home in another environment
            reward_kit.check(name, **setting.options)
    if args.memory.shard in STAGES and count > 1:
        library(args.memory.shard, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    notes = []
    for source in (args.training_prompts, args.evaluation.prompts):
        if source is not None:
            place = source_of(source)
            away = place.startswith(REMOTE) or (not Path(place).suffix and hub.may_be_hub_id(place))
            notes += _unless_offline(f"The prompts {source}", away, functools.partial(load_prompts, source))
    for _, part in args.parts():
        own_function("objective", part.objective.name)
        own_function("advantage", part.objective.advantage)
        pairs = part.objective.name == "dpo"
        Processes(0, count).check_sizes(part.prompts_per_step, part.images_per_prompt, part.microbatch, part.updates, pairs)
        if part.objective.data is None and not notes:
            Dealer(load_prompts(args.training_prompts), part.seed).deal(0, part.prompts_per_step, 1)
    notes += _unless_offline("The model", hub.may_be_hub_id(args.model), functools.partial(hub.locate, args.model))
    if notes:
        return notes
    try:
        forecast = Plan(args, cuda := torch.cuda.is_available(), count).forecast(args.microbatch)
    except NotFollowed as error:
        return [f"Its memory is not known: {error}."]
    where = "on the GPU" if cuda else "of a CPU, beside libraries and rewards"
    return [
        f"The model will take {forecast.peak / GB:.2f} GB {where}, with microbatch={args.microbatch}; `flow-grpo plan` has more."
    ]


def _unless_offline(what: str, away: bool, find: Callable[[], Any]) -> list[str]:
    """Nothing to say if it is found; a sentence if it lies where it can't be reached, and ValueError if it lies nowhere."""
    try:
        find()
    except ValueError as error:
        if not away:
            raise
        return [f"{what} could not be looked at: {error}"]
    return []


def print_plan(console: Console, args: FlowGRPOConfig, machine: Machine, base: float = 0.0) -> bool:
    """Says what the run will need on that machine; False if it does not fit."""
    plan = Plan(args, machine.cuda, machine.count)
    largest = plan.largest(machine.memory, base)
    here = f"{machine.count} x {machine.name}" if machine.count > 1 else machine.name
    console.print(
        f"{args.model} on {here}, {machine.memory / GB:.0f} GB and {machine.speed / 1e12:.3g} TFLOP/s each", highlight=False
    )
    if not largest:
        console.print(
            "It does not fit: set memory.checkpointing, memory.quantize=nf4, memory.offload_encoders, or a smaller size."
        )
        return False
    sizes, most = fitting(args, min(args.microbatch, largest), machine.count), fitting(args, largest, machine.count)
    forecast = plan.forecast(sizes.microbatch, base)
    console.print(_table(forecast))
    operations = forecast.operations * sizes.prompts_per_step / args.prompts_per_step
    share = UTILISATION[machine.cuda]
    seconds = operations / (machine.speed * machine.count * share)
    for line in (
        f"a step: {seconds:.3g} s at {share:.0%} of the peak, without rewards, if every group has signal",
        f"largest microbatch: {largest}; of those that divide: {most.microbatch}",
        f"sizes that divide: prompts_per_step={sizes.prompts_per_step} images_per_prompt={args.images_per_prompt} "
        f"microbatch={most.microbatch} updates={args.updates} --num-processes {machine.count}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    return True


def _table(forecast: Forecast) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"memory with microbatch={forecast.microbatch}")
    table.add_column("GB", justify="right")
    for name, size in forecast.staying.items():
        table.add_row(name, f"{size / GB:.2f}")
    for name, size in forecast.passing.items():
        table.add_row(f"while {DOING[name]}", f"{size / GB:.2f}", style="dim")
    table.add_row("peak", f"{forecast.peak / GB:.2f}", style="bold")
    return table


def occupied(args: FlowGRPOConfig) -> float:
    """Bytes that libraries and rewards take on a CPU at their most, while a step's pictures are scored.

    What they give back is not there for the model: each allocator keeps what it once had.
    """
    rewards, _ = build_rewards(args)
    texts = [
        p
        for p in load_prompts(args.training_prompts).prompts[: args.prompts_per_step]
        for _ in range(args.images_per_prompt)
    ]
    rewards(torch.rand(len(texts), 3, args.height or 512, args.width or 512), texts)
    return peak_bytes(torch.device("cpu"))


def matmul_speed(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Floating point operations per second of a large matrix product on this device."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    a @ a  # the first one chooses its kernel
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        a @ a
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 2 * n**3 * count / (time.perf_counter() - started)


def _count(counter: Any) -> float:
    return counter.peak if isinstance(counter, Alive) else counter.total


def _weights(network: Any, quantize: str | None) -> float:
    """Bytes of a network's weights, the adapter's left out; those of linear layers quantised."""
    total = 0.0
    for name, parameter in [*network.named_parameters(), *network.named_buffers()]:
        if "lora_" not in name:
            linear = quantize is not None and parameter.ndim == 2 and name.endswith("weight")
            total += parameter.numel() * (BITS[quantize] / 8 if linear and quantize else parameter.element_size())
    return total


def _dtype(name: str, cuda: bool) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if cuda else fast_dtype("cpu")
