"""The published preference models on tiny checkpoints of their formats, each against its reference formula written out."""

import math

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from support import reference_weights
from support.reward_inputs import scored_unchanged
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from transformers import CLIPImageProcessor, CLIPModel, Qwen2VLImageProcessor

from flow_grpo import rewards
from flow_grpo.rewards import hpsv3

PROMPTS = ["a red cat", "the blue dog on a mat", "a red cat", "cat", "dog on the mat"]
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
NAMES = ["pickscore", "hpsv2", "aesthetic", "imagereward", "hpsv3"]


@pytest.fixture(scope="module")
def images():
    return torch.rand(5, 3, 40, 56, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def small_open_clip():
    """open_clip's own models of the published names, made small."""
    with pytest.MonkeyPatch.context() as patch:
        for name, config in reference_weights.OPEN_CLIP.items():
            patch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory, small_open_clip):
    """The options that load each reward from a checkpoint on disk."""
    folder = tmp_path_factory.mktemp("published")
    torch.save(reference_weights.imagereward(), folder / "ImageReward.pt")
    torch.save(reference_weights.linear_head(768), folder / "linearMSE.pth")
    reference_weights.pickscore(folder / "pickscore")
    reference_weights.hpsv3(folder / "qwen")
    return {
        "clip": {},
        "pickscore": {"weights": folder / "pickscore", "processor": folder / "pickscore"},
        "hpsv2": {"weights": reference_weights.open_clip_file("ViT-H-14", folder / "HPS_v2.1_compressed.pt")},
        "aesthetic": {
            "weights": folder / "linearMSE.pth",
            "pretrained": reference_weights.open_clip_file("ViT-L-14-quickgelu", folder / "ViT-L-14.pt"),
        },
        "imagereward": {
            "weights": folder / "ImageReward.pt",
            "tokenizer": reference_weights.bert_tokenizer(folder / "bert"),
        },
        "hpsv3": {"weights": folder / "qwen" / "HPSv3.safetensors", "processor": folder / "qwen"},
    }


@pytest.fixture(scope="module")
def load(files):
    # on the CPU, also where there is a GPU, with whose rounding the values differ by 1e-4, and hpsv3's in bf16 by 1e-2
    return lambda name, **options: rewards.load(name, device="cpu", **{k: str(v) for k, v in files[name].items()}, **options)


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy(), "RGB")


def pixels(images: torch.Tensor, *size, mean=CLIP_MEAN, std=CLIP_STD) -> torch.Tensor:
    """CLIP's preprocessing: the shorter side to the size, bicubic, the middle of it, normalised."""
    size = size if len(size) == 2 else size[0]
    steps = [Resize(size, interpolation=InterpolationMode.BICUBIC), CenterCrop(size), ToTensor(), Normalize(mean, std)]
    return torch.stack([Compose(steps)(pil(image)) for image in images])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.detach().float().reshape(actual.shape), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_pickscore_is_the_logit_of_clip(load, images, files):
    folder = files["pickscore"]["weights"]
    model = CLIPModel.from_pretrained(folder).eval()
    inputs = CLIPImageProcessor.from_pretrained(folder)([pil(image) for image in images], return_tensors="pt")
    assert (inputs["pixel_values"] - pixels(images, 32)).abs().mean() < 0.02, "the processor is CLIP's"
    tokenizer = reference_weights.AutoTokenizer.from_pretrained(folder)
    expected = []
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        text = model.text_projection(model.text_model(input_ids=ids).pooler_output)
        image = model.visual_projection(model.vision_model(pixel_values=inputs["pixel_values"][i : i + 1]).pooler_output)
        expected.append(model.logit_scale.exp() * F.cosine_similarity(text, image))
    close(load("pickscore")(images, PROMPTS), torch.cat(expected))


def test_pickscore_of_half_weights_is_computed_in_float32(images, files, tmp_path):
    CLIPModel.from_pretrained(files["pickscore"]["weights"]).half().save_pretrained(tmp_path)
    options = {"weights": str(tmp_path), "processor": str(files["pickscore"]["processor"])}
    scores = rewards.load("pickscore", device="cpu", **options)(images, PROMPTS)
    assert not torch.equal(scores, scores.half().float())


