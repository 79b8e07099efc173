"""Rewards of videos: which frames a reward sees, and what its value is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo import rewards
from flow_grpo.evaluation.image_metrics import diversity, high_frequency_power, rms_difference
from flow_grpo.rewards.scopes import evenly_spaced, frame_indices, frames_of

VIDEOS = torch.rand(4, 9, 3, 8, 12, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "a", "b", "b"]


def brightness(images, prompts):
    assert images.ndim == 4
    return images.mean((1, 2, 3))


def value(reward, videos=VIDEOS, prompts=PROMPTS, **metadata):
    return rewards.score("mine", reward, videos, prompts, **metadata)


@given(number=st.integers(1, 50), count=st.integers(1, 50))
def test_evenly_spaced_frames_are_in_order_with_the_first_and_the_last(number, count):
    places = evenly_spaced(number, count)
    assert places == sorted(set(places))
    assert len(places) == min(number, count)
    assert 0 <= places[0] <= places[-1] < count
    if number > 1 < count:
        assert (places[0], places[-1]) == (0, count - 1)


def test_a_single_frame_is_the_one_in_the_middle():
    assert [frame_indices(1, count) for count in (1, 2, 9)] == [[0], [0], [4]]
    assert frame_indices("first", 9) == [0]
    assert frame_indices("last", 9) == [8]


@pytest.mark.parametrize(
    ("frames", "places"), [(None, [0, 3, 5, 8]), (2, [0, 8]), (1, [4]), ("first", [0]), ("last", [8]), (99, list(range(9)))]
)
def test_a_rewards_value_of_a_video_is_its_mean_over_the_frames(frames, places):
    def seen(images, prompts):
        return brightness(images, prompts)

    if frames is not None:
        seen.frames = frames
    expected = torch.stack([brightness(VIDEOS[:, i], PROMPTS) for i in places]).mean(0)
    assert torch.equal(value(seen), expected)


def test_a_reward_of_whole_videos_is_called_once_with_all_frames():
    shapes = []

    def whole(videos, prompts):
        shapes.append(tuple(videos.shape))
        return videos.flatten(1).amax(1)

    whole.frames = "all"
    assert torch.equal(value(whole), VIDEOS.flatten(1).amax(1))
    assert shapes == [(4, 9, 3, 8, 12)]
    with pytest.raises(ValueError, match="reward mine sees whole videos"):
        value(whole, VIDEOS[:, 0])


def test_pil_images_of_a_whole_video_are_a_list_for_each():
    @rewards.takes_pil
    def frame_count(videos, prompts):
        return [len(video) + video[0].width / 100 for video in videos]

    frame_count.frames = "all"
    assert value(frame_count).tolist() == pytest.approx([9.12] * 4)


def test_a_pair_reward_compares_videos_frame_by_frame():
    def brighter(first, second, prompts):
        return (brightness(first, prompts) > brightness(second, prompts)).float()

    brighter.scope = "pair"
    places = frame_indices(4, 9)
    wins = torch.stack([brighter(VIDEOS[[0, 2], i], VIDEOS[[1, 3], i], PROMPTS) for i in places]).mean(0)
    assert torch.allclose(value(brighter), torch.stack([wins, 1 - wins], 1).flatten())


def test_sources_and_metadata_belong_to_the_video_in_each_frame():
    def offset(images, prompts, answer):
        return brightness(images, prompts) + torch.tensor(answer, dtype=torch.float32)

    assert torch.allclose(value(offset, answer=[0, 1, 2, 3]) - value(brightness), torch.arange(4.0))


def test_frames_are_set_from_outside_for_any_reward(tmp_path):
    (tmp_path / "mine.py").write_text("def bright(images, prompts):\n    return images.mean((1, 2, 3))\n")
    name = f"{tmp_path}/mine.py:bright"
    for frames, place in (("first", 0), ("last", 8), (1, 4)):
        assert torch.equal(value(rewards.load(name, frames=frames)), brightness(VIDEOS[:, place], PROMPTS))
    assert frames_of(rewards.load(name)) == 4, "what one load set, the next does not have"


@pytest.mark.parametrize("name", ["human", "judge"])
def test_who_is_asked_is_asked_once_for_a_video(name):
    assert frames_of(rewards.locate("reward", name, rewards.REGISTRY)) == 1


@pytest.mark.parametrize("frames", [0, -1, "middle", 1.5, True])
def test_other_frames_are_refused(frames):
    with pytest.raises(ValueError, match=f"frames={frames} of a reward is neither a number"):
        rewards.load("jpeg_size", frames=frames)


def test_frames_that_are_none_are_refused_with_the_name_of_their_reward():
    def mine(images, prompts):
        return images.mean((1, 2, 3))

    mine.frames = "middle"
    with pytest.raises(ValueError, match="frames=middle of the reward mine is neither a number"):
        rewards.score("mine", mine, torch.zeros(1, 2, 3, 4, 4), ["a"])


@pytest.mark.parametrize("where", [{"remote": "http://127.0.0.1:9"}, {"isolate": True}])
def test_a_reward_that_runs_elsewhere_is_sent_no_videos(where):
    with pytest.raises(ValueError, match="frames=all is for a reward in this process"):
        rewards.load("jpeg_size", frames="all", **where)


def test_motion_is_the_rms_difference_of_neighbouring_frames():
    motion = rewards.load("motion")
    still = VIDEOS[:, :1].expand_as(VIDEOS)
    assert value(motion, still).tolist() == [0, 0, 0, 0]
    blinking = torch.tensor([0.25, 0.75] * 4).view(1, 8, 1, 1, 1).expand(2, 8, 3, 8, 12)
    assert torch.allclose(value(motion, blinking, ["a", "b"]), torch.tensor([0.5, 0.5]))
    assert value(motion, VIDEOS[:, :1]).tolist() == [0, 0, 0, 0]


def test_a_still_video_is_measured_as_its_image():
    still = VIDEOS[:, :1].expand(4, 5, 3, 8, 12)
    image = VIDEOS[:, 0]
    assert torch.allclose(high_frequency_power(still), high_frequency_power(image))
    assert torch.allclose(rms_difference(still, still.flip(0)), rms_difference(image, image.flip(0)))
    assert torch.allclose(diversity(still, PROMPTS), diversity(image, PROMPTS))
