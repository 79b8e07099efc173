"""The recipe of the embedded model of shapes: its parts, its captions, and that it goes on where it was."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dev.prompts import drawing
from dev.tiny import pretrain_shapes as pretrain
from dev.tiny.pretrain_shapes import transformer_loss, velocity
from dev.tiny.pretraining_stage import PretrainingStage, StagePlan
from flow_grpo.config.loading import bundled_file
from flow_grpo.rewards.shapes.prompts import COLORS, SHAPES, parse_edit, parse_scene
from flow_grpo.rewards.shapes.rules import find_shapes


def test_each_word_of_a_prompt_is_one_token_and_every_prompt_fits():
    tokenizer, rng = pretrain.tokenizer(), np.random.default_rng(0)
    for _ in range(500):
        for prompt in (str(drawing.random_scene(rng)), str(drawing.random_edit(rng)[1])):
            tokens = tokenizer.tokenize(prompt)
            assert [token.removeprefix("Ġ") for token in tokens] == prompt.split()
            assert len(tokens) < pretrain.TEXT_LENGTH, "a mark begins each prompt"


def test_the_published_number_of_layers_is_the_same_function():
    torch.manual_seed(0)
    tokenizer = pretrain.tokenizer()
    encoder = pretrain.text_encoder(len(tokenizer), 4).eval()
    deep = pretrain.with_published_layers(encoder).eval()
    inputs = tokenizer(["a red circle", "make the blue cross green"], return_tensors="pt", padding=True)
    shallow_states, deep_states = (one(**inputs, output_hidden_states=True).hidden_states for one in (encoder, deep))
    for place, published in zip(pretrain.TEXT_LAYERS, pretrain.PUBLISHED_LAYERS, strict=True):
        assert torch.equal(shallow_states[place], deep_states[published])


def test_attributes_are_misdescribed_as_often_as_asked_and_captions_stay_prompts():
    rng, differences = np.random.default_rng(0), []
    for _ in range(1500):
        scene, _ = drawing.random_example(rng)
        told = pretrain.misdescribe(scene, rng, 0.2)
        assert parse_scene(str(told)) == told
        assert (len(told.groups), told.count <= 4) == (len(scene.groups), True)
        differences += [one.shape != other.shape for one, other in zip(scene.groups, told.groups, strict=True)]
        differences += [a.color != b.color for a, b in zip(scene.groups, told.groups, strict=True) if a.color]
    assert abs(np.mean(differences) - 0.2) < 4 * (0.2 * 0.8 / len(differences)) ** 0.5
    assert pretrain.misdescribe(scene, rng, 0.0) == scene


def test_edits_are_misdescribed_in_their_kind_and_in_what_is_new():
    rng, kinds, colors = np.random.default_rng(0), [], []
    for _ in range(1500):
        _, edit, _ = drawing.random_edit(rng)
        told = pretrain.misdescribe_edit(edit, rng, 0.2)
        assert parse_edit(str(told)) == told
        assert (told.shape, told.color) == (edit.shape, edit.color), "which shape is meant is always true"
        if edit.kind == "add":
            assert told.kind == "add"
        else:
            kinds.append(told.kind != edit.kind)
        if edit.kind == told.kind == "make":
            colors.append(told.new_color != edit.new_color)
    assert abs(np.mean(kinds) - 0.1) < 4 * (0.1 * 0.9 / len(kinds)) ** 0.5
    assert abs(np.mean(colors) - 0.2) < 4 * (0.2 * 0.8 / len(colors)) ** 0.5


def pipeline_without_zeros():
    """The untrained pipeline with random numbers where its transformer begins with zeros."""
    torch.manual_seed(0)
    pipe = pretrain.pipeline()
    for parameter in pipe.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return pipe


def test_the_loss_depends_on_captions_and_sources():
    pipe, rng = pipeline_without_zeros(), np.random.default_rng(0)
    made = pretrain.encoded(pipe, pretrain.edits(rng, 4))
    true = list(map(str, made.described))
    losses = []
    for captions, sources in (
        (true, made.sources),
        ([f"a {COLORS[0]} {SHAPES[0]}"] * 4, made.sources),
        (true, made.sources.flip(0)),
        (true, None),
    ):
        torch.manual_seed(1)
        given = pretrain.Examples(made.described, made.images, sources)
        losses.append(transformer_loss(pipe, captions, given).item())
    assert len(set(losses)) == 4


def test_a_teacher_with_guidance_is_the_target_and_knows_the_true_captions():
    pipe, rng = pipeline_without_zeros(), np.random.default_rng(0)
    made = pretrain.encoded(pipe, pretrain.scenes(rng, 4, pretrain.TAUGHT))
    true = list(map(str, made.described))

    def loss(captions, guidance):
        torch.manual_seed(1)
        return transformer_loss(pipe, captions, made, teacher=pipe, guidance=guidance).item()

    assert loss(true, 1.0) == 0, "a model is its own teacher"
    assert loss(true[::-1], 1.0) > 0
    states, sigma = torch.randn_like(made.images), torch.full((4,), 0.7)
    gap = velocity(pipe, true, states, sigma, None) - velocity(pipe, [""] * 4, states, sigma, None)
    assert gap.square().mean() > 0
    assert loss(true, 3.0) == pytest.approx(4 * loss(true, 2.0), rel=1e-3), "the error is (guidance - 1) times the gap"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="the recipe needs torch.optim.Muon, that is torch 2.9 or newer")
def test_the_stage_goes_on_where_it_was(tmp_path):
    """Two steps at once, or one and one more: the same weights."""

    def run(name: str, stops: list[int]) -> dict:
        (tmp_path / name).mkdir()
        for stop in stops:
            torch.manual_seed(0)
            pipe = pretrain.pipeline()
            drawn = pretrain.encoded(pipe, pretrain.scenes(np.random.default_rng(0), 8, pretrain.TAUGHT))
            plan = StagePlan(11, stop, lr=1e-3, muon_lr=3e-3, horizon=2)
            stage = PretrainingStage("clean", plan, pipe, ["transformer", "text_encoder"], folder=tmp_path / name, seed=0)
            stage.run(
                lambda rng, step, pipe=pipe, drawn=drawn: transformer_loss(pipe, *drawn.batch(rng, 2, 0.2)),
                dict,
            )
        return torch.load(tmp_path / name / "clean.pt", weights_only=True)["transformer"]

    once, twice = run("once", [2]), run("twice", [1, 2])
    assert all(torch.equal(value, twice[key]) for key, value in once.items())


def test_the_captions_of_the_packaged_edits_fit_the_clip_model_and_say_what_the_results_show():
    """Of each edit, the source's shapes after the asked change are those of the caption."""
    file, tokenizer = bundled_file("prompts/shape_edits_eval.jsonl"), pretrain.clip_tokenizer()
    for line in file.read_text().splitlines():
        row = json.loads(line)
        edit, caption = parse_edit(row["prompt"]), [tuple(text.split()[1:]) for text in row["output_caption"].split(" and ")]
        shown = [(one.color, str(one.shape)) for one in find_shapes(Image.open(file.parent / row["image"]).convert("RGB"))]
        meant = next(one for one in shown if one[1] == edit.shape and edit.color in (None, one[0]))
        if edit.kind == "add":
            shown.append((edit.new_color, edit.new_shape))
        else:
            shown.remove(meant)
            shown += [(edit.new_color, edit.shape)] if edit.kind == "make" else []
        assert sorted(shown) == sorted(caption)
        assert len(tokenizer(row["output_caption"]).input_ids) <= pretrain.CLIP_LENGTH
