"""A real policy that computes a step in milliseconds: Stable Diffusion 3 with two blocks of 8 channels, on pictures of 8 x 8 pixels.

The tests of the loop and its parts run on it. `settings` are those of a run whose steps are as small.
"""

import functools
from types import SimpleNamespace
from typing import Any

import diffusers as d
import torch
from torch import Tensor

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.objective_by_name import section_type
from flow_grpo.data.prompts import PromptSampler, PromptSet
from flow_grpo.distributed.processes import Processes
from flow_grpo.policy.devices import DTYPES
from flow_grpo.policy.encoding import Conditioning, EmbeddingCache
from flow_grpo.policy.policy import Policy
from flow_grpo.rewards import WeightedSum
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.anchors import References
from flow_grpo.training.critic import CriticAdvantages
from flow_grpo.training.forward_process_loss import ForwardProcessLoss
from flow_grpo.training.group_advantages import GroupAdvantages
from flow_grpo.training.losses import ClipRange, StepLoss
from flow_grpo.training.rollouts import ImageSampler
from flow_grpo.training.update import loss_of_batch
from flow_grpo.types import Experience
from support import families

PROMPTS = PromptSet([f"a {word}" for word in ("cat", "dog", "sun", "owl", "tree", "boat")], [{} for _ in range(6)])
SHAPE = (2, 4, 4)  # of a state
DEFAULTS: dict[str, Any] = {
    "steps": 10,
    "prompts_per_step": 2,
    "images_per_prompt": 3,
    "microbatch": 6,
    "sampling": {"steps": 4},
    "objective": {"transition": "cps", "noise_level": 0.8, "clip_low": 0.1, "clip_high": 0.1},
    "lora": {"rank": 2, "alpha": 4},
    "dtype": "fp32",
    "trackers": {},
}


@functools.cache
def frozen() -> dict[str, Any]:
    """What all policies share."""
    tokenizer = families.clip_tokenizer()
    encoders = {"text_encoder": families.clip(tokenizer, True), "text_encoder_2": families.clip(tokenizer, True)}
    tokenizers = {"tokenizer": tokenizer, "tokenizer_2": tokenizer}
    return {**encoders, **tokenizers, "text_encoder_3": None, "tokenizer_3": None, "vae": families.vae(channels=2)}


@functools.cache
def embeddings(dtype: torch.dtype, guided: bool) -> EmbeddingCache:
    return EmbeddingCache()


def policy(dtype: torch.dtype = torch.float32, lora: bool = True, guidance: float = 1.0) -> Policy:
    """The same random weights each time, with a LoRA that already does something, unless it is the base model that is asked for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = frozen()
        torch.manual_seed(0)
        transformer = d.SD3Transformer2DModel(
            sample_size=4, in_channels=2, out_channels=2, num_layers=2, attention_head_dim=8, num_attention_heads=1,
            joint_attention_dim=64, caption_projection_dim=8, pooled_projection_dim=64, pos_embed_max_size=4,
        )  # fmt: skip
    pipe = d.StableDiffusion3Pipeline(transformer=transformer, scheduler=families.flow(), **parts)
    made = Policy(pipe, dtype, guidance, embedding_cache=embeddings(dtype, guidance > 1), height=8, width=8)
    if lora:
        made.add_lora(2, 4, ["to_q", "to_out.0"], seed=0)
        move(made)
    return made


def move(policy: Policy, by: float = 0.3, seed: int = 0, adapter: str = "default") -> None:
    """Moves every trained parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable_parameters(adapter).values():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def settings(**changes: Any) -> FlowGRPOConfig:
    """The defaults with these changes, section by section."""
    both = {k: {**v, **changes[k]} if isinstance(v, dict) and changes.get(k) else v for k, v in DEFAULTS.items()}
    own = changes.get("objective", {})
    read = section_type(both["objective"].get("name", "grpo"), both["objective"].get("family", "stepwise")).model_fields
    both["objective"] = {key: value for key, value in both["objective"].items() if key in own or key in read}
    if changes.get("stages"):
        both.pop("steps")  # each stage has its own
    return FlowGRPOConfig.model_validate(
        {**changes, **both, **{k: v for k, v in changes.items() if not isinstance(v, dict)}}
    )


