"""The packaged prompts that ask to change a sign's text."""

import json
import re

from dev.prompts.edit_prompts import COUNTS, WORDS, write
from flow_grpo.config.loading import bundled_file
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.image_prompt import images_of


def asked(prompts: list[str]) -> set[str]:
    return {re.search(r'"(\w+)"', prompt)[1] for prompt in prompts}


def test_they_are_what_the_module_writes_and_share_no_word_or_image(tmp_path):
    write(tmp_path)
    parts = {}
    for part, count in COUNTS.items():
        file = bundled_file(f"prompts/edits_{part}.jsonl")
        assert (tmp_path / file.name).read_text() == file.read_text()
        parts[part] = load_prompts(file).prompts
        assert len(parts[part]) == count
        written = {f"edits/{one.name}" for one in (tmp_path / "edits").glob(f"{part}_*.png")}
        assert written == {json.loads(line)["image"] for line in file.read_text().splitlines()}
        assert all(json.loads(line).keys() == {"prompt", "image"} for line in file.read_text().splitlines())
    assert asked(parts["train"]) | asked(parts["test"]) <= set(WORDS)
    assert not asked(parts["train"]) & asked(parts["test"])
    digests = [{images_of(prompt)[0].digest for prompt in part} for part in parts.values()]
    assert not digests[0] & digests[1]
    assert [len(found) for found in digests] == list(COUNTS.values()), "no image is there twice"
