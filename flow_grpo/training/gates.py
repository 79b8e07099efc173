"""Gates: which images an anchor holds, and how much. Each is a factor (n,) of the anchor's weight."""

import torch
from jaxtyping import Float
from torch import Tensor

INITIAL_SHARE, SHARE_RANGE, SHARE_CHANGE, NUM_MEANS = 0.1, (0.02, 0.2), 0.1, 20  # GARDO's published code


def advantage_gate(advantage: Float[Tensor, " n"], weight: float, advantage_max: float = 5.0) -> Float[Tensor, " n"]:
    """CRD, arXiv 2603.14128: `m + A^ (1 - m)` with `A^ = clip(A / advantage_max, -1, 1) / 2 + 1/2` and `m = 1e-4 / weight`, at most 1.

    An anchor holds the images more that the update pulls the policy to; the weight of the worst ones is 1e-4. Published with 5.
    """
    m = min(1.0, 1e-4 / weight)
    goodness = (advantage / advantage_max).clamp(-1, 1) / 2 + 0.5
    return m + goodness * (1 - m)


def disagreement(reward: Float[Tensor, " n"], others: Float[Tensor, "n R"]) -> Float[Tensor, " n"]:
    """GARDO, arXiv 2512.24138: the rank of the trained reward among n images less the mean rank of R others, as shares of n.

    Ties share their mean rank. Of the others, NaN is left out; an image without any has 0.

    The published code ranks the best image as the first, so that its difference is large where the trained reward is *lower* than
    the others say. Here as in the paper's text it is large where the trained reward alone is high, which is what hacking looks like.
    """
    difference = (_ranks(reward)[:, None] - torch.stack([_ranks(column) for column in others.unbind(1)], 1)) / len(reward)
    return difference.nanmean(1).nan_to_num(0.0)


class DisagreementGate:
    """The images whose reward the others contradict most: a share of those with a disagreement of 0 or above.

    The share begins at 0.1. It grows by a tenth in a step whose mean disagreement is above those of all the last 20 steps, and
    shrinks by a tenth in one below all of them, within 0.02 and 0.2: numbers and rule of GARDO's published code.

    Attributes:
        share: of the next step.
        means: mean disagreements of the last steps.
    """

    def __init__(self) -> None:
        self.share, self.means = INITIAL_SHARE, list[float]()

    def weights(self, reward: Float[Tensor, " n"], others: Float[Tensor, "n R"]) -> Float[Tensor, " n"]:
        """The gate of the step's images: n / (number of images held) for those, 0 for the others, so that a KL is their mean.

        As published, images above a quantile are held; with few images or equal rewards there may be none.
        """
        difference = disagreement(reward, others)
        above = difference[difference >= 0]
        if not len(above):
            return torch.zeros_like(difference)
        self._adapt(above.mean().item())
        held = (difference > above.quantile(1 - self.share)).to(difference)
        return held * (len(held) / held.sum().clamp_min(1))

    def _adapt(self, mean: float) -> None:
        if self.means and mean > max(self.means):
            self.share *= 1 + SHARE_CHANGE
        elif self.means and mean < min(self.means):
            self.share *= 1 - SHARE_CHANGE
        self.share = min(max(self.share, SHARE_RANGE[0]), SHARE_RANGE[1])
        self.means = [*self.means, mean][-NUM_MEANS:]

    def state_dict(self) -> dict[str, float | list[float]]:
        """The share and the means of the last steps, for a checkpoint."""
        return {"share": self.share, "means": list(self.means)}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.share, self.means = state["share"], list(state["means"])


def _ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Ranks from 1, the lowest, ties sharing their mean; NaN for NaN."""
    below, equal = (values[:, None] > values[None]).sum(1), (values[:, None] == values[None]).sum(1)
    return (below + (equal + 1) / 2).where(~values.isnan(), torch.nan)
