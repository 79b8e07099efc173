"""GenEval's rules on detections made by hand, and its models from checkpoints in the real format, made here."""

import json

import pytest
import torch
from support.reward_inputs import scored_unchanged
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor, SwinConfig

from flow_grpo import rewards
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.rewards.geneval import (
    CLASSES,
    COLORS,
    MAX_DETECTIONS,
    ColorNames,
    Detection,
    Detector,
    GenEval,
    confident,
    crop,
    instances,
    partial_score,
    published_score,
    relation,
    strict_score,
)

EMPTY = torch.zeros(1, 1, dtype=torch.bool)


def at(x: float, y: float, name: str = "cat", score: float = 0.99, size: float = 10) -> Detection:
    """A thing with its centre at (x, y)."""
    return Detection(name, score, (x - size / 2, y - size / 2, x + size / 2, y + size / 2), EMPTY)


def things(*detections: Detection) -> dict:
    return confident(list(detections), 0.3)


def red(detections, name):
    return ["red"] * len(detections)


def scores(objects: dict, include: list, exclude: list = (), colors=red) -> list[float]:
    return [rule(objects, include, list(exclude), colors) for rule in (published_score, strict_score, partial_score)]


def test_a_thing_that_is_there():
    ask = [{"class": "cat", "count": 1}]
    assert scores(things(at(0, 0)), ask) == [1, 1, 1]
    assert scores(things(at(0, 0, "dog")), ask) == [0, 0, 0]
    assert scores(things(at(0, 0), at(50, 0)), ask) == [1, 0, 0], "a second cat is allowed by the published rule alone"
    assert scores(things(*(at(50 * i, 0) for i in range(4))), ask) == [1, 0, -2], "the partial score has no lower bound"


def test_two_things():
    ask = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1}]
    assert scores(things(at(0, 0), at(9, 0, "dog")), ask) == [1, 1, 1]
    assert scores(things(at(0, 0)), ask) == [0, 0, 0.5]


def test_counting_has_a_threshold_of_its_own_and_forbids_one_more():
    ask, exclude = [{"class": "cat", "count": 3}], [{"class": "cat", "count": 4}]
    sure, unsure = [at(i, 0) for i in range(3)], at(9, 0, score=0.5)
    for threshold, expected in ((0.9, [1, 1, 1]), (0.3, [0, 0, pytest.approx(2 / 3)])):
        assert scores(confident([*sure, unsure], threshold), ask, exclude) == expected
    assert scores(confident(sure[:2], 0.9), ask, exclude) == [0, 0, pytest.approx(2 / 3)]
    assert scores(things(*[at(i, 0) for i in range(9)]), ask)[2] == -1, (
        "nine in place of three, as Flow-GRPO's formula has it"
    )


def test_the_surest_count_and_no_more_than_sixteen():
    crowd = [at(i, 0, score=0.4 + i / 100) for i in range(20)]
    cats = confident(crowd, 0.3)["cat"]
    assert len(cats) == MAX_DETECTIONS
    assert [d.score for d in cats] == sorted((d.score for d in crowd), reverse=True)[:MAX_DETECTIONS]
    assert confident([at(0, 0, score=0.3)], 0.3)["cat"] == [], "the threshold itself is below it"


def test_colours_are_those_of_the_surest():
    ask = [{"class": "cat", "count": 1, "color": "red"}]

    def by_place(detections, name):
        return ["red" if d.box[0] < 20 else "blue" for d in detections]

    first_red = things(at(0, 0, score=0.9), at(50, 0, score=0.8))
    first_blue = things(at(0, 0, score=0.8), at(50, 0, score=0.9))
    assert scores(first_red, ask, colors=by_place)[0] == 1
    assert scores(first_blue, ask, colors=by_place)[0] == 0
    assert scores(things(at(50, 0)), ask, colors=by_place) == [0, 0, 0.5], "the cat is there, its colour is wrong"
    assert scores(things(), ask, colors=by_place) == [0, 0, 0]


def test_attributes_are_bound_to_their_things():
    ask = [{"class": "cat", "count": 1, "color": "red"}, {"class": "dog", "count": 1, "color": "blue"}]
    objects = things(at(0, 0), at(50, 0, "dog"))
    assert scores(objects, ask, colors=lambda d, name: ["red" if name == "cat" else "blue"] * len(d)) == [1, 1, 1]
    assert scores(objects, ask, colors=lambda d, name: ["blue" if name == "cat" else "red"] * len(d)) == [0, 0, 0.5]