def trainer(args: FlowGRPOConfig, **more: Any) -> FlowGRPOTrainer:
    """A run with these settings on the base model, whatever model and size of pictures they name."""
    return FlowGRPOTrainer(policy(DTYPES[args.dtype], lora=False), args=args, **more)


class Rollouts(FlowGRPOTrainer):
    """The trainer's rollouts, with parts that a test chooses."""

    def __init__(self, policy: Policy, args: FlowGRPOConfig, window: list[int], rewards: WeightedSum, **parts: Any) -> None:
        self.policy, self.args, self.rewards, self.processes = policy, args, rewards, parts["processes"]
        self.prompt_sampler = PromptSampler(parts["prompts"], args.seed)
        self.image_sampler = ImageSampler(policy, args, rewards, self.processes)
        self.image_sampler.window = lambda step: window
        groups = GroupAdvantages(args, rewards)
        compare = groups if parts["critic"] is None else CriticAdvantages(policy, parts["critic"], groups)
        stage = SimpleNamespace(args=args, sampler=self.image_sampler, compare=compare, given_images=None)
        self.state = SimpleNamespace(step=0, stage=stage)

    def collect(self, step: int) -> Experience:
        self.state.step = step
        return self.experience()


def collect(trainer: FlowGRPOTrainer, step: int) -> Experience:
    """What a training step of a run would learn from, without an update."""
    trainer.state.step = step
    return trainer.experience()


def rollouts(
    policy: Policy, args: FlowGRPOConfig, window: list[int], rewards: WeightedSum | None = None, **more: Any
) -> Rollouts:
    """The rollouts of these prompts; by default without rewards."""
    parts = {"critic": None, "processes": Processes(), "prompts": PROMPTS, **more}
    return Rollouts(policy, args, window, rewards or WeightedSum({}, {}), **parts)


def experience(policy: Policy, args: FlowGRPOConfig, advantage: Tensor, window: list[int], step: int = 0) -> Experience:
    """Images of the first prompts with advantages (P, G) that are given; a group of zeros has no signal."""
    prompts, images = advantage.shape[:2]
    batch = PROMPTS.head(prompts).repeat(images)
    sampler = rollouts(policy, args, window).image_sampler
    trajectory = sampler.trajectory(step, batch, window, bool(window) and args.objective.keep_graphs)
    signal = advantage.flatten(1).any(1).repeat_interleave(images)
    return Experience(batch, trajectory, advantage.flatten(0, 1), signal.nonzero()[:, 0], images, torch.arange(prompts), {})


class Two(Processes):
    """The first of two processes, of which the other gives what a function makes of this one's value; nothing is shared else."""

    def __init__(self, other: Any = lambda value: value, rank: int = 0) -> None:
        super().__init__(rank, 2)
        self.other = other

    def all_gather(self, value: Any) -> list:
        return [value, self.other(value)][:: -1 if self.rank else 1]

    def gather_on_main(self, value: Any) -> list:
        values = self.all_gather(value)
        return values if self.is_main else []

    def gather_or_raise(self, call: Any, errors: Any = ()) -> list:
        return self.all_gather(call())

    def all_reduce_gradients(self, parameters: list, is_sharded: bool = False) -> None:
        """The other one's gradients are three times as large."""
        assert not is_sharded
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(4)


def step_loss(
    policy: Policy, args: FlowGRPOConfig, experience: Experience, conditioning: Conditioning, clip: ClipRange
) -> StepLoss:
    """The loss on steps that a run with these settings has."""
    references = References(policy, args.objective, 0)
    loss = loss_of_batch(args, experience, conditioning, references, step=0, clip=clip, microbatch=args.microbatch)
    assert isinstance(loss, StepLoss)
    return loss


def forward_process_loss(
    policy: Policy, args: FlowGRPOConfig, experience: Experience, conditioning: Conditioning, step: int
) -> ForwardProcessLoss:
    """The loss on final latents that a run with these settings has."""
    references = References(policy, args.objective, 0)
    loss = loss_of_batch(args, experience, conditioning, references, step=step, clip=ClipRange(), microbatch=args.microbatch)
    assert isinstance(loss, ForwardProcessLoss)
    return loss
