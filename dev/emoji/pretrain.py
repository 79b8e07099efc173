"""Pretrain a small Sana pipeline of emoji on one core by the clock: the VAE, then transformer and text encoder.

A second call continues.

OMP_NUM_THREADS=1 python pretrain.py FOLDER     (100 minutes)
"""

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import architecture
import numpy as np
import torch
import torch.nn.functional as F
from pictures import STYLES, caption
from torch import Tensor

MINUTES = {"vae": 26, "flow": 74}
VAE_IMAGES, VAE_NOISE = 20, 0.12  # noise in the latents keeps apart what differs, as in the world of shapes
IMAGES = 128
NO_CAPTION, A_TAG = 0.1, 0.2
SHIFT = 2.0
SAVE_EVERY = 300  # seconds


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of AdamW's size (as torch.optim.Muon, which takes no 1 x 1 convolutions)."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 0.05)
        x = parameter.grad.lerp(momentum, 0.95).flatten(1)
        is_wide = x.shape[0] <= x.shape[1]
        x = (x if is_wide else x.T).bfloat16()
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        update = (x if is_wide else x.T).float()
        parameter.mul_(1 - lr * 0.01)
        parameter.add_(update.reshape(parameter.shape), alpha=-lr * 0.2 * max(update.shape) ** 0.5)