@torch.no_grad()
def test_hpsv2_is_the_cosine_of_its_own_vit_h_on_the_whole_image(load, images, files):
    model = open_clip.create_model("ViT-H-14")
    model.load_state_dict(torch.load(files["hpsv2"]["weights"])["state_dict"])
    seen = (images * 255).round() / 255
    seen = F.interpolate(seen, size=(23, 32), mode="bicubic", antialias=True)  # 40 x 56 with the longer side at 32
    seen = F.pad(seen, (0, 0, 4, 5))
    image = model.eval().encode_image((seen - torch.tensor(CLIP_MEAN).view(3, 1, 1)) / torch.tensor(CLIP_STD).view(3, 1, 1))
    text = model.encode_text(open_clip.get_tokenizer("ViT-H-14")(PROMPTS))
    close(load("hpsv2")(images, PROMPTS), F.cosine_similarity(image, text))


@torch.no_grad()
def test_aesthetic_is_a_linear_head_on_the_unit_embedding_of_openais_clip(load, images, files):
    model = open_clip.create_model("ViT-L-14", force_quick_gelu=True)
    model.load_state_dict(torch.load(files["aesthetic"]["pretrained"])["state_dict"])
    features = model.eval().encode_image(pixels(images, 32))
    head = reference_weights.linear_head(768)

    def rate(x):
        for place, *_ in reference_weights.HEAD:
            x = x @ head[f"layers.{place}.weight"].T + head[f"layers.{place}.bias"]
        return x.squeeze(1)

    scores = load("aesthetic")(images, PROMPTS)
    close(scores, rate(features / features.norm(dim=1, keepdim=True)))
    assert not torch.allclose(scores, rate(features), atol=1e-3)
    assert torch.equal(scores, load("aesthetic")(images, ["anything"] * 5)), "it does not read the prompt"


def attend(queries, keys, values, mask=None):
    """Attention of 2 heads, 64 wide; mask (keys,) is True where a key counts."""
    split = [x.unflatten(-1, (2, 64)).transpose(0, 1) for x in (queries, keys, values)]
    scores = split[0] @ split[1].transpose(1, 2) / 8
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ split[2]).transpose(0, 1).flatten(1)


