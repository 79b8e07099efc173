"""A reward learned from votes: a linear head on open_clip features, fitted to which of two images people preferred.

fit(load_votes("votes.jsonl"), "my_head", model="ViT-L-14", pretrained="openai")  # flow_grpo.data.votes.load_votes
rewards.load("preference_head", weights="my_head")
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.errors import FlowGRPOError
from flow_grpo.files import MAX_JSON, regular_bytes, seal_safetensors
from flow_grpo.rewards.clip import TINY, OpenCLIP
from flow_grpo.rewards.images import Images, Vote, in_batches, read_image
from flow_grpo.rewards.networks import AUTO, check_keys, load_tensors

FILES = WEIGHTS, SETTINGS = "head.safetensors", "head.json"  # of a head


@dataclass
class Fit:
    """Settings and accuracy of a fit; accuracy is the share of votes whose better image scores higher."""

    model: str
    pretrained: str | None
    weight_decay: float
    seed: int
    votes: int
    held_out_votes: int
    accuracy: float
    held_out_accuracy: float | None  # None if nothing was held out


class PreferenceHead(torch.nn.Module):
    """The score w . phi of a head that `fit` trained on votes, phi the features of image and prompt (see `features`).

    Range: unbounded; a difference of d means odds of exp(d) : 1 that people prefer the higher one. Weights: the folder that `fit` wrote
    (your own, some KB) and the open_clip model it was fitted on. Memory: that of the model. Gamed as clip is, and
    by images unlike those that were voted on: watch a held-out reward, and collect new votes.
    """

    differentiable = True

    def __init__(self, weights: str, device: str = AUTO, batch_size: int = 64) -> None:
        super().__init__()
        folder = Path(weights)
        state = load_tensors("preference_head", folder / WEIGHTS)
        check_keys("preference_head", weights, missing={"weight"} - state.keys())
        try:
            fitted = Fit(**json.loads(regular_bytes(folder / SETTINGS, MAX_JSON)))
        except (OSError, ValueError, TypeError) as error:
            raise FlowGRPOError(
                f"preference_head: {folder / SETTINGS} is not what fit wrote ({error}); fit it again."
            ) from error
        self.embed = OpenCLIP("preference_head", fitted.model, fitted.pretrained, device)
        self.weight = torch.nn.Parameter(state["weight"].to(self.embed.device), requires_grad=False)
        self.batch_size = batch_size

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        return in_batches(self._score, images, prompts, self.batch_size)

    def _score(self, images: Images, prompts: list[str]) -> Tensor:
        return features(self.embed, images, prompts) @ self.weight


def features(embed: OpenCLIP, images: Images, prompts: list[str]) -> Tensor:
    """phi (B, 2 E): the image's unit embedding v, and v * t with the prompt's t, scaled to the same size.

    The first part does not depend on the prompt; in the second, equal weights give CLIP's cosine.
    """
    v, t = embed.encode_images(images), embed.encode_prompts(prompts)
    return torch.cat([v, v * t * v.shape[1] ** 0.5], 1)


def fit(
    votes: Sequence[Vote],
    output: str | Path,
    model: str = TINY,
    pretrained: str | None = None,
    weight_decay: float = 1e-3,
    held_out: float = 0.2,
    seed: int = 0,
    device: str = "cpu",
) -> Fit:
    """Fit a head to votes and write head.safetensors and head.json to the folder `output`.

    The votes of a share `held_out` of the prompts, chosen by the seed, are not fitted. The split is by prompt because votes on one
    prompt share images, and a split by votes would overestimate the held-out accuracy.

    Raises:
        FlowGRPOError: an image can't be read, or a setting is out of range.
    """
    if weight_decay <= 0:
        raise FlowGRPOError(
            "preference_head: set weight_decay above 0; without it the weights of separable votes grow without bound."
        )
    embed = OpenCLIP("preference_head", model, pretrained, device)
    difference = _differences(embed, votes)  # (N, 2 E)
    test = _held_out([vote.prompt for vote in votes], held_out, seed)
    weight = bradley_terry(difference[~test], weight_decay)
    right = (difference @ weight > 0).double()
    result = Fit(
        model=model,
        pretrained=pretrained,
        weight_decay=weight_decay,
        seed=seed,
        votes=len(votes),
        held_out_votes=int(test.sum()),
        accuracy=right[~test].mean().item(),
        held_out_accuracy=right[test].mean().item() if test.any() else None,
    )
    Path(output).mkdir(parents=True, exist_ok=True)
    save_file({"weight": weight.float()}, Path(output) / WEIGHTS)
    seal_safetensors(Path(output) / WEIGHTS)
    (Path(output) / SETTINGS).write_text(json.dumps(asdict(result), indent=2) + "\n")
    return result


def bradley_terry(difference: Tensor, weight_decay: float) -> Tensor:
    """The w (D,) that minimises mean(-log sigmoid(w . d)) + weight_decay / 2 |w|^2 over the rows d of difference (N, D).

    d = phi(better) - phi(worse): the model of Bradley and Terry 1952 (10.2307/2334029) with linear scores, and the loss of
    reward models since arXiv 1706.03741. It is strictly convex, so the result does not depend on the initial value, and
    L-BFGS finds it up to rounding.
    """
    weight = torch.zeros(difference.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight], max_iter=1000, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -F.logsigmoid(difference @ weight).mean() + weight_decay / 2 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach()


@torch.no_grad()
def _differences(embed: OpenCLIP, votes: Sequence[Vote]) -> Tensor:
    """phi(better) - phi(worse) of every vote (N, 2 E), float64 on the CPU."""
    rows = []
    for i in range(0, len(votes), 32):
        chunk = votes[i : i + 32]
        prompts = [vote.prompt for vote in chunk]
        better = features(embed, [read_image(vote.better) for vote in chunk], prompts)
        rows.append(better - features(embed, [read_image(vote.worse) for vote in chunk], prompts))
    return torch.cat(rows).double().cpu()


def _held_out(prompts: list[str], share: float, seed: int) -> Tensor:
    """A mask of the held-out votes (N,): those of a share of the distinct prompts, at least one prompt on each side."""
    if not 0 <= share < 1:
        raise FlowGRPOError(f"preference_head: held_out={share} must be a share in [0, 1).")
    names = list(dict.fromkeys(prompts))
    if share > 0 and len(names) == 1:
        raise FlowGRPOError("preference_head: all votes are for one prompt, so none can be held out; set held_out=0.")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share > 0 else 0
    chosen = {names[i] for i in order[:count]}
    return torch.tensor([prompt in chosen for prompt in prompts])
