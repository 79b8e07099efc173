"""One stage of an embedded model's recipe: an optimizer with a moving average and exact resume."""

import copy
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flow_grpo.files import atomic_file

EVALUATE_EVERY = 800
SAVE_EVERY = 100

logger = logging.getLogger(__name__)


def begin(work: Path, seed: int) -> None:
    """Make the folder of a recipe's checkpoints, and seed the weights. SystemExit if this torch has no Muon."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(f"the recipe needs torch.optim.Muon, that is torch 2.9 or newer; this is {torch.__version__}.")
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class StagePlan:
    """How long a stage is and how fast it learns.

    Attributes:
        number: names its random numbers.
        lr: peak learning rate of AdamW.
        muon_lr: that of Muon, which then has the matrices.
        horizon: steps of the cosine, where it is not the stage's; a longer stage begins it again (arXiv 1608.03983).
    """

    number: int
    steps: int
    lr: float
    muon_lr: float | None = None
    horizon: int | None = None


class PretrainingStage:
    """Optimizes the named parts of an object by a loss of the step's own random generator, with EMA and exact resume."""

    def __init__(self, name: str, plan: StagePlan, model: Any, parts: list[str], *, folder: Path, seed: int) -> None:
        self.name, self.plan, self.parts, self.seed = name, plan, parts, seed
        self.model, self.ema = model, copy.deepcopy(model)
        self.file = folder / f"{name}.pt"
        self.step, self.seconds = 0, 0.0
        self.parameters = [p for part in parts for p in getattr(model, part).parameters()]
        modules = [m for part in parts for n, m in getattr(model, part).named_modules() if n != "proj_out"]
        matrices = [m.weight for m in modules if isinstance(m, torch.nn.Linear)] if plan.muon_lr else []
        matrices += [m.in_proj_weight for m in modules if isinstance(m, torch.nn.MultiheadAttention)] if matrices else []
        matrix_ids = {id(p) for p in matrices}
        rest = [p for p in self.parameters if id(p) not in matrix_ids]
        adamw = torch.optim.AdamW(rest, plan.lr, (0.9, 0.99), weight_decay=0.01)
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [(adamw, plan.lr)]
        if plan.muon_lr:
            # Orthogonal updates (Muon) also move along the weak directions of the gradient, such as which letter comes
            # where: AdamW spent 1,200 steps before it began to look at the caption's letters.
            muon = torch.optim.Muon(matrices, plan.muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
            self.optimizers.append((muon, plan.muon_lr))
        if self.file.exists():
            self._load()

    def run(self, loss: Callable[[np.random.Generator, int], torch.Tensor], evaluate: Callable[[], dict]) -> None:
        """Train to the stage's last step; `evaluate` reads `self.ema`."""
        total, horizon = self.plan.steps, self.plan.horizon or self.plan.steps
        while self.step < total:
            started = time.monotonic()
            # (seed, stage, step) names the batch and its noise, whatever was run before
            stream = [self.seed, self.plan.number, self.step]
            rng = np.random.default_rng(stream)
            torch.manual_seed(int(rng.integers(2**62)))
            factor = min(1.0, (self.step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * (self.step % horizon) / horizon))
            value = loss(rng, self.step)
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            for optimizer, peak in self.optimizers:
                optimizer.param_groups[0]["lr"] = peak * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self._update_ema()
            self.step += 1
            self.seconds += time.monotonic() - started
            if self.step % 50 == 0:
                self._log({"loss": round(value.item(), 5)})
            if self.step % EVALUATE_EVERY == 0 or self.step == total:
                self._log(evaluate())
            if self.step % SAVE_EVERY == 0 or self.step == total:
                self._save()

    @torch.no_grad()
    def _update_ema(self) -> None:
        decay = min(0.995, (1 + self.step) / (10 + self.step))
        for part in self.parts:
            pairs = zip(getattr(self.ema, part).parameters(), getattr(self.model, part).parameters(), strict=True)
            for averaged, current in pairs:
                averaged.lerp_(current, 1 - decay)

    def _log(self, values: dict) -> None:
        row = {"stage": self.name, "step": self.step, "seconds": round(self.seconds, 1), **values}
        logger.info(json.dumps(row))
        with (self.file.parent / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")

    def _save(self) -> None:
        state = {"step": self.step, "seconds": self.seconds, "optimizers": [o.state_dict() for o, _ in self.optimizers]}
        for part in self.parts:
            state[part] = getattr(self.model, part).state_dict()
            state[f"{part}_ema"] = getattr(self.ema, part).state_dict()
        with atomic_file(self.file) as partial:
            torch.save(state, partial)

    def _load(self) -> None:
        state = torch.load(self.file, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for part in self.parts:
            getattr(self.model, part).load_state_dict(state[part])
            getattr(self.ema, part).load_state_dict(state[f"{part}_ema"])
