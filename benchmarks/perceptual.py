"""LPIPS, a learned distance that no one here trained, on edits of the embedded model of shapes and as diversity of a group.

    python -m venv /envs/lpips
    /envs/lpips/bin/pip install stlpips-pytorch torchvision torchsummary ipython safetensors pillow fastapi uvicorn
    python benchmarks/perceptual.py /envs/lpips/bin/python [RUN of tiny_edit]

LPIPS runs in that environment, as a reward with `isolate` (lpips_reward.py); neither environment needs the other's packages. Printed are:
its row in the table of edit_rewards.py; its mean distance of image and source outside the masks, before training and with the run's
LoRA; and how it orders the prompts by the diversity of their images, beside the root mean square difference that a run reports.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from edit_rewards import Edits, held_out_edits, row_of
from scipy.stats import spearmanr

from flow_grpo import rewards
from flow_grpo.evaluation.image_metrics import rms_difference
from flow_grpo.rewards import Reward, score
from flow_grpo.rewards.images import to_pil

IMAGES = 4  # of each prompt
REWARD = Path(__file__).parent / "lpips_reward.py"


def diversities(edits: Edits, lpips: Reward) -> tuple[torch.Tensor, torch.Tensor]:
    """(P,) twice: the mean over the pairs of a prompt's images of their LPIPS, and of their root mean square difference."""
    of_prompt = edits.images.unflatten(0, (-1, IMAGES))
    prompts = edits.prompts[::IMAGES]
    pairs = [(of_prompt[:, a], of_prompt[:, b]) for a, b in itertools.combinations(range(IMAGES), 2)]
    learned = torch.stack(
        [-score("LPIPS", lpips, first, prompts, sources=[[image] for image in to_pil(second)]) for first, second in pairs]
    )
    return learned.mean(0), torch.stack([rms_difference(*pair) for pair in pairs]).mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the interpreter of the environment with stlpips-pytorch")
    parser.add_argument("run", nargs="?", type=Path)
    given = parser.parse_args()
    lpips = rewards.load(f"{REWARD}:kept", isolate=True, python=given.python)
    with tempfile.TemporaryDirectory() as folder:
        for lora in [None, given.run] if given.run else [None]:
            edits = held_out_edits(folder, IMAGES, lora)
            distance = -score("LPIPS", lpips, edits.images, edits.prompts, sources=edits.sources, mask=edits.masks)
            learned, plain = diversities(edits, lpips)
            print(
                f"\n{'before training' if lora is None else lora}: {len(edits.kept)} edits, {int(edits.kept.sum())} kept the rest"
            )
            print(row_of("LPIPS", lpips, edits))
            print(f"distance to the source outside the masks: {distance.mean():.4f}")
            print(
                f"of edits that kept the rest {distance[edits.kept].mean():.4f}, of the others {distance[~edits.kept].mean():.4f}"
            )
            print(f"diversity: LPIPS {learned.mean():.4f}, root mean square {plain.mean():.4f}")
            print(f"Spearman's correlation of the two over {len(plain)} prompts: {spearmanr(learned, plain).statistic:.3f}")


if __name__ == "__main__":
    main()
