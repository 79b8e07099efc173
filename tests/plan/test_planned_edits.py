"""Plans of models that edit images: they are of the prompts with most images, which cost most."""

import json

import pytest
import torch
from support.image_families import IMAGE_TINY, picture, small_pictures

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.image_prompt import images_of
from flow_grpo.plan.trace import ModelTrace

# Qwen-Image 2.1 calls a part of its text encoder, so its cost is unknown
PLANNED = [name for name in IMAGE_TINY if name != "qwen_image21"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "flux2_klein")) for name in PLANNED]
)
def test_an_editing_model_is_traced_with_its_images(name, tmp_path):
    tiny = IMAGE_TINY[name]
    torch.manual_seed(0)
    tiny.build().save_pretrained(tmp_path / "model")
    for number in range(2):
        picture(number).open().save(tmp_path / f"{number}.png")
    height, width = tiny.size
    traces = []
    for images in (["0.png"], ["0.png", "1.png"])[: 1 + (name == "flux2_klein")]:
        rows = [{"prompt": "make it night", "image": images}]
        if name == "flux2_klein":  # the only one here that also takes texts alone
            rows.append({"prompt": "a text without an image, which is the longest of the two", "image": []})
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        args = FlowGRPOConfig(
            model=str(tmp_path / "model"),
            height=height,
            width=width,
            pipeline_kwargs=tiny.call,
            prompts=str(tmp_path / "prompts.jsonl"),
            rewards={"jpeg_size": 1},
            sampling={"steps": 2},
        )
        with small_pictures():
            traces.append(ModelTrace(args, torch.bfloat16, cuda=True, release_gradients=False))
    assert [len(images_of(trace.prompt)) for trace in traces] == [1, 2][: len(traces)]
    assert traces[0].operations["update"] > 0
    assert traces[-1].operations["update"] > traces[0].operations["update"] or len(traces) == 1