@pytest.mark.parametrize(
    ("x", "y", "relations"),
    [
        (-50, 0, {"left of"}),
        (50, 0, {"right of"}),
        (0, -50, {"above"}),
        (0, 50, {"below"}),
        (40, 40, {"right of", "below"}),
        (-40, -40, {"left of", "above"}),
        (40, 15, {"right of"}),  # 13 / 42.7 of the way down is not half
        (2, 0, set()),  # 0.1 (10 + 10) = 2: not clear of each other
        (2.01, 0, set()),  # what is left over is not half of the distance
        (4.1, 0, {"right of"}),
        (0, 0, set()),
    ],
)
def test_positions(x, y, relations):
    assert relation(at(x, y), at(0, 0)) == relations


def test_a_position_refers_to_a_demand_that_is_met():
    ask = [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}]
    assert scores(things(at(-50, 0), at(0, 0, "dog")), ask) == [1, 1, 1]
    assert scores(things(at(50, 0), at(0, 0, "dog")), ask) == [0, 0, pytest.approx(2 / 3)]
    assert scores(things(at(-50, 0)), ask) == [0, 0, pytest.approx(1 / 3)], "there is no dog to be left of"


@pytest.mark.parametrize(
    ("places", "holds"), [((-50, -70), True), ((-50, 50), False), ((50, -50), False), ((50, 70), False)]
)
def test_a_position_holds_for_all_things_of_both_classes(places, holds):
    cats, dog = [at(x, 0) for x in places], at(0, 0, "dog")
    ask = [{"class": "dog", "count": 1}, {"class": "cat", "count": 2, "position": ["left of", 0]}]
    assert scores(things(*cats, dog), ask) == [holds, holds, pytest.approx(1 if holds else 2 / 3)]
    cats, dogs = [at(0, 0)], [at(-x, 0, "dog") for x in places]
    ask = [{"class": "dog", "count": 2}, {"class": "cat", "count": 1, "position": ["left of", 0]}]
    assert scores(things(*cats, *dogs), ask) == [holds, holds, pytest.approx(1 if holds else 2 / 3)]


def test_colours_count_only_where_the_number_is_exact():
    ask = [{"class": "cat", "count": 2, "color": "red"}]
    one, two, three = ([at(50 * i, 0) for i in range(n)] for n in (1, 2, 3))
    assert scores(things(*two), ask) == [1, 1, 1]
    assert scores(things(*one), ask) == [0, 0, 0.25], "half of the number, none of the colours"
    assert scores(things(*three), ask) == [1, 0, 0.25]

    def second_blue(detections, name):
        return ["red" if d.box[0] < 20 else "blue" for d in detections]

    assert scores(things(*two), ask, colors=second_blue) == [0, 0, 0.75], "the number, and half of the colours"


@pytest.mark.parametrize(
    ("tag", "score", "counts"), [("counting", 0.89, 0), ("counting", 0.91, 1), ("position", 0.31, 1), ("position", 0.29, 0)]
)
def test_things_that_are_counted_must_be_surer(tag, score, counts):
    """The rules of the reward on the detections that it is given; no model runs."""
    reward = object.__new__(GenEval)
    reward.scoring, reward.names = published_score, lambda image, detections, name: red(detections, name)
    reward.detector = lambda images: [[at(0, 0, score=score)] for _ in images]
    asked = {"tag": [tag] * 2, "include": [[{"class": "cat", "count": 1, "color": "red"}]] * 2}
    assert reward(torch.zeros(2, 3, 8, 8), ["a", "b"], **asked).tolist() == [counts] * 2
    crowded = reward(torch.zeros(2, 3, 8, 8), ["a", "b"], **asked, exclude=[None, [{"class": "cat", "count": 1}]])
    assert crowded.tolist() == [counts, 0]


def test_instances_are_scored_as_mmdet_does():
    """Class probability times the mean probability within the mask; the box is the mask's, the last row and column outside."""
    classes = torch.full((2, 81), -20.0)
    classes[0, CLASSES.index("cat")], classes[1, 80] = 20.0, 20.0  # a cat, and nothing
    masks = torch.full((2, 8, 8), -5.0)
    masks[0, 2:4, 1:6] = 2.0
    detections = [d for d in instances(classes, masks, (8, 8)) if d.score > 1e-3]
    assert [(d.name, d.box) for d in detections] == [("cat", (1, 2, 6, 4))]
    assert detections[0].score == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=1e-4)
    assert int(detections[0].mask.sum()) == 10


