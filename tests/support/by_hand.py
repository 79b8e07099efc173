"""AdamW and the losses of an update, written down once more in float64: what the tests compare the package's own with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class AdamW:
    """Decoupled weight decay, arXiv 1711.05101, on a gradient that is clipped to a norm first."""

    def __init__(
        self, weights: Sequence[Tensor], betas: tuple[float, float], eps: float, decay: float, max_norm: float
    ) -> None:
        self.weights = [w.detach().double().clone() for w in weights]
        self.first, self.second = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))
        self.betas, self.eps, self.decay, self.max_norm, self.count = betas, eps, decay, max_norm, 0

    def step(self, gradients: Sequence[Tensor], lr: float) -> float:
        """Returns the norm before clipping."""
        self.count += 1
        g = [gradient.detach().double() for gradient in gradients]
        norm = math.sqrt(sum(float(one.square().sum()) for one in g))
        g = [one * min(1.0, self.max_norm / norm) for one in g]
        (a, b), n = self.betas, self.count
        for i, one in enumerate(g):
            self.first[i] = a * self.first[i] + (1 - a) * one
            self.second[i] = b * self.second[i] + (1 - b) * one**2
            direction = self.first[i] / (1 - a**n) / ((self.second[i] / (1 - b**n)).sqrt() + self.eps)
            self.weights[i] = self.weights[i] * (1 - lr * self.decay) - lr * direction
        return norm
