"""Ideas of papers that are not in the package, each as a patch of it, against the config without it, on both embedded worlds.

    python benchmarks/ideas.py --seeds 5

Finished runs are kept, so the same command goes on; `--done` shows what there is. Values are means over the seeds, the lowest and the
highest in brackets; they depend on no time, so other work may run beside it.
"""

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from anchors import cell
from torch import Tensor

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer, sampling, trainer
from flow_grpo.objectives import Loss
from flow_grpo.policy.policy import Policy
from flow_grpo.training import losses
from flow_grpo.training.forward_process_loss import ForwardProcessLoss, NoiseLevel, add_noise
from flow_grpo.types import Experience, NoisedImage, PromptBatch, Scores, Trajectory, take_rows

WORLDS = {  # config: its settings, the images of a group, and what is measured
    "tiny_ocr": (["steps=8", "evaluation.every=8", "evaluation.max_prompts=128"], 4, ("ocr_exact", "clip")),
    "tiny_shapes": (["steps=12", "evaluation.every=12", "prompts_per_step=16"], 4, ("shapes_exact", "clip")),
}


@contextmanager
def nothing(trained: FlowGRPOTrainer) -> Iterator[None]:
    """The package as it is."""
    yield


@contextmanager
def largest_half(trained: FlowGRPOTrainer) -> Iterator[None]:
    """Train on the half of each group whose advantages are largest in size (Pro-GRPO, arXiv 2512.15347)."""
    whole = trainer.experience_of

    def half(*args: Any, **kwargs: Any) -> Experience:
        experience = whole(*args, **kwargs)
        size = experience.rows_per_group // 2
        by_group = experience.rows.view(-1, experience.rows_per_group)
        largest = experience.advantage[by_group].abs().argsort(dim=1, descending=True, stable=True)[:, :size]
        return dataclasses.replace(
            experience, rows=by_group.gather(1, largest.sort(1).values).flatten(), rows_per_group=size
        )

    with mock.patch.object(trainer, "experience_of", half):
        yield


@contextmanager
def below_a_bound(trained: FlowGRPOTrainer) -> Iterator[None]:
    """Groups whose mean reward is 0.9 of its maximum or more have no advantage (Edit-R1 of UniWorld-V2, arXiv 2510.16888)."""
    whole, most = trainer.experience_of, sum(trained.rewards.weights.values())

    def bounded(batch: PromptBatch, trajectory: Trajectory, scores: Scores, *args: Any, **kwargs: Any) -> Experience:
        experience = whole(batch, trajectory, scores, *args, **kwargs)
        low = losses.mean_by_group(scores.total, batch.group, torch.ones_like(batch.group, dtype=torch.bool)) < 0.9 * most
        return dataclasses.replace(experience, advantage=experience.advantage * low)

    with mock.patch.object(trainer, "experience_of", bounded):
        yield


@contextmanager
def paired_noise(trained: FlowGRPOTrainer) -> Iterator[None]:
    """Every second noise level has the noise level of the one before, and its noise with the other sign."""
    drawn = losses.draw_noise_level

    def paired(*args: Any, draw: int, **kwargs: Any) -> NoiseLevel:
        level = drawn(*args, draw=draw - draw % 2, **kwargs)
        return dataclasses.replace(level, eps=-level.eps) if draw % 2 else level

    with mock.patch.object(losses, "draw_noise_level", paired):
        yield


