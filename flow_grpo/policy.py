"""Any diffusers flow pipeline as a velocity function, with a LoRA on its transformer.

The pipeline is the model. Its own `__call__` computes the velocity: we give it a scheduler whose only timestep is the one
asked for and whose `step` hands back what the network said, and cached prompt embeddings. Guidance, packing, timestep
scaling and norm tricks are then what diffusers ships, with no code of ours for any family of models.
"""

import copy
import inspect
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from flow_grpo import hub
from flow_grpo.conditioning import Conditioning, join
from flow_grpo.sampling import Solver
from flow_grpo.types import Schedule

ENCODED_AT_ONCE = 8  # prompts in a pass of the text encoders
ENCODED_PROMPTS = 512  # embeddings kept: 3 MB each for SD3.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Policy:
    """A flow pipeline whose transformer carries a trainable LoRA. States and velocities are float32 outside.

    Attributes:
        pipe: the user's pipeline, whose transformer holds the adapter; scheduler and methods stay as they were.
        call: arguments of every pipeline call, such as height, width and guidance_scale.
        ema: the averaged adapter by parameter name, once `start_ema` was called.
    """

    def __init__(self, pipe: DiffusionPipeline, dtype: torch.dtype = torch.float32, **call: Any) -> None:
        if "FlowMatch" not in type(pipe.scheduler).__name__ or not hasattr(pipe, "transformer"):
            raise ValueError(
                f"{type(pipe).__name__} with {type(pipe.scheduler).__name__} does not sample a flow: give a pipeline with a "
                "transformer and a FlowMatchEulerDiscreteScheduler, such as Stable Diffusion 3.5 or FLUX.1."
            )
        self.pipe, self.dtype, self.call = pipe, dtype, {"guidance_scale": 1.0, **call}
        known = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
        unknown = [name for name in self.call if name not in known]
        if unknown:
            raise ValueError(f"{type(pipe).__name__} takes no argument {unknown[0]}; it takes {', '.join(list(known)[1:])}.")
        self.device = pipe.transformer.device
        self.ema: dict[str, Tensor] = {}
        self._encoded: OrderedDict[str, list] = OrderedDict()
        self._batched: list[bool] | None = None
        self._probe = _Probe.from_config(pipe.scheduler.config)
        self._encode_prompt = pipe.encode_prompt
        self._view = copy.copy(pipe)  # our scheduler and our memory of embeddings go into the copy alone
        object.__setattr__(self._view, "scheduler", self._probe)
        self._view.set_progress_bar_config(disable=True)
        self._decoding = copy.copy(self._view)
        object.__setattr__(self._decoding, "transformer", _NoDenoiser(pipe.transformer))
        pipe.transformer.requires_grad_(False).eval()

    # -- what the sampler needs -------------------------------------------------------------------------------------

    def encode(self, prompts: list[str]) -> Conditioning:
        """Prompt embeddings of B rows, computed once per distinct prompt."""
        distinct = list(dict.fromkeys(prompts))
        missing = [prompt for prompt in distinct if prompt not in self._encoded]
        known = {prompt: self._encoded[prompt] for prompt in distinct if prompt in self._encoded}
        if missing and self._batched is None:  # a prompt alone shows which outputs have a row per prompt
            self._batched = [output is not None and len(output) == 1 for output in self._encode_now(missing[:1])]
        for chunk in (missing[i : i + ENCODED_AT_ONCE] for i in range(0, len(missing), ENCODED_AT_ONCE)):
            # always of one shape, which decides the last bits: a resumed run encodes a prompt in other company
            outputs = self._encode_now(chunk + chunk[:1] * (ENCODED_AT_ONCE - len(chunk)))
            for row, prompt in enumerate(chunk):
                pairs = zip(outputs, self._batched or [], strict=True)
                known[prompt] = self._encoded[prompt] = [o[row : row + 1] if b else o for o, b in pairs]
        while len(self._encoded) > ENCODED_PROMPTS:
            self._encoded.popitem(last=False)
        columns = zip(*(known[prompt] for prompt in distinct), strict=True)
        outputs = [join(list(c)) if b else c[0] for c, b in zip(columns, self._batched or [], strict=True)]
        place = {prompt: i for i, prompt in enumerate(distinct)}
        return Conditioning(prompts, outputs, self._batched or [], torch.tensor([place[p] for p in prompts]))

    def schedule(self, steps: int) -> tuple[Schedule, torch.Size]:
        """The pipeline's own timesteps and sigmas for that many steps, and the shape of one state without the batch."""
        stop = self._run(self._view, self.encode([""]), None, None, num_inference_steps=steps)
        timesteps, sigmas = self._probe.timesteps.float().cpu(), self._probe.sigmas.float().cpu()
        return Schedule(timesteps, sigmas), stop.sample.shape[1:]

    def velocity(self, x: Tensor, timestep: Tensor, conditioning: Conditioning, rows: Tensor) -> Tensor:
        """v (n, ...) float32 at states x (n, ...) of `rows` (n,) of the conditioning, at one timestep or at (n,)."""
        if timestep.ndim and self.guided and (timestep != timestep[0]).any():
            # with guidance, pipelines differ in what they make of a timestep per row: one call per timestep
            parts = [(timestep == t).nonzero()[:, 0] for t in timestep.unique()]
            found = torch.cat([self.velocity(x[part], timestep[part][0], conditioning, rows[part]) for part in parts])
            return torch.empty_like(found).index_copy(0, torch.cat(parts).to(found.device), found)
        stop = self._run(
            self._view, conditioning.take(rows), timestep.reshape(1, -1) if timestep.ndim else timestep[None], x
        )
        return stop.output.float()

    def along(self, schedule: Schedule, conditioning: Conditioning) -> Callable[[Tensor, int, Tensor], Tensor]:
        """The velocity at a step of a schedule, as `sampling` takes it: (x (n, ...), step, rows (n,)) -> v (n, ...)."""

        def velocity(x: Tensor, i: int, rows: Tensor) -> Tensor:
            return self.velocity(x, schedule.timesteps[i], conditioning, rows).cpu()

        return velocity

    def heun(self, schedule: Schedule) -> Solver:
        """diffusers' Heun solver on that schedule: order 2, two velocities a step, Euler at the last (arXiv 2206.00364)."""

        def doubled(values: Tensor) -> Tensor:
            return torch.cat([values[:1], values[1:].repeat_interleave(2)])

        def start() -> Callable[[Tensor, Tensor], Tensor]:
            scheduler = FlowMatchHeunDiscreteScheduler()
            scheduler.set_timesteps(len(schedule))
            scheduler.sigmas = torch.cat([doubled(schedule.sigmas[:-1]), schedule.sigmas[-1:]])
            scheduler.set_begin_index(0)
            return lambda x, v: scheduler.step(v, schedule.timesteps[0], x).prev_sample

        return Solver([(call + 1) // 2 for call in range(2 * len(schedule) - 1)], start)

    @torch.no_grad()
    def latents(self, images: Tensor, microbatch: int = 64) -> Tensor:
        """States (B, ...) float32 whose pictures are `images` (B, 3, H, W) in [0, 1]: what `decode` turns round.

        Raises:
            ValueError: the pipeline's state is not its VAE's latent, or not packed by a `_pack_latents` of its own.
        """
        _, shape = self.schedule(2)
        name = type(self.pipe).__name__
        try:
            states = torch.cat([self._latents(chunk, shape) for chunk in images.split(microbatch)])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} can't be trained on given images: {_first_line(error)}") from error
        if states.shape[1:] != shape:
            raise ValueError(
                f"{name} can't be trained on given images of {tuple(images.shape[-2:])} pixels: they become latents of shape "
                f"{tuple(states.shape[1:])}, but it samples {tuple(shape)}."
            )
        return states

    def _latents(self, images: Tensor, shape: torch.Size) -> Tensor:
        vae = self.pipe.vae
        z = vae.encode((2 * images - 1).to(self.device, vae.dtype)).latent_dist.mode().float()
        z = (z - (getattr(vae.config, "shift_factor", None) or 0)) * vae.config.scaling_factor
        return (self.pipe._pack_latents(z, *z.shape) if len(shape) == 2 else z).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor, microbatch: int = 64) -> Tensor:
        """Images (B, 3, H, W) float32 in [0, 1] of final states (B, ...), by the pipeline's own code after its loop."""
        images = []
        for chunk in latents.split(microbatch):
            empty = self.encode([""] * len(chunk))
            with self._probe.passing():
                out = self._run(self._decoding, empty, torch.zeros(1), chunk, output_type="pt")
            images.append(out.images.float().clamp(0, 1).cpu())
        return torch.cat(images)

    @property
    def guided(self) -> bool:
        """Whether the call asks for guidance, by two branches or, as in FLUX.1, by an embedded scale."""
        return float(self.call.get("guidance_scale", 1) or 0) > 1

    # -- the adapter ------------------------------------------------------------------------------------------------

    def add_lora(self, rank: int, alpha: float, targets: list[str], seed: int) -> None:
        """Puts a float32 LoRA on the modules whose names end with one of `targets`. Seeded, and starting as the base."""
        names = [name for name, _ in self.pipe.transformer.named_modules()]
        if not any(name.endswith(f".{target}") for name in names for target in targets):
            raise ValueError(f"no module of {type(self.pipe.transformer).__name__} is named {', '.join(targets)}.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, init_lora_weights="gaussian")
            self.pipe.transformer.add_adapter(config)
        self._finish_adapter()

    def load_lora(self, path: str | Path) -> None:
        """Puts a saved LoRA on the transformer as diffusers does: a folder, a .safetensors file or a hub id."""
        folder, name = Path(path), None
        if folder.is_file():
            folder, name = folder.parent, folder.name
        elif not folder.exists() and not hub.may_be_hub_id(str(path)):
            raise ValueError(
                f"there is no LoRA at {path}: give a folder with pytorch_lora_weights.safetensors, or that file."
            )
        try:
            self.pipe.load_lora_weights(str(folder if folder.exists() else path), weight_name=name, adapter_name="default")
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ValueError(f"the LoRA {path} could not be loaded: {_first_line(error)}") from error
        self._finish_adapter()

    def _finish_adapter(self) -> None:
        for module in self.pipe.transformer.modules():
            if isinstance(module, BaseTunerLayer):
                # peft would cast each input to the LoRA's float32, only for autocast to cast it back
                module.cast_input_dtype_enabled = self.dtype == torch.float32
        for parameter in self.parameters().values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)

    @property
    def has_lora(self) -> bool:
        return bool(getattr(self.pipe.transformer, "peft_config", None))

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters on the transformer."""
        return list(getattr(self.pipe.transformer, "peft_config", {}))

    def parameters(self, adapter: str = "default") -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name."""
        mark = f".{adapter}."
        return {n: p for n, p in self.pipe.transformer.named_parameters() if "lora_" in n and mark in n}

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it, the adapter is off: the base model, which is the reference of the KL."""
        if not self.has_lora:
            yield
            return
        self.pipe.transformer.disable_adapters()
        try:
            yield
        finally:
            self.pipe.transformer.enable_adapters()

    def start_ema(self) -> None:
        self.ema = {name: p.detach().clone() for name, p in self.parameters().items()}

    @torch.no_grad()
    def update_ema(self, decay: float) -> None:
        for name, parameter in self.parameters().items():
            self.ema[name].lerp_(parameter, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the adapter holds its moving average, if there is one: what is evaluated and saved."""
        current = {name: p.detach().clone() for name, p in self.parameters().items() if name in self.ema}
        self._assign(self.ema)
        try:
            yield
        finally:
            self._assign(current)

    def add_copy(self, adapter: str) -> None:
        """A second adapter with the values of the first, not trained: `follow` moves it, `using` switches to it."""
        self.pipe.transformer.add_adapter(self.pipe.transformer.peft_config["default"], adapter)
        self.pipe.transformer.set_adapter("default")
        for parameter in self.parameters(adapter).values():
            parameter.data = parameter.data.float()
        self.follow(adapter, 0.0)

    @torch.no_grad()
    def follow(self, adapter: str, decay: float) -> None:
        """Moves the copy towards the trained adapter: decay times itself plus the rest of the trained one."""
        own = self.parameters(adapter)
        for name, parameter in self.parameters().items():
            own[name.replace(".default.", f".{adapter}.")].lerp_(parameter, 1 - decay)

    @contextmanager
    def using(self, adapter: str) -> Iterator[None]:
        """Within it, that adapter is active instead of the trained one."""
        self.pipe.transformer.set_adapter(adapter)
        try:
            yield
        finally:
            self.pipe.transformer.set_adapter("default")

    def save_lora(self, folder: Path) -> Path:
        """Writes pytorch_lora_weights.safetensors, rank and alpha inside, as `pipe.load_lora_weights` takes it."""
        folder.mkdir(parents=True, exist_ok=True)
        transformer = self.pipe.transformer
        type(self.pipe).save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name="default"),
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )
        return folder / "pytorch_lora_weights.safetensors"

    def adapter_state(self, adapter: str = "default") -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.parameters(adapter).items()}

    def load_adapter_state(self, state: dict[str, Tensor], adapter: str = "default") -> None:
        own = self.parameters(adapter)
        if own.keys() != state.keys():
            raise ValueError("the checkpoint's adapter has other modules or another rank than the config asks for.")
        self._assign(state, adapter)

    @torch.no_grad()
    def _assign(self, state: dict[str, Tensor], adapter: str = "default") -> None:
        own = self.parameters(adapter)
        for name, value in state.items():
            own[name].copy_(value)

    # -- the pipeline's call ----------------------------------------------------------------------------------------

    def _encode_now(self, prompts: list[str]) -> list:
        def stop_there(*args: Any, **kwargs: Any) -> None:
            raise _Stop(output=list(self._encode_prompt(*args, **kwargs)))

        with torch.no_grad():
            return self._call(self._view, stop_there, prompt=prompts).output

    def _run(self, pipe: Any, conditioning: Conditioning, timesteps: Tensor | None, x: Tensor | None, **more: Any) -> Any:
        """Calls the pipeline with cached embeddings, at the asked timesteps or on its own schedule (None)."""
        self._probe.asked = None if timesteps is None else timesteps.to(self.device)
        calls = []

        def encode_prompt(*args: Any, **kwargs: Any) -> list:
            calls.append(args)
            if len(calls) > 1:
                raise ValueError(
                    f"{type(pipe).__name__} encodes a second prompt when called like this, which is not supported: leave out "
                    "negative_prompt and true_cfg_scale."
                )
            return conditioning.outputs

        if x is None:
            with torch.random.fork_rng(devices=[]):
                return self._call(pipe, encode_prompt, prompt=conditioning.prompts, **more)
        return self._call(pipe, encode_prompt, prompt=conditioning.prompts, latents=x.to(self.device), **more)

    def _call(self, pipe: Any, encode_prompt: Any, **kwargs: Any) -> Any:
        object.__setattr__(pipe, "encode_prompt", encode_prompt)
        call = {"num_inference_steps": 1, "output_type": "latent", **self.call, **kwargs}
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        try:
            with autocast:
                undecorated = inspect.unwrap(type(pipe).__call__)  # not under no_grad: gradients flow
                return undecorated(pipe, **call)
        except _Stop as stop:
            return stop


