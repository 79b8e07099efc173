"""PickScore: CLIP fine-tuned on which of two images the users of a web application preferred."""

import torch
from torch import Tensor, nn
from transformers import AutoProcessor, CLIPModel

from flow_grpo.errors import FlowGRPOError
from flow_grpo.rewards.downloads import NotDownloaded, downloads
from flow_grpo.rewards.images import Images, in_batches, unique
from flow_grpo.rewards.networks import AUTO, PREPARED, check_keys, prepared, usable_device


class PickScore(nn.Module):
    """PickScore (arXiv 2305.01569): CLIP's logit, exp(logit_scale) * cosine, the unit of published results.

    Range: about 17 to 24. Weights: yuvalkirstain/PickScore_v1 (MIT, 3.9 GB) with the processor of
    laion/CLIP-ViT-H-14-laion2B-s32B-b79K, or local folders of the same format. Memory: 4 GB in float32. Gamed by glossy,
    saturated, centred images; counts, positions and text have little influence.
    """

    differentiable = True

    def __init__(
        self,
        weights: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str = AUTO,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.device, self.batch_size = usable_device("pickscore", device), batch_size
        try:
            with downloads(weights, processor):
                self.processor = AutoProcessor.from_pretrained(processor, trust_remote_code=False)
                self.model, loading_info = CLIPModel.from_pretrained(weights, dtype=torch.float32, output_loading_info=True)
        except NotDownloaded:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise FlowGRPOError(
                f"pickscore: can't load weights={weights} with processor={processor}: {type(error).__name__}: {reason}"
            ) from error
        # transformers would fill them with random numbers
        check_keys("pickscore", weights, missing=set(loading_info["missing_keys"]))
        self.model.to(self.device).eval().requires_grad_(False)

    def forward(self, images: Tensor, prompts: list[str]) -> Tensor:
        """images (B, 3, H, W) in [0, 1]; returns (B,)."""
        return in_batches(self._score, images, prompts, self.batch_size)

    def _score(self, images: Images, prompts: list[str]) -> Tensor:
        texts, indices = unique(prompts)
        steps: dict[str, bool] = {}
        if isinstance(images, Tensor):
            processor = self.processor.image_processor
            images, steps = prepared(images.to(self.device), [processor.size["shortest_edge"]], processor), PREPARED
        inputs = self.processor(
            text=texts, images=images, padding=True, truncation=True, max_length=77, return_tensors="pt", **steps
        ).to(self.device)
        output = self.model(**inputs)  # its embeddings are unit vectors
        return self.model.logit_scale.exp() * (output.image_embeds * output.text_embeds[indices]).sum(-1)
