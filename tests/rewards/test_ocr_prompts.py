"""The shipped OCR prompts: what their generator gives, readable by the reward, correct English, and no text in two of them."""

import re
import sys

import pytest
import yaml

from dev.prompts import ocr_prompts
from flow_grpo.config.loading import bundled_file
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.rewards.ocr import OCR, quoted_texts

SIZES = {"train": 4096, "test": 512}
PROMPTS = {name: load_prompts(f"prompts/ocr_{name}.txt").prompts for name in SIZES}
TEXTS = {name: [quoted_texts(prompt)[0] for prompt in prompts] for name, prompts in PROMPTS.items()}
EVERY = [*PROMPTS["train"], *PROMPTS["test"]]


def test_the_shipped_files_are_what_the_generator_gives(tmp_path, monkeypatch):
    files = {name: tmp_path / f"{name}.txt" for name in SIZES}
    words = [word for name, size in SIZES.items() for word in (str(size), str(files[name]))]
    monkeypatch.setattr(sys, "argv", ["ocr_prompts", *words])
    ocr_prompts.main()
    for name, file in files.items():
        assert file.read_text() == bundled_file(f"prompts/ocr_{name}.txt").read_text()


def test_train_and_test_have_no_text_in_common_and_no_text_comes_twice():
    assert {name: len(members) for name, members in PROMPTS.items()} == SIZES
    texts = [ocr_prompts.same_text(text) for members in TEXTS.values() for text in members]
    assert len(set(texts)) == len(texts)
    assert not {text.casefold() for text in TEXTS["train"]} & {text.casefold() for text in TEXTS["test"]}


def test_every_prompt_has_one_text_of_one_to_six_words_that_the_reward_reads():
    reward = OCR()
    for name, prompts in PROMPTS.items():
        for prompt, text in zip(prompts, TEXTS[name], strict=True):
            assert prompt.count('"') == 2
            assert prompt.isascii()
            assert prompt.isprintable()
            assert 1 <= len(text.split()) <= 6
            assert text == text.strip()
            assert reward._target(prompt) == text.replace(" ", "").lower()
    lengths = [len(text.split()) for text in TEXTS["train"]]
    assert all(lengths.count(words) >= 10 for words in range(1, 7)), lengths


def test_articles_spaces_and_capitals_are_right():
    for prompt in EVERY:
        for article, word in re.findall(r"\b(an?) ([\w-]+)", prompt, re.IGNORECASE):
            vowel = word[0].lower() in "aeiou8" and not word.lower().startswith(("one", "uni", "use"))
            assert (article.lower() == "an") == (vowel or word.lower().startswith(("honest", "hour"))), prompt
        assert not re.search(r"  | ,|\.\.|[{}\[\]/]|^[a-z]", prompt), prompt
        words = prompt.casefold().split()
        assert not any(one == two for one, two in zip(words, words[1:], strict=False)), prompt


def test_scenes_and_sentences_vary():
    """No scene is more than a twentieth of the prompts, and no beginning of three words more than a fiftieth."""
    beginnings = [" ".join(prompt.split()[:3]) for prompt in EVERY]
    assert max(beginnings.count(one) for one in set(beginnings)) < len(EVERY) / 50
    around = [re.sub(r'"[^"]*"', "_", prompt) for prompt in EVERY]
    assert len(set(around)) > 0.95 * len(EVERY)
    assert len({word for prompt in around for word in prompt.split()}) > 900
    assert 12 < sum(len(prompt.split()) for prompt in EVERY) / len(EVERY) < 25
    assert max(len(prompt.split()) for prompt in EVERY) < 50, "CLIP reads 77 tokens"


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("Fox", "Foxes"),
        ("Wolf", "Wolves"),
        ("Moose", "Moose"),
        ("Daisy", "Daisies"),
        ("Donkey", "Donkeys"),
        ("Finch", "Finches"),
    ],
)
def test_plurals(one, many):
    assert ocr_prompts.plural(one) == many


def test_more_texts_than_the_vocabulary_has_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "scenes.yaml"
    kinds = {"words": {"n": "1 / 2"}, "light": {"any": "at dusk"}, "styles": {"before": "a photo", "after": "in blue"}}
    scene = {
        "things": "a sign",
        "where": "on a wall",
        "how": "in red",
        "made": "painted",
        "light": "any",
        "texts": "Exit {n}",
    }
    file.write_text(yaml.safe_dump({**kinds, "scenes": {"sign": scene}}))
    monkeypatch.setattr(ocr_prompts, "VOCABULARY", file)
    assert {quoted_texts(prompt)[0] for prompt in ocr_prompts.prompts(2, 0)} == {"Exit 1", "Exit 2"}
    with pytest.raises(ValueError, match="the vocabulary has only 2 different texts, not 3"):
        ocr_prompts.prompts(3, 0)
