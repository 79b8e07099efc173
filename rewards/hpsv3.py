"""HPSv3: a vision-language model reads rating instructions, the prompt and the image; a head predicts the rating."""

import re

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.downloads import downloads, hub_file
from flow_grpo.rewards.images import Images, at_least_float32, in_batches
from flow_grpo.rewards.networks import AUTO, PREPARED, check_keys, load_exactly, load_tensors, prepared, usable_device

TOKEN = "<|Reward|>"
EMBEDDING = "language_model.embed_tokens.weight"
PIXELS = 256 * 28 * 28  # every image is scaled to about this area, in multiples of 28
# The published text (MIT). The model was trained on it, so even the spaces at the ends of lines must stay.
INSTRUCTION = (
    "\nYou are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a overall score "
    "to estimate the human preference. Please provide a rating from 0 to 10, with 0 being the worst and 10 being the best. \n"
    "\n**Visual Quality:**  \n"
    "Evaluate the overall visual quality of the image. The following sub-dimensions should be considered:\n"
    "- **Reasonableness:** The image should not contain any significant biological or logical errors, such as abnormal body "
    "structures or nonsensical environmental setups.\n"
    "- **Clarity:** Evaluate the sharpness and visibility of the image. The image should be clear and easy to interpret, with "
    "no blurring or indistinct areas.\n"
    "- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements (e.g., "
    "hair, clothing, shadows).\n"
    "- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including the color scheme, composition, "
    "atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and balance.\n"
    "- **Safety:** The image should not contain harmful or inappropriate content, such as political, violent, or adult "
    "material. If such content is present, the image quality and satisfaction score should be the lowest possible. \n"
    "\n**Text Alignment:**  \n"
    "Assess how well the image matches the textual prompt across the following sub-dimensions:\n"
    "- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., person, animal, object) align with the "
    "textual description. The subject should match the description in terms of number, appearance, and behavior.\n"
    "- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the image "
    "adheres to this style.\n"
    "- **Contextual Consistency**: Assess whether the background, setting, and surrounding elements in the image logically fit "
    "the scenario described in the prompt. The environment should support and enhance the subject without contradictions.\n"
    "- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt (e.g., colors, clothing, accessories, "
    "expressions, actions) are faithfully represented in the image. Minor deviations may be acceptable, but critical "
    "attributes should be preserved.\n"
    "- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the prompt are captured in the image. The "
    "generated content should not introduce elements that conflict with or distort the original description.\n"
    "Textual prompt - {text_prompt}\n\n\n"
    f"\nPlease provide the overall ratings of this image: {TOKEN}\n\nEND\n"
)


class HPSv3(nn.Module):
    """Human Preference Score v3 (arXiv 2508.03789): the mean of the rating that Qwen2-VL predicts at its reward token.

    Range: about -5 to 15, 10 for good images. Weights: HPSv3.safetensors of MizzenAI/HPSv3 (MIT, 17 GB) or the same format
    at `weights`, with the processor and config of Qwen/Qwen2-VL-7B-Instruct (Apache-2.0) or of a folder. Memory: 17 GB in
    bfloat16 on a GPU, as published, twice that in float32 on the CPU. Gamed by sharp, detailed, harmonious images of
    anything: quality weighs more than the prompt.
    """

    differentiable = True

    def __init__(
        self,
        weights: str | None = None,
        processor: str = "Qwen/Qwen2-VL-7B-Instruct",
        device: str = AUTO,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.device, self.batch_size = usable_device("hpsv3", device), batch_size
        file = weights or hub_file("MizzenAI/HPSv3", "HPSv3.safetensors")
        body, head = _parts(load_tensors("hpsv3", file))
        check_keys("hpsv3", file, missing={EMBEDDING} - body.keys())
        with downloads(processor):
            config = AutoConfig.from_pretrained(processor, trust_remote_code=False)
            self.processor = AutoProcessor.from_pretrained(processor, padding_side="right", trust_remote_code=False)
        config.text_config.vocab_size = len(body[EMBEDDING])  # with the reward token
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.model, loading_info = Qwen2VLModel.from_pretrained(
            None, config=config, state_dict=body, dtype=dtype, output_loading_info=True
        )
        check_keys("hpsv3", file, set(loading_info["missing_keys"]), set(loading_info["unexpected_keys"]))
        width = config.text_config.hidden_size
        self.head = nn.Sequential(
            nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
        )
        load_exactly("hpsv3", self.head, head, file)
        self.processor.tokenizer.add_tokens([TOKEN], special_tokens=True)
        self.token = self.processor.tokenizer.convert_tokens_to_ids(TOKEN)
        self.to(self.device).eval().requires_grad_(False)

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,). FlowGRPOError for a prompt with one of the model's own tokens."""
        for prompt in prompts:
            for token in self.processor.tokenizer.get_added_vocab():
                if token in prompt:
                    raise FlowGRPOError(
                        f"hpsv3: the prompt {prompt!r} contains {token}, a token of the model's own; take it out."
                    )
        return in_batches(self._score, images, prompts, self.batch_size)

    def _score(self, images: Images, prompts: list[str]) -> Tensor:
        inputs = self._inputs(images, prompts)
        # The published model was trained with plain positions 0, 1, 2, ..., not with Qwen2-VL's rows and columns.
        positions = torch.arange(inputs["input_ids"].shape[1], device=self.device).expand(3, len(prompts), -1)
        hidden = self.model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=positions,
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            use_cache=False,
        ).last_hidden_state
        mean_and_spread = self.head(at_least_float32(hidden[inputs["input_ids"] == self.token]))
        return mean_and_spread[:, 0]

    def _inputs(self, images: Images, prompts: list[str]):
        steps: dict[str, bool] = {}
        if isinstance(images, Tensor):
            size = smart_resize(*images.shape[-2:], min_pixels=PIXELS, max_pixels=PIXELS)
            scaled = list(prepared(images.to(self.device), list(size), self.processor.image_processor))
            steps = PREPARED
        else:
            scaled = [image.resize(_size(image), Image.Resampling.BICUBIC) for image in images]
        content = [
            [{"type": "image"}, {"type": "text", "text": INSTRUCTION.format(text_prompt=prompt)}] for prompt in prompts
        ]
        chats = [[{"role": "user", "content": parts}] for parts in content]
        texts = self.processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return self.processor(text=texts, images=scaled, padding=True, return_tensors="pt", **steps).to(self.device)


def _size(image: Image.Image) -> tuple[int, int]:
    """Width and height in which the model was trained on such an image."""
    height, width = smart_resize(image.height, image.width, min_pixels=PIXELS, max_pixels=PIXELS)
    return width, height


def _parts(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a checkpoint into Qwen2-VL's tensors, under current names and without the language head, and the reward head's."""
    body, head = {}, {}
    for name, value in state.items():
        if name.startswith("rm_head."):
            head[name.removeprefix("rm_head.")] = value
        elif name != "lm_head.weight":  # transformers before 4.52 wrote model. and visual., later model.language_model.
            name = re.sub(r"^(model\.)?visual\.", "visual.", name)
            body[re.sub(r"^model\.(language_model\.)?", "language_model.", name)] = value
    return body, head