def test_a_crop_is_grey_around_the_thing():
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[1:3, 1:3] = True
    picture = crop(torch.ones(3, 6, 6), Detection("cat", 1.0, (1, 1, 4, 3), mask))
    assert picture.size == (3, 2)
    assert [picture.getpixel((x, 0)) for x in range(3)] == [(255, 255, 255), (255, 255, 255), (153, 153, 153)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Mask2Former as it is published, but tiny."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mask2former")
    stages = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    sizes = dict.fromkeys(
        ("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim", "dim_feedforward"), 32
    )
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 12}
    backbone = SwinConfig(embed_dim=8, window_size=4, **stages)
    config = Mask2FormerConfig(backbone_config=backbone, num_labels=80, **sizes, **layers)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(folder)
    return str(folder)


def test_a_checkpoint_in_the_real_format_gives_detections_one_by_one_as_in_a_batch(checkpoint):
    images = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    together, alone = Detector(checkpoint, "cpu", 8)(images), Detector(checkpoint, "cpu", 1)(images)
    for a, b in zip(together, alone, strict=True):
        assert len(a) > 10
        assert {d.mask.shape for d in a} == {(40, 56)}
        assert all(0 <= d.box[0] < d.box[2] <= 56 and 0 <= d.box[1] < d.box[3] <= 40 for d in a)
        assert [d.score for d in a] == pytest.approx([d.score for d in b], abs=1e-5)


def test_colours_of_a_plain_thing_by_clip():
    """The tiny CLIP knows coloured signs only, so the words are its; the way from crop to name is the real one."""
    names = ColorNames(rewards.clip.TINY, str(rewards.clip.FOLDER / "open_clip_model.safetensors"), "cpu")
    whole = Detection("cat", 1.0, (0, 0, 80, 32), torch.ones(32, 80, dtype=torch.bool))
    assert set(names(torch.rand(3, 32, 80), [whole, whole], "cat")) <= set(COLORS)
    assert names(torch.rand(3, 32, 80), [], "cat") == []
    assert torch.allclose(names._classes("cat").norm(dim=1), torch.ones(10), atol=1e-5)


def test_geneval_on_its_own_prompt_file(checkpoint, tmp_path):
    rows = [
        {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
        {
            "tag": "counting",
            "include": [{"class": "clock", "count": 2}],
            "exclude": [{"class": "clock", "count": 3}],
            "prompt": "a photo of two clocks",
        },
        {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "pink"}], "prompt": "a photo of a pink car"},
        {
            "tag": "position",
            "include": [{"class": "bowl", "count": 1}, {"class": "cow", "count": 1, "position": ["left of", 0]}],
            "prompt": "a photo of a cow left of a bowl",
        },
    ]
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    prompts = load_prompts(file)
    batch = prompts.take(range(4), 1)
    images = torch.rand(4, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    for scoring, values in (("published", {0, 1}), ("strict", {0, 1}), ("partial", None)):
        reward = rewards.load(
            "geneval",
            scoring=scoring,
            detector=checkpoint,
            clip=rewards.clip.TINY,
            clip_weights=str(rewards.clip.FOLDER / "open_clip_model.safetensors"),
        )
        score = scored_unchanged("geneval", reward, images, batch.prompts, **batch.columns())
        assert score.shape == (4,)
        assert values is None or set(score.tolist()) <= values
    seen = {d.name: d for d in reward.detector(images[:1])[0]}
    sure = max(seen.values(), key=lambda d: d.score)
    reward.detector = lambda pictures: [[Detection(sure.name, 0.95, sure.box, sure.mask)]] * len(pictures)
    ask = [{"class": sure.name, "count": 1, "color": None, "position": None}]
    assert reward(images[:1], ["x"], tag=["single_object"], include=[ask]).tolist() == [1], (
        "keys that a table filled up with None"
    )
    for demand, words in (
        ({"class": "keyboard", "count": 1}, r"class 'keyboard' is none of GenEval's 80\. Did you mean computer keyboard\?"),
        ({"class": "cat", "count": 1, "color": "teal"}, "color 'teal' is none of GenEval's 10"),
    ):
        for columns in ({"include": [[demand]]}, {"include": [ask], "exclude": [[demand]]}):
            with pytest.raises(ValueError, match=words):
                reward(images[:1], ["x"], tag=["colors"], **columns)


def test_options_that_make_no_sense(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="there is no scoring 'lenient'"):
        rewards.load("geneval", scoring="lenient")
    config = Mask2FormerConfig.from_pretrained(checkpoint, num_labels=5)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    Mask2FormerImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 5 classes, not COCO's 80"):
        rewards.load("geneval", detector=str(tmp_path))
