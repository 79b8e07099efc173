"""Rewards that see several images: win rates, whole groups wherever a reward runs, and what they may not return."""

import base64

import httpx
import pytest
import torch
from support.reward_servers import threaded

from flow_grpo import rewards
from flow_grpo.rewards import WeightedSum, scopes
from flow_grpo.rewards.serving.client import Remote, png
from flow_grpo.rewards.serving.server import Limits, application

GROUP = [0, 0, 0, 1, 1, 1, 1]
PROMPTS = ["a cat"] * 3 + ["a dog"] * 4


def images(count: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def bright(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.mean((1, 2, 3))


def brighter(first, second, prompts):
    return (bright(first) > bright(second)).float() + 0.5 * (bright(first) == bright(second))


brighter.scope = "pair"


def softly(first, second, prompts):
    return torch.sigmoid(5 * (bright(first) - bright(second)))


softly.scope = "pair"


def spread(images, prompts):
    """Distance from the mean brightness of the group, and the group's size, which tells what it was given."""
    return (bright(images) - bright(images).mean()).abs() + len(prompts)


spread.scope = "group"


def by_hand(compare, pictures: torch.Tensor, group: list) -> list[float]:
    """The share of the others of the group that each image beats, one comparison at a time."""
    values = []
    for i, g in enumerate(group):
        others = [j for j, other in enumerate(group) if other == g and j != i]
        wins = [compare(pictures[[i]], pictures[[j]], ["x"]).item() for j in others]
        values.append(sum(wins) / len(wins))
    return values


# -- win rates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [brighter, softly])
def test_a_value_is_the_share_of_the_others_of_the_group_that_an_image_beats(compare):
    pictures = images(20)
    pictures[4] = pictures[3]  # a tie
    prompts = ["a cat"] * 3 + ["a dog"] * 17  # more pairs than go into one call
    values = rewards.score("pairs", compare, pictures, prompts)
    torch.testing.assert_close(values, torch.tensor(by_hand(compare, pictures, prompts)))
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    again = rewards.score("pairs", compare, pictures[shuffled], [prompts[i] for i in shuffled])
    torch.testing.assert_close(again, values[shuffled])


def test_groups_go_by_their_numbers_and_not_by_their_prompts():
    values = rewards.score("pairs", brighter, images(4), ["a cat"] * 4, [5, 9, 5, 9])
    assert values.tolist() == by_hand(brighter, images(4), [5, 9, 5, 9])


def test_a_preference_for_the_first_place_cancels():
    def biased(first, second, prompts):
        return (bright(first) + 0.03 > bright(second)).float()

    def always_first(first, second, prompts):
        return torch.ones(len(prompts))

    for function in (biased, always_first):
        function.scope = "pair"
    pictures = torch.tensor([0.1, 0.12, 0.5, 0.9]).view(4, 1, 1, 1).expand(-1, 3, 2, 2)
    assert rewards.score("biased", biased, pictures, ["a"] * 4).tolist() == pytest.approx([1 / 6, 1 / 6, 2 / 3, 1])
    assert rewards.score("first", always_first, pictures, ["a"] * 4).tolist() == [0.5] * 4
    always_first.symmetric = True  # it says that it has no bias, and is asked once: its mistake is its own
    assert rewards.score("first", always_first, pictures, ["a"] * 4).tolist() != [0.5] * 4


@pytest.mark.parametrize("opponents", [1, 2, 3, 4, 6, 7, 40])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_with_fewer_opponents_all_images_meet_equally_many_others_once(size, opponents):
    pairs = scopes.pairs_of(list(range(10, 10 + size)), opponents)
    met = [sum(i in pair for pair in pairs) for i in range(10, 10 + size)]
    assert set(met) == {min(opponents + opponents % 2, size - 1)}
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("parameters", ["first, second, prompts", "first, second, prompts, **metadata"])
def test_scope_and_opponents_are_no_options_of_a_reward(tmp_path, parameters):
    (tmp_path / "mine.py").write_text(f"def wins({parameters}):\n    return [1.0] * len(prompts)\n")
    for key, value in {"scope": "pair", "opponents": 2}.items():
        with pytest.raises(ValueError, match=f"{key} is no option: set the attribute {key} of its class or function"):
            rewards.load(f"{tmp_path}/mine.py:wins", **{key: value})


@pytest.mark.parametrize("opponents", [0, True, "2"])
def test_opponents_are_a_number_from_1(opponents):
    def wins(first, second, prompts):
        return [1.0] * len(prompts)

    wins.scope, wins.opponents = "pair", opponents
    with pytest.raises(ValueError, match=f"opponents={opponents} of the reward wins is no number from 1"):
        rewards.score("wins", wins, images(4), ["a"] * 4)


@pytest.mark.parametrize(("settings", "comparisons"), [({}, 12), ({"frames": 1}, 12)])
def test_a_setting_of_frames_replaces_no_other_attribute(tmp_path, settings, comparisons):
    (tmp_path / "mine.py").write_text(
        "class Few:\n"
        "    scope, opponents, symmetric = 'pair', 2, True\n"
        "    def __init__(self, compared):\n"
        "        self.compared = compared\n"
        "    def __call__(self, first, second, prompts):\n"
        "        self.compared.extend(prompts)\n"
        "        return [1.0] * len(prompts)\n"
    )
    compared: list[str] = []
    reward = rewards.load(f"{tmp_path}/mine.py:Few", **settings, compared=compared)
    rewards.score("few", reward, images(12), ["a"] * 12)
    assert len(compared) == comparisons


@pytest.mark.parametrize("settings", [{}, {"frames": 1}])
def test_whole_groups_are_scored_in_one_call_whatever_frames_are_seen(tmp_path, settings):
    (tmp_path / "mine.py").write_text(
        "class Whole:\n"
        "    scope = 'group'\n"
        "    def __call__(self, images, prompts):\n"
        "        raise AssertionError('one group at a time')\n"
        "    def score_groups(self, group, images, prompts):\n"
        "        return [float(number) for number in group]\n"
    )
    reward = rewards.load(f"{tmp_path}/mine.py:Whole", **settings)
    assert rewards.score("whole", reward, images(), PROMPTS, GROUP).tolist() == GROUP


def test_a_columns_name_may_be_that_of_a_parameter():
    def longest(first, second, prompts, answer):
        return [float(text == "yes") for text in answer]

    longest.scope = "pair"
    columns = {"answer": ["yes", "yes", "no", "no"], "first": [1] * 4, "group": [0] * 4, "second": [2] * 4}
    assert rewards.score("longest", longest, images(4), list("aabb"), **columns).tolist() == [0.5] * 4


# -- groups -------------------------------------------------------------------------------------------------------------


def test_a_group_reward_gets_the_images_and_columns_of_one_group_at_a_time():
    seen = []

    def reward(images, prompts, row):
        seen.append((len(images), set(prompts), row))
        return [float(i) for i in range(len(prompts))]

    reward.scope = "group"
    values = rewards.score("g", reward, images(5), ["a", "b", "a", "b", "a"], row=[10, 11, 12, 13, 14])
    assert seen == [(3, {"a"}, [10, 12, 14]), (2, {"b"}, [11, 13])]
    assert values.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("value", "scope", "words"),
    [
        (torch.ones(3), "group", r"reward bad returned shape \(3,\) for 4 images; it must return one number each"),
        (1.0, "group", r"returned shape \(\) for 4 images"),
        (torch.ones(2), "pair", r"returned shape \(2,\) for 6 pairs of images; it must return one number each"),
        (torch.full((6,), 1.5), "pair", "returned 1.5 for a pair of images; it must return the probability, 0 to 1"),
        (torch.full((6,), -1), "pair", "returned -1 for a pair"),
        (torch.full((6,), torch.nan), "pair", "reward bad returned nan for the prompt 'a'; every reward must be finite"),
        (torch.ones(4), "pairs", "scope=pairs of the reward bad is none of image, group, pair: set one of them"),
    ],
)
def test_what_a_reward_may_not_return_is_one_sentence(value, scope, words):
    def bad(*inputs):
        return value

    bad.scope = scope
    with pytest.raises(ValueError, match=words):
        rewards.score("bad", bad, images(4), ["a"] * 4)


@pytest.mark.parametrize("reward", [brighter, spread])
def test_a_group_of_one_image_is_refused_in_a_clear_error(reward):
    with pytest.raises(
        ValueError, match="reward r sees the images of a prompt together, but there is one of 'b': give it two"
    ):
        rewards.score("r", reward, images(3), ["a", "a", "b"])


def test_only_the_group_that_fails_is_dropped():
    def fails(images, prompts):
        if prompts[0] == "a dog":
            raise RuntimeError("no dogs")
        return bright(images)

    fails.scope = "group"
    both = WeightedSum({"fails": fails, "spread": spread}, {"fails": 1.0, "spread": 1.0}, drop_on_error=["fails"])
    total, by_name = both(images(), PROMPTS, GROUP)
    assert total.isnan().tolist() == by_name["fails"].isnan().tolist() == [False] * 3 + [True] * 4
    assert by_name["spread"].isfinite().all()
    assert len(both.drop_messages) == 1
    assert "no dogs" in both.drop_messages[0]


def test_against_other_images_a_win_rate_is_the_chance_to_beat_the_one_in_the_same_place():
    both = WeightedSum({"softly": softly, "mean": lambda images, prompts: bright(images)}, {"softly": 1.0, "mean": 0.0})
    others = images(seed=1)
    total, by_name = both.against(others, images(), PROMPTS)
    torch.testing.assert_close(by_name["softly"], softly(images(), others, PROMPTS))
    torch.testing.assert_close(by_name["mean"], bright(images()))
    assert total.tolist() == by_name["softly"].tolist()
    assert both.against(images(), images(), PROMPTS)[0].tolist() == [0.5] * 7, "the model that it is compared with"
    with pytest.raises(ValueError, match="softly compares images of one prompt and seed with the base model's"):
        both.against(None, images(), PROMPTS)


# -- on a server --------------------------------------------------------------------------------------------------------


def served(**functions):
    """The address of a server of these rewards, in a thread."""
    return threaded(application(functions, None, Limits()))


def test_a_server_gets_whole_groups_whatever_its_batches_and_gives_the_local_values():
    requests = []

    def counted(images, prompts):
        requests.append(list(prompts))
        return spread(images, prompts)

    counted.scope = "group"
    order = [3, 0, 4, 1, 5, 2, 6]  # the groups of a batch may be mixed
    batch = images()[order], [PROMPTS[i] for i in order], [GROUP[i] for i in order]
    with served(spread=counted, brighter=brighter, mean=lambda images, prompts: bright(images)) as url:
        for batch_size in (1, 3, 100):
            for name, local in (("spread", spread), ("brighter", brighter)):
                there = Remote(url, name, batch_size=batch_size)
                assert torch.equal(rewards.score(name, there, *batch), rewards.score(name, local, *batch))
        assert all(len(set(prompts)) == 1 and len(prompts) in (3, 4) for prompts in requests)
        assert scopes.scope_of(rewards.load("spread", remote=url)) == "group"
        assert scopes.scope_of(Remote(url, "mean")) == "image"
        assert httpx.get(f"{url}/health").json()["scopes"] == {"spread": "group", "brighter": "pair", "mean": "image"}


def test_a_request_without_groups_is_refused_where_they_matter_and_served_where_not():
    """As an older client sends it."""
    pngs = [base64.b64encode(png(image)).decode() for image in images(2)]
    with served(spread=spread, mean=lambda images, prompts: bright(images)) as url:
        asked = {"prompts": ["a", "a"], "images": pngs}
        assert httpx.post(f"{url}/score", json={**asked, "reward": "mean"}).status_code == 200
        for wrong in ({}, {"group": [0]}, {"group": ["a", "b"]}, {"group": 3}):
            refused = httpx.post(f"{url}/score", json={**asked, "reward": "spread", **wrong})
            assert refused.status_code == 400
            assert "sees whole groups: `group` must be a list of 2 whole numbers" in refused.json()["detail"]
        assert len(httpx.post(f"{url}/score", json={**asked, "reward": "spread", "group": [7, 7]}).json()["values"]) == 2