@contextmanager
def kernel(trained: FlowGRPOTrainer) -> Iterator[None]:
    """The loss at a noised state is the mean over the endpoints of its group, weighed by a Gaussian kernel (arXiv 2608.14430).

    The weight of endpoint j at x is that of exp(-|x - (1 - s) x0_j|^2 / (2 h^2 s^2)), h the median distance of the group's endpoints.
    """
    group = trained.args.images_per_prompt
    build = ForwardProcessLoss.__init__

    def smoothed(loss: Callable[..., Loss], image: NoisedImage, advantage: Tensor) -> Loss:
        x0 = image.x0.view(-1, group, *image.x0.shape[1:])
        flat = x0.flatten(2)
        distance = torch.cdist(flat, flat)
        h = distance[:, ~torch.eye(group, dtype=torch.bool)].median(1).values.repeat_interleave(group)
        shifted, logits = [], []
        for shift in range(group):
            other = x0.roll(shift, 1).reshape(image.x0.shape)
            of_other = advantage.view(-1, group).roll(shift, 1).flatten()
            gap = image.x - (1 - image.column) * other
            logits.append(-gap.flatten(1).square().sum(1) / (2 * (h * image.sigma).square()))
            shifted.append(loss(dataclasses.replace(image, x0=other, eps=gap / image.column), of_other))
        weights = torch.stack(logits).softmax(0)
        value = sum(weight * part.value for weight, part in zip(weights, shifted, strict=True))
        return Loss(value, shifted[0].metrics)

    def built(self: ForwardProcessLoss, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.loss = partial(smoothed, self.loss)

    with mock.patch.object(ForwardProcessLoss, "__init__", built):
        yield


@contextmanager
def normed_a(trained: FlowGRPOTrainer) -> Iterator[None]:
    """The LoRA is B Norm(A) x: rows of A keep the length that they had at the start (NoRA, arXiv 2608.31036)."""
    with ExitStack() as stack:
        for layer in trained.policy.lora.lora_layers():
            a = layer.lora_A["default"]
            length = a.weight.detach().norm(dim=1)
            handle = a.register_forward_hook(lambda a, _, out, length=length: out * (length / a.weight.norm(dim=1)))
            stack.callback(handle.remove)
        yield


def data_anchor(weight: float) -> Callable[[FlowGRPOTrainer], Any]:
    """The flow-matching loss on images of the base model for the same prompts, at the same noise levels (DDRL, arXiv 2512.04332)."""

    @contextmanager
    def patched(trained: FlowGRPOTrainer) -> Iterator[None]:
        build, of_rows, args = ForwardProcessLoss.__init__, ForwardProcessLoss.losses, trained.args
        of_base: list[Tensor] = []  # the final latents of the step

        def built(self: ForwardProcessLoss, policy: Policy, experience: Experience, *rest: Any, **kwargs: Any) -> None:
            build(self, policy, experience, *rest, **kwargs)
            schedule, shape = policy.schedule(args.sampling.steps)
            start = sampling.batch_noise(shape, experience.batch, args.seed, "data", trained.step)
            rows = torch.arange(len(start))
            with torch.no_grad(), policy.base_model():
                velocity = policy.velocity_fn(schedule, self.conditioning, rows)
                solver = sampling.SOLVERS[args.sampling.solver]
                of_base[:] = [sampling.rollout(velocity, schedule=schedule, x=start, solver=solver).final]

        def with_data(self: ForwardProcessLoss, rows: Tensor, is_real: Tensor) -> Iterator[Loss]:
            for level, loss in zip(self.noise_levels, of_rows(self, rows, is_real), strict=True):
                x0, eps, sigma = (take_rows(values, rows) for values in (of_base[0], level.eps, level.sigma))
                v = self.policy.velocity(add_noise(x0, eps, sigma), level.timestep[rows], self.conditioning, rows)
                error = (v - (eps - x0)).square().flatten(1).mean(1)
                yield Loss(loss.value + weight * error, {**loss.metrics, "data": error.detach()})

        with (
            mock.patch.object(ForwardProcessLoss, "__init__", built),
            mock.patch.object(ForwardProcessLoss, "losses", with_data),
        ):
            yield

    return patched


DIVERSITY = "diversity"
NO_KL = "objective.kl_weight=1e-12"  # and yet a loss on all rows
# patch, images of a group over the usual, settings
IDEAS: dict[str, tuple[Callable[[FlowGRPOTrainer], Any], float, list[str]]] = {
    "as it is": (nothing, 1, []),
    "twice the images": (nothing, 2, []),
    "twice the images, half trained": (largest_half, 2, []),
    "groups below a mean of 0.9": (below_a_bound, 1, []),
    "four noise levels": (nothing, 1, ["objective.num_noise_levels=4"]),
    "four noise levels, two and their negatives": (paired_noise, 1, ["objective.num_noise_levels=4"]),
    "kernel over the group": (kernel, 1, []),
    "B Norm(A) x": (normed_a, 1, []),
    "no KL": (nothing, 1, [NO_KL]),
    "data of the base model, 0.03, no KL": (data_anchor(0.03), 1, [NO_KL]),
    "data of the base model, 0.3, no KL": (data_anchor(0.3), 1, [NO_KL]),
}


def trained(folder: Path, config: str, idea: str, seed: int) -> dict[str, float]:
    """The last held-out measures of a run, which is begun anew if it was left."""
    patch, factor, own = IDEAS[idea]
    settings, images, _ = WORLDS[config]
    done = folder / "measures.json"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        size = int(images * factor)
        prompts = 16
        every = [f"images_per_prompt={size}", f"microbatch={size * prompts}", "trackers=[]", "dtype=fp32"]
        args = FlowGRPOConfig.from_yaml(config, [*settings, *every, *own, f"seed={seed}", f"output_dir={folder}"])
        run = FlowGRPOTrainer(args=args)
        with patch(run):
            measures = run.train()
        done.write_text(json.dumps(measures))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    *_, diversity = (row[f"monitor/{DIVERSITY}"] for row in rows if f"monitor/{DIVERSITY}" in row)
    return {**json.loads(done.read_text()), DIVERSITY: diversity}


def table(out: Path, seeds: int) -> None:
    """Print what is finished."""
    for config, (_, _, measures) in WORLDS.items():
        names = " | ".join(f"`{name}`" for name in (*measures, DIVERSITY))
        print(f"\n| `{config}` | seeds | {names} |\n|---|---|---|---|---|")
        for idea in IDEAS:
            folders = [folder_of(out, config, idea, seed) for seed in range(seeds)]
            rows = [trained(folder, config, idea, 0) for folder in folders if (folder / "measures.json").is_file()]
            if rows:
                cells = [cell([row[name] for row in rows]) for name in (*measures, DIVERSITY)]
                print(f"| {idea} | {len(rows)} | {' | '.join(cells)} |", flush=True)


def folder_of(out: Path, config: str, idea: str, seed: int) -> Path:
    return out / f"{config}_{''.join(c if c.isalnum() else '_' for c in idea)}_seed{seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ideas"))
    parser.add_argument("--done", action="store_true")
    args = parser.parse_args()
    out = args.out.resolve()
    for config in WORLDS:
        for seed in range(0 if args.done else args.seeds):
            for idea in IDEAS:
                trained(folder_of(out, config, idea, seed), config, idea, seed)
                print(config, idea, seed, flush=True)
    table(out, args.seeds)


if __name__ == "__main__":
    main()
