"""BRISQUE as a reward of its own environment: see image_quality.py. It imports nothing of this package."""

import numpy as np
from brisque import BRISQUE

network = BRISQUE()


def sharp(images, prompts):
    """Minus BRISQUE (Mittal et al. 2012), about 0 to 100 before the sign, of images (B, 3, H, W) in [0, 1]. Returns a list of B."""
    pixels = (images.float().cpu().permute(0, 2, 3, 1) * 255).round().byte().numpy()
    return [-float(network.score(np.ascontiguousarray(image))) for image in pixels]
