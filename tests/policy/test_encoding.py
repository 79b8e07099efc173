"""Prompts are encoded once, with the encoders where the settings have them."""

import os
import subprocess
import sys

import pytest
import torch
from support.embedded import PROMPTS, tiny_policy
from support.hub_server import local_hub, settings

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.policy import encoding
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.interception import PROBE_PROMPTS
from flow_grpo.policy.loading import load_policy


def test_prompts_are_encoded_once_and_in_any_company():
    policy = tiny_policy()
    _, alone = policy.encode(PROMPTS[:1]).select(torch.tensor([0]))
    others = [f'green text "{a}{b}{c}" on a white background' for a in "XYZ" for b in "XYZ" for c in "XY"]
    for place in (1, 3, 7, 12, 17):
        company = [*others[:place], PROMPTS[0], *others[place:]]
        _, together = tiny_policy().encode(company).select(torch.tensor([place]))
        for (_, a), (_, b) in zip(alone, together, strict=True):
            for x, y in zip(a, b, strict=True):
                assert (x is None and y is None) or torch.equal(x, y), place
    calls = []
    encode = policy.pipe.encode_prompt
    policy.pipe.encode_prompt = lambda *a, **k: calls.append(a or k) or encode(*a, **k)
    policy.encode([PROMPTS[1], *PROMPTS])
    policy.encode(PROMPTS)
    assert len(calls) == 1, "only the prompt that was new"


def test_a_batch_larger_than_the_memory_for_prompts_is_encoded_once(monkeypatch):
    monkeypatch.setattr(encoding, "MAX_IN_MEMORY", 2)
    policy, calls = tiny_policy(), []
    encode = policy.pipe.encode_prompt
    policy.pipe.encode_prompt = lambda *a, **k: calls.append(a or k) or encode(*a, **k)
    batch = [*PROMPTS, *(f"{prompt} again" for prompt in PROMPTS)]
    policy.encode(batch)
    of_first = len(calls)
    policy.encode(batch)
    assert len(calls) == of_first > 0


def test_prompts_that_were_kept_without_guidance_are_encoded_anew_with_it(tmp_path):
    memory, call = MemoryConfig(embedding_cache_dir=str(tmp_path)), {"height": 32, "width": 80, "max_sequence_length": 14}
    load_policy("tiny", "cpu", "fp32", memory=memory, **call).encode([*PROBE_PROMPTS[:1], *PROMPTS])
    for guidance, known in ((1.0, True), (1.5, False)):
        policy = load_policy("tiny", "cpu", "fp32", guidance=guidance, memory=memory, prompts=PROMPTS, **call)
        assert (policy.pipe.text_encoder is None) == known


def test_encoders_that_are_offloaded_are_not_moved_to_the_device(monkeypatch):
    moved, to = [], torch.nn.Module.to
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda self, *a, **k: moved.append((type(self).__name__, a)) or to(self, *a, **k)
    )
    for offload in (False, True):
        moved.clear()
        tiny_policy(memory=MemoryConfig(offload_text_encoders=offload))
        there = {name for name, where in moved if where == (torch.device("cpu"),)}
        assert {"SD3Transformer2DModel", "AutoencoderKL"} <= there
        assert ("T5EncoderModel" in there) != offload


@pytest.mark.slow
def test_the_run_after_the_one_that_downloads_a_model_finds_its_prompts_encoded(tmp_path):
    code = """
import sys
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.policy.loading import load_policy
memory = MemoryConfig(embedding_cache_dir=sys.argv[1])
policy = load_policy("me/tiny", "cpu", "fp32", memory=memory, prompts=["a"], height=32, width=80, max_sequence_length=14)
policy.encode(["a"])
print(policy.pipe.text_encoder is not None)
"""
    with local_hub(BUNDLED_MODELS["tiny"]) as server:
        environment = {**os.environ, **settings(server), "HF_HOME": str(tmp_path / "hub")}
        command = [sys.executable, "-c", code, str(tmp_path / "embeddings")]
        runs = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout.strip() for run in runs] == ["True", "False"], runs[-1].stderr