def blip(state, image, prompt):
    """ImageReward by the names of BLIP's own code, for one image (3, 32, 32) and prompt."""

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name, eps):
        return F.layer_norm(x, (128,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    eye, bert = "blip.visual_encoder", "blip.text_encoder"
    kernel, bias = state[f"{eye}.patch_embed.proj.weight"], state[f"{eye}.patch_embed.proj.bias"]
    patches = F.conv2d(image[None], kernel, bias, stride=16)[0].flatten(1).T
    x = torch.cat([state[f"{eye}.cls_token"][0], patches]) + state[f"{eye}.pos_embed"][0]
    for i in range(2):
        block = f"{eye}.blocks.{i}"
        x = x + linear(
            attend(*linear(norm(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv").chunk(3, -1)), f"{block}.attn.proj"
        )
        x = x + linear(F.gelu(linear(norm(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    seen = norm(x, f"{eye}.norm", 1e-6)

    ids = [reference_weights.WORDS.index(word) for word in ["[CLS]", *prompt.split(), "[SEP]"]]
    mask = torch.arange(35) < len(ids)
    ids = torch.tensor(ids + [0] * (35 - len(ids)))
    words = state[f"{bert}.embeddings.word_embeddings.weight"][ids]
    h = norm(words + state[f"{bert}.embeddings.position_embeddings.weight"][:35], f"{bert}.embeddings.LayerNorm", 1e-12)
    for i in range(2):
        layer = f"{bert}.encoder.layer.{i}"
        for name, source, counted in ((f"{layer}.attention", None, mask), (f"{layer}.crossattention", seen, None)):
            source = h if source is None else source
            query, key, value = (
                linear(x, f"{name}.self.{part}") for x, part in ((h, "query"), (source, "key"), (source, "value"))
            )
            mixed = linear(attend(query, key, value, counted), f"{name}.output.dense")
            h = norm(h + mixed, f"{name}.output.LayerNorm", 1e-12)
        inner = F.gelu(linear(h, f"{layer}.intermediate.dense"))
        h = norm(h + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm", 1e-12)
    score = h[0]
    for place, *_ in reference_weights.HEAD:
        score = linear(score, f"mlp.layers.{place}")
    return (score - 0.16717362830052426) / 1.0333394966054072


@torch.no_grad()
def test_imagereward_is_blip_written_out(load, images):
    state = reference_weights.imagereward()
    expected = [blip(state, image, prompt) for image, prompt in zip(pixels(images, 32), PROMPTS, strict=True)]
    close(load("imagereward")(images, PROMPTS), torch.cat(expected))


@torch.no_grad()
def test_imagereward_cuts_prompts_at_35_tokens(load, images):
    reward = load("imagereward")
    long = " ".join(["cat"] * 33)
    scores = reward(images[[0, 0, 0]], [long, long + " dog", long[:-3] + "dog"])
    assert scores[1].item() == pytest.approx(scores[0].item(), abs=1e-5)
    assert scores[2].item() != pytest.approx(scores[0].item(), abs=1e-3)


@torch.no_grad()
def test_hpsv3_is_the_mean_at_the_reward_token_with_plain_positions(load, images, tmp_path):
    model, head = reference_weights.hpsv3(tmp_path)
    reward = load("hpsv3")
    scores = reward(images[:2], PROMPTS[:2])
    tokenizer = reward.processor.tokenizer
    for i in range(2):
        # 40 x 56 pixels to at least 256 * 28 * 28 in multiples of 28: once, although that is more than 256 * 28 * 28.
        picture = pil(images[i]).resize((19 * 28, 14 * 28), Image.Resampling.BICUBIC)
        seen = Qwen2VLImageProcessor()(images=[picture], return_tensors="pt")
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            + "<|image_pad|>" * (19 * 14)
            + "<|vision_end|>"
            + hpsv3.INSTRUCTION.replace("{text_prompt}", PROMPTS[i])
            + "<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = tokenizer(text, return_tensors="pt").input_ids
        embedded = model.get_input_embeddings()(ids)
        patches = model.model.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"]).pooler_output
        embedded[ids == model.config.image_token_id] = patches

        def rate(positions):
            hidden = model.model.language_model(inputs_embeds=embedded, position_ids=positions).last_hidden_state
            x = hidden[0, ids[0].tolist().index(tokenizer.convert_tokens_to_ids("<|Reward|>"))]
            for place in (0, 3, 5):
                x = x @ head[f"rm_head.{place}.weight"].T + head[f"rm_head.{place}.bias"]
                x = x if place == 5 else x.relu()
            return x[0]

        assert scores[i].item() == pytest.approx(rate(None).item(), rel=1e-3, abs=1e-4)
        kinds = (ids == model.config.image_token_id).int()
        rows_and_columns, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=seen["image_grid_thw"])
        assert scores[i].item() != pytest.approx(rate(rows_and_columns).item(), rel=1e-2), "Qwen2-VL's own positions"


def test_hpsv3_keeps_the_published_text_and_refuses_prompts_with_its_tokens(load, images):
    text = hpsv3.INSTRUCTION
    for part in ("the best. \n\n**Visual Quality:**  \nEvaluate", "possible. \n\n**Text Alignment:**  \nAssess"):
        assert part in text
    assert text.endswith("{text_prompt}\n\n\n\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n")
    for token in ("<|Reward|>", "<|image_pad|>"):
        with pytest.raises(ValueError, match="a token of the model's own"):
            load("hpsv3")(images[:1], [f"a cat {token}"])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch_and_images_are_rgb(load, images, name):
    together = load(name, batch_size=64)
    values = scored_unchanged(name, together, images, PROMPTS)
    torch.testing.assert_close(rewards.score(name, load(name, batch_size=2), images, PROMPTS), values, rtol=1e-4, atol=1e-5)
    assert len(set(values.tolist())) == 5
    assert not torch.allclose(together(images.flip(1), PROMPTS), values, atol=1e-4), "BGR is another picture"


@pytest.mark.parametrize("name", ["clip", *NAMES])
def test_values_with_a_gradient_are_those_on_pil_images(load, images, name):
    """Within .01 in the reward's own unit, of values with standard deviations from .005 (aesthetic) to 1.1 (imagereward)."""
    reward, prompts = load(name), PROMPTS[: 2 if name == "hpsv3" else 5]
    leaf = images[: len(prompts)].clone().requires_grad_()
    values = reward(leaf, prompts)
    assert values.requires_grad
    with torch.no_grad():
        expected = reward(leaf, prompts)
    torch.testing.assert_close(values.detach(), expected, rtol=0, atol=1e-2)
    torch.testing.assert_close(values.detach(), expected, rtol=0, atol=0.1 * expected.std().item())
    assert not torch.equal(values, expected), "without a gradient it is the PIL path"


@pytest.mark.parametrize("name", ["clip", *NAMES])
def test_the_gradient_is_the_finite_difference_in_float64(load, images, name):
    # Qwen2-VL rotates queries and keys in float32, whatever its dtype
    count, step, tolerance = (1, 3e-3, 1e-3) if name == "hpsv3" else (3, 1e-6, 1e-5)
    reward, x, prompts = load(name).double(), images[:count].double(), PROMPTS[:count]
    gradient = rewards.scoring.value_and_gradient(name, reward, x, prompts, {}).gradient
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    ends = [reward((x + sign * step * direction).requires_grad_(), prompts).detach() for sign in (1, -1)]
    slope = (gradient * direction).flatten(1).sum(1)
    assert slope.abs().min() > 1e-4
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=tolerance, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_the_rewards_gets_a_clear_error(load, files, name, tmp_path):
    options = {key: str(value) for key, value in files[name].items()}
    with pytest.raises(ValueError, match=f"{name}: .*"):
        rewards.load(name, **{**options, "weights": str(tmp_path / "missing.pt")})
    garbage = tmp_path / ("garbage.safetensors" if name == "hpsv3" else "garbage.pt")
    garbage.write_bytes(b"<html>not found</html>" * 9)
    with pytest.raises(ValueError, match=f"{name}: .*garbage"):
        rewards.load(name, **{**options, "weights": str(garbage)})


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_without_one_tensor_is_refused_rather_than_filled_at_random(files, name, tmp_path):
    source = files[name]["weights"]
    if name == "pickscore":
        target = reference_weights.pickscore(tmp_path / "pickscore")
        file = target / "model.safetensors"
    else:
        target = file = tmp_path / source.name
    if file.suffix == ".safetensors":
        state = load_file(source / "model.safetensors" if name == "pickscore" else source)
        del state[list(state)[-1]]
        save_file(state, file, metadata={"format": "pt"})
    else:
        saved = torch.load(source)
        state = saved.get("state_dict", saved)
        del state[list(state)[-1]]
        torch.save(saved, file)
    options = {key: str(value) for key, value in files[name].items()}
    with pytest.raises(ValueError, match=r"lacks|Missing key"):
        rewards.load(name, **{**options, "weights": str(target)})


@torch.no_grad()
def test_siglip_is_squashed_to_its_own_pixels_and_gives_its_probability(images, tmp_path):
    file = reference_weights.open_clip_file("ViT-B-16-SigLIP2", tmp_path / "siglip2.pt")
    model = open_clip.create_model("ViT-B-16-SigLIP2")
    model.load_state_dict(torch.load(file)["state_dict"])
    half = (0.5, 0.5, 0.5)
    image = model.eval().encode_image(pixels(images, 64, 64, mean=half, std=half), normalize=True)
    text = model.encode_text(open_clip.get_tokenizer("ViT-B-16-SigLIP2")(PROMPTS), normalize=True)
    cosine = (image * text).sum(-1)
    options = {"model": "ViT-B-16-SigLIP2", "pretrained": str(file)}
    close(rewards.load("clip", **options)(images, PROMPTS), cosine)
    probability = torch.sigmoid(model.logit_scale.exp() * cosine + model.logit_bias)
    close(rewards.load("clip", score="probability", **options)(images, PROMPTS).logit(), probability.logit())
    with pytest.raises(ValueError, match="no logit bias"):
        rewards.load("clip", score="probability")


@torch.no_grad()
def test_clip_takes_the_activation_that_a_tag_was_trained_with(images, tmp_path, monkeypatch):
    """open_clip itself only warns that its ViT-L-14 is GELU and OpenAI's weights are QuickGELU."""
    file = reference_weights.open_clip_file("ViT-L-14", tmp_path / "openai.pt")
    for module in (open_clip, open_clip.factory):
        monkeypatch.setattr(module, "download_pretrained", lambda tag, cache_dir=None: str(file))
    tag = rewards.load("clip", model="ViT-L-14", pretrained="openai")(images, PROMPTS)
    named = rewards.load("clip", model="ViT-L-14-quickgelu", pretrained=str(file))(images, PROMPTS)
    assert torch.equal(tag, named)
    assert not torch.allclose(tag, rewards.load("clip", model="ViT-L-14", pretrained=str(file))(images, PROMPTS), atol=1e-4)