class Stage:
    """Trains modules for some minutes of the process's time, with a moving average, a cosine over that time, and resume."""

    def __init__(
        self, name: str, modules: dict, optimizers: list[torch.optim.Optimizer], decay: float, folder: Path
    ) -> None:
        self.name, self.modules, self.optimizers, self.decay = name, modules, optimizers, decay
        self.ema = {key: copy.deepcopy(module).eval().requires_grad_(False) for key, module in modules.items()}
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        self.seconds, self.step, self.file = 0.0, 0, folder / f"{name}.pt"
        if self.file.exists():
            self._load()

    def run(self, loss: Callable[[np.random.Generator], Tensor]) -> None:
        budget, saved = 60 * MINUTES[self.name], self.seconds
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        while self.seconds < budget:
            started = time.process_time()
            rng = np.random.default_rng([7, len(self.name), self.step])
            torch.manual_seed(int(rng.integers(2**62)))
            value = loss(rng)
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            cosine = 0.5 + 0.5 * math.cos(math.pi * self.seconds / budget)
            factor = min(1.0, (self.step + 1) / 100) * (0.02 + 0.98 * cosine)
            for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self._average()
            self.step += 1
            self.seconds += time.process_time() - started
            if self.step % 50 == 0:
                print(
                    json.dumps({"stage": self.name, "step": self.step, "minutes": self.seconds / 60, "loss": value.item()}),
                    flush=True,
                )
            if self.seconds - saved > SAVE_EVERY or self.seconds >= budget:
                self._save()
                saved = self.seconds

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        for key, module in self.modules.items():
            torch._foreach_lerp_(list(self.ema[key].parameters()), list(module.parameters()), 1 - decay)

    def _save(self) -> None:
        state = {"seconds": self.seconds, "step": self.step, "optimizers": [o.state_dict() for o in self.optimizers]}
        for key, module in self.modules.items():
            state[key], state[f"{key}_ema"] = module.state_dict(), self.ema[key].state_dict()
        partial = self.file.with_suffix(".part")
        torch.save(state, partial)
        partial.rename(self.file)

    def _load(self) -> None:
        state = torch.load(self.file)
        self.seconds, self.step = state["seconds"], state["step"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for key, module in self.modules.items():
            module.load_state_dict(state[key])
            self.ema[key].load_state_dict(state[f"{key}_ema"])


def tensor(images: np.ndarray) -> Tensor:
    """(N, H, W, 3) bytes as (N, 3, H, W) in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(moved: np.ndarray, folder: Path) -> torch.nn.Module:
    """By the errors of pixels and of their differences. Latents are pulled to mean 0 and variance 1 in each channel."""
    vae = architecture.vae().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), 2e-3, (0.9, 0.99), weight_decay=0.01)
    stage = Stage("vae", {"vae": vae}, [optimizer], 0.995, folder)
    images = moved.reshape(-1, *moved.shape[-3:])

    def loss(rng: np.random.Generator) -> Tensor:
        x = tensor(images[rng.integers(0, len(images), VAE_IMAGES)]).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            z = vae.encode(x).latent.float()
            noise = VAE_NOISE * torch.rand(len(x), 1, 1, 1) * torch.randn_like(z)
            rebuilt = vae.decode(z + noise).sample.float()
        unit = z.mean((0, 2, 3)).square().mean() + (z.std((0, 2, 3)) - 1).square().mean()
        error = rebuilt - x
        slopes = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        return error.abs().mean() + error.square().mean() + 0.5 * slopes + 0.02 * unit

    stage.run(loss)
    return stage.ema["vae"]


def train_flow(vae: torch.nn.Module, moved: np.ndarray, folder: Path) -> None:
    """Flow matching (arXiv 2210.02747) at logit-normal noise levels, with captions that are sometimes empty, for guidance."""
    images = moved.reshape(-1, *moved.shape[-3:])
    with torch.no_grad():
        latents = torch.cat([vae.encode(tensor(images[start : start + 128])).latent for start in range(0, len(images), 128)])
    (folder / "std.json").write_text(json.dumps(float(latents.std())))
    latents = (latents / latents.std()).unflatten(0, moved.shape[:3])
    names, tokenizer = json.loads((folder / "names.json").read_text()), architecture.tokenizer(folder / "names.json")
    parts = {"transformer": architecture.transformer(), "text": architecture.text_encoder(len(tokenizer))}
    stage = Stage("flow", parts, optimizers(parts), 0.998, folder)

    def described(name: int, style: int, rng: np.random.Generator) -> str:
        if rng.random() < NO_CAPTION:
            return ""
        word, tags = names[name]
        has_tag = tags and rng.random() < A_TAG
        return caption(word, style, tags[rng.integers(min(architecture.TAGS, len(tags)))] if has_tag else "")

    def loss(rng: np.random.Generator) -> Tensor:
        chosen = [rng.integers(0, count, IMAGES) for count in latents.shape[:3]]
        x0 = latents[chosen[0], chosen[1], chosen[2]]
        captions = [described(name, style, rng) for name, style in zip(*chosen[:2], strict=True)]
        u = torch.sigmoid(1.2 * torch.randn(IMAGES))
        sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
        noise, level = torch.randn_like(x0), sigma.view(-1, 1, 1, 1)
        return F.mse_loss(velocity(parts, tokenizer, captions, (1 - level) * x0 + level * noise, sigma), noise - x0)

    stage.run(loss)


def optimizers(parts: dict) -> list[torch.optim.Optimizer]:
    """Muon for matrices and 1 x 1 convolutions, AdamW for the rest."""
    modules = [(name, module) for part in parts.values() for name, module in part.named_modules()]
    linear = [
        m.weight
        for name, m in modules
        if isinstance(m, torch.nn.Linear) and "proj_out" not in name and "time_embed" not in name
    ]
    matrices = linear + [m.weight for _, m in modules if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (1, 1)]
    of_muon = {id(weight) for weight in matrices}
    rest = [weight for part in parts.values() for weight in part.parameters() if id(weight) not in of_muon]
    return [torch.optim.AdamW(rest, 1e-3, (0.9, 0.99), weight_decay=0.0), Muon(matrices, 3e-3)]


def velocity(parts: dict, tokenizer, captions: list[str], x: Tensor, sigma: Tensor) -> Tensor:
    """The velocity (B, 8, 8, 8) of latents at noise levels (B,)."""
    tokens = tokenizer(captions, padding=True, truncation=True, max_length=architecture.LENGTH, return_tensors="pt")
    mask = tokens.attention_mask.float()
    with torch.autocast("cpu", torch.bfloat16):
        text = parts["text"](input_ids=tokens.input_ids, attention_mask=mask)[0]
        given = {"encoder_hidden_states": text, "encoder_attention_mask": mask, "timestep": 1000 * sigma}
        return parts["transformer"](x, **given, return_dict=False)[0].float()


def main(folder: Path) -> None:
    torch.manual_seed(0)
    moved = np.load(folder / "pictures.npz")["moved"]
    assert moved.shape[1] == len(STYLES)
    train_flow(train_vae(moved, folder), moved, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
