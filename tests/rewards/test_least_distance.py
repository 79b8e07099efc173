"""The distance of images of a group, against numpy and on images with a known answer."""

import numpy as np
import torch

from flow_grpo import rewards
from flow_grpo.rewards.clip import least_distance


def test_it_is_the_least_cosine_distance_to_another():
    features = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = features.numpy() / np.linalg.norm(features.numpy(), axis=1, keepdims=True)
    expected = [min(1 - unit[i] @ unit[j] for j in range(5) if j != i) for i in range(5)]
    np.testing.assert_allclose(least_distance(features), expected, rtol=1e-12)


def test_an_image_that_is_there_twice_has_none_and_an_odd_one_the_most():
    reward = rewards.load("least_distance")
    red, blue = torch.zeros(3, 32, 80), torch.zeros(3, 32, 80)
    red[0], blue[2] = 1, 1
    found = rewards.score("least_distance", reward, torch.stack([red, blue, red]), ["a sign"] * 3)
    assert found[0] == found[2]
    assert abs(found[0]) < 1e-5
    assert found[1] > 0.1