class _Stop(Exception):
    """Leaves the pipeline's call with what we came for: nothing after it runs."""

    def __init__(self, output: Any, sample: Tensor | None = None) -> None:
        self.output, self.sample = output, sample


class _Probe(FlowMatchEulerDiscreteScheduler):
    """The pipeline's scheduler with timesteps on demand and a `step` that stops the call."""

    asked: Tensor | None = None
    passes = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within it, a step changes nothing and the call goes on to its end."""
        self.passes = True
        try:
            yield
        finally:
            self.passes = False

    def scale_model_input(self, sample, timestep=None):
        return sample

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        # the pipelines look for these argument names
        if self.asked is None:
            super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        else:
            self.timesteps = self.asked

    def step(self, model_output, timestep, sample, **kwargs):
        if self.passes:
            return (sample,)
        raise _Stop(output=model_output, sample=sample)


class _NoDenoiser:
    """Stands in for the transformer while a state is only decoded."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self._transformer = transformer

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        return (torch.zeros_like(args[0] if args else kwargs["hidden_states"]),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)


def load_policy(
    path_or_name: str, device: str | None = None, dtype: str = "auto", lora: str | Path | None = None, **call: Any
) -> Policy:
    """A policy from a diffusers folder, a hub id or the name of a shipped model (`tiny`).

    Args:
        device: torch device; the accelerator if there is one, else the CPU.
        dtype: of the base weights and of autocast: fp32, bf16, fp16, or auto, which is bf16 where the device computes in
            it and fp32 elsewhere. A LoRA is float32 in any case.
        lora: a saved LoRA to put on.
        call: arguments of every pipeline call (height, width, max_sequence_length ...); guidance_scale is 1, off, if not given.

    Raises:
        ValueError: there is no such model, or it is not a flow.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}; choose one of auto, {', '.join(DTYPES)}.")
    source = hub.locate(path_or_name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device} can't be used here: {_first_line(error)}") from error
    weights = fast_dtype(device) if dtype == "auto" else DTYPES[dtype]
    try:
        pipe = DiffusionPipeline.from_pretrained(source, torch_dtype=weights).to(device)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the model {path_or_name} could not be loaded: {_first_line(error)}") from error
    policy = Policy(pipe, weights, **call)
    if lora is not None:
        policy.load_lora(lora)
    return policy


def fast_dtype(device: str) -> torch.dtype:
    """bf16 where the device has instructions for it, else fp32: a CPU without them is a hundred times slower in bf16."""
    kind = torch.device(device).type
    if kind == "cpu":
        native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    else:
        native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def quiet_libraries() -> None:
    """Other libraries' warnings, log lines and progress bars stay out of the output."""
    warnings.filterwarnings("ignore")
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    for name in ("huggingface_hub", "peft", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
