"""What a run keeps of its pictures: bounded, by the process that writes, nothing doubled, and no number of the run moved by it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support import small_policy as small
from support.embedded import short_run
from support.paths import SAMPLE_REWARDS
from support.process_runs import forked
from support.run_contents import MEASURED

from flow_grpo.data.grid import to_bytes
from flow_grpo.evaluation.evaluator import Evaluator
from flow_grpo.evaluation.generate import SEED, generate_images, image_seed
from flow_grpo.run_folder import layout, reader, samples
from flow_grpo.tracking.tracker import read_metrics
from flow_grpo.trainer import FlowGRPOTrainer

LIMIT = "evaluation.max_prompts=10"


def numbers(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read_metrics(folder)]


def kept(folder: Path) -> dict[str, bytes]:
    files = (folder / "pictures").rglob("*")
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.is_file()}


@pytest.mark.usefixtures("no_report")
def test_keeping_images_changes_no_number_of_a_run(tmp_path, monkeypatch):
    small.trainer(short_run(tmp_path / "with", LIMIT)).train()
    monkeypatch.setattr(Evaluator, "record_groups", lambda *given: None)
    monkeypatch.setattr(samples.SampleRecorder, "_save_image", lambda *given: None)
    small.trainer(short_run(tmp_path / "without", LIMIT)).train()
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    one, other = (load_file(tmp_path / n / "lora" / "pytorch_lora_weights.safetensors") for n in ("with", "without"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert any(name.endswith(".webp") for name in kept(tmp_path / "with"))
    assert {Path(name).name for name in kept(tmp_path / "without")} == {"evaluation.json"}, "the monitor needs it"


def test_what_is_kept_is_what_was_drawn_scored_and_compared(tmp_path):
    args = short_run(tmp_path / "run", LIMIT)
    trainer = FlowGRPOTrainer(args=args)
    with trainer.policy.ema.applied():
        image = generate_images(trainer.policy, trainer.eval_set.prompts[:1], [image_seed(SEED, 0)], args.evaluation.steps)
    experience = small.collect(trainer, 0)
    FlowGRPOTrainer(args=args).train()
    first = reader.read_all(tmp_path / "run", layout.EVALUATION)[0]
    seen = np.asarray(Image.open(first["folder"] / layout.prompt_image(0)).convert("RGB")).astype(int)
    assert np.abs(seen - to_bytes(image)[0].astype(int)).max() <= 1, "lossless, up to the rows it was drawn with"
    mean = sum(first["values"]["reward"]) / 10
    assert mean == pytest.approx(read_metrics(tmp_path / "run")[0]["eval/reward"], rel=1e-6)
    (groups,) = [g for g in reader.read_all(tmp_path / "run", layout.GROUPS) if g["step"] == 1]
    by_prompt = {group["prompt"]: group for group in groups["groups"]}
    for number in (0, 1):
        rows = (experience.batch.group == number).nonzero()[:, 0]
        group = by_prompt[experience.batch.prompts[rows[0]]]
        assert group["reward"] == experience.scores.total[rows].tolist()
        assert group["advantage"] == experience.advantage[rows].tolist()


@pytest.mark.slow
@pytest.mark.slow
def test_a_resumed_run_keeps_what_one_run_keeps(tmp_path):
    common = ["steps=4", "save_every=1", "evaluation.every=1", LIMIT]
    FlowGRPOTrainer(args=short_run(tmp_path / "whole", *common)).train()
    args = short_run(tmp_path / "parts", *common)
    FlowGRPOTrainer(args=args.model_copy(update={"steps": 3})).train()
    newest = tmp_path / "parts" / "checkpoints" / "step_000003" / "state.pt"
    newest.write_bytes(b"lost")
    later = tmp_path / "parts" / "pictures" / "step_000003"
    assert later.exists()
    (later / "stale.webp").write_bytes(b"from a step that has not happened")
    FlowGRPOTrainer(args=args).train(resume=True)
    assert kept(tmp_path / "parts").keys() == kept(tmp_path / "whole").keys()
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_keep_one_record(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(short_run(tmp_path / "run", LIMIT, "steps=1", "microbatch=4", "prompts_per_step=4").to_yaml())
    forked(file, 2)
    alone = short_run(tmp_path / "alone", LIMIT, "steps=1", "microbatch=4", "prompts_per_step=4")
    FlowGRPOTrainer(args=alone).train()
    ours, theirs = (reader.read_all(tmp_path / name, layout.EVALUATION) for name in ("alone", "run"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["prompts"] == other["prompts"]
        for name, values in one["values"].items():
            assert values == pytest.approx(other["values"][name], abs=1e-5)
        for name in ("high_frequency_power", "diversity"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
        assert len(one["diversity"]) == 10
    (groups,) = reader.read_all(tmp_path / "run", layout.GROUPS)
    assert len(groups["groups"]) == 2, "the first process's own"
    assert reader.RunReader(tmp_path / "run").machine["processes"] == 2


@pytest.mark.slow
def test_the_lora_of_the_best_evaluation_is_kept(tmp_path):
    """The step at which the held-out reward was best: of a run that is paid for darkness, the first."""
    here = SAMPLE_REWARDS
    settings = [
        f"rewards={{'{here}:brightness': -1}}",
        f"evaluation={{prompts: prompts/signs_eval.txt, max_prompts: 16, every: 2, steps: 3, rewards: ['{here}:scaled']}}",
        "steps=8",
        "images_per_prompt=8",
        "optimizer.lr=8e-3",
    ]
    FlowGRPOTrainer(args=short_run(tmp_path / "run", *settings)).train()
    rows = [row for row in read_metrics(tmp_path / "run") if "eval/reward" in row]
    held_out = [row["eval/scaled"] for row in rows]
    best = rows[held_out.index(max(held_out))]["step"]
    assert rows[-1]["monitor/best_step"] == best < 8, held_out
    assert held_out[-1] < max(held_out)
    again = FlowGRPOTrainer(args=short_run(tmp_path / "again", *settings, f"lora.init_from={tmp_path / 'run' / 'best'}"))
    assert again.evaluate().means()["scaled"] == pytest.approx(max(held_out), abs=1e-4)


def test_of_a_large_group_some_images_from_the_best_to_the_worst_are_kept():
    group = torch.arange(3).repeat_interleave(20)
    reward = torch.cat([torch.linspace(0, 1, 20).flip(0), torch.full((20,), 0.5), torch.linspace(0, 3, 20)])
    wide, narrow, none = samples.most_spread_groups(reward, group)
    assert group[wide].unique().tolist() == [2], "the group whose rewards differ most comes first"
    assert group[narrow].unique().tolist() == [0]
    assert group[none].unique().tolist() == [1]
    assert len(wide) == samples.IMAGES_PER_GROUP
    assert {reward[wide].min().item(), reward[wide].max().item()} == {0.0, 3.0}
    assert wide.tolist() == sorted(wide.tolist()), "in the order they were drawn"
    reward[40] = float("nan")
    assert len(samples.most_spread_groups(reward, group)) == 2, "a group with a dropped reward says nothing"


def test_best_and_worst_prompts_are_those_with_a_number():
    reward = [0.1 * i for i in range(20)]
    reward[19] = float("nan")
    assert samples.best_and_worst(reward) == [18, 17, 16, 15, 3, 2, 1, 0]
    assert samples.best_and_worst([0.2, float("nan"), 0.3]) == [2, 0]


def test_large_images_are_kept_small(tmp_path):
    kept_at = samples.SampleRecorder(tmp_path)
    noise = torch.rand(3, 1024, 768, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "pictures" / "step_000001" / "x.webp"
    kept_at._save_image(file, noise, samples.PROMPT_IMAGE_WIDTH)
    assert Image.open(file).size == (384, 512)
    assert file.stat().st_size < 200_000, "even of noise"
