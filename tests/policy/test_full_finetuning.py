"""`lora: null`: all weights of the transformer are trained."""

import shutil
from functools import partial

import pytest
import torch
from diffusers import AutoModel, DiffusionPipeline
from support.embedded import CALL, PROMPTS, short_run, tiny_policy
from support.process_runs import call_in_ranks, config, forked, run_alone, same, train_on_machines
from support.run_contents import MEASURED

from flow_grpo.distributed.processes import Processes
from flow_grpo.evaluation import measure, targets
from flow_grpo.evaluation.generate import generate_images
from flow_grpo.evaluation.targets import ModelTarget
from flow_grpo.files import WriteError
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.policy.loading import load_policy
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.weights import write_transformer
from flow_grpo.run_folder import checkpoint
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.setup import prepare_policy

WHOLE = ("lora=null", "optimizer.lr=1.0e-4")


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in policy.pipe.transformer.state_dict().items()}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps with a KL to the base model, in bf16, and the folder of the run."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = FlowGRPOTrainer(args=short_run(folder, *WHOLE, "dtype=bf16", "objective.kl_weight=0.1", "save_every=1"))
    base = weights(trainer.policy)
    numbers = []
    step = trainer.training_step
    trainer.training_step = lambda: numbers.append(step()) or numbers[-1]
    trainer.train()
    return trainer, base, numbers, folder


def test_every_weight_is_trained_and_the_base_model_comes_back_to_the_last_bit(trained):
    trainer, base, numbers, _ = trained
    now = weights(trainer.policy)
    still = {name for name in trainer.policy.trainable_parameters() if torch.equal(now[name], base[name])}
    asks = {"add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight"}  # the last block throws away what the text asks
    assert still == {f"transformer_blocks.1.attn.{name}" for name in asks}
    assert all(value.dtype == torch.float32 for value in now.values() if value.is_floating_point())
    assert [row["ratio/first_update_max_deviation"] for row in numbers] == [0, 0]
    assert numbers[0]["kl"] == 0, "the policy still is the base model"
    assert numbers[1]["kl"] > 0
    with trainer.policy.base_model():
        assert equal(weights(trainer.policy), base)
    assert equal(weights(trainer.policy), now)


def moved() -> Policy:
    """All weights other than the base model's."""
    policy = tiny_policy()
    policy.enable_full_finetuning()
    policy.trained.store_base_weights("cpu")
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.mul_(1.01).add_(0.001)
    return policy


def test_the_base_model_may_come_and_go_between_a_pass_and_its_gradient():
    """The same gradient, although the weights were others in between."""
    policy = moved()
    schedule, shape = policy.schedule(4)
    conditioning, rows = policy.encode(PROMPTS), torch.arange(2)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))

    def gradient(between) -> torch.Tensor:
        loss = policy.velocity(x, schedule.timesteps[1], conditioning, rows).square().mean()
        between()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.trainable_parameters().values()))])

    def look() -> None:
        with torch.no_grad(), policy.base_model():
            policy.velocity(x, schedule.timesteps[1], conditioning, rows)

    assert torch.equal(gradient(lambda: None), gradient(look))


def test_the_saved_transformer_is_what_was_trained_here_and_in_plain_diffusers(trained):
    trainer, base, _, folder = trained
    plain = DiffusionPipeline.from_pretrained(trainer.policy.pipe.config._name_or_path, torch_dtype=torch.bfloat16)
    plain.transformer = type(plain.transformer).from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    with trainer.policy.ema.applied():
        expected = {name: value.bfloat16() for name, value in weights(trainer.policy).items()}
    assert equal(plain.transformer.state_dict(), expected)
    again = load_policy(trainer.args.model, "cpu", "bf16", lora=folder / "transformer", **CALL)
    assert equal(weights(again), expected)
    with again.base_model():
        rounded = {name: value.bfloat16() for name, value in base.items()}
        assert equal(weights(again), rounded), "eval shows the base model beside it"
        before = generate_images(again, PROMPTS, [0, 1], 3)
    assert (before - generate_images(again, PROMPTS, [0, 1], 3)).abs().max() > 1e-3
    prepare_policy(again, trainer.args, Processes())
    with torch.no_grad():
        torch._foreach_mul_(list(again.trainable_parameters().values()), 1.001)
    now = weights(again)
    with again.base_model():
        assert equal(weights(again), {name: value.float() for name, value in rounded.items()}), "not what it begins with"
    assert equal(weights(again), now)


def test_a_swap_that_fails_half_way_leaves_the_weights_as_they_were():
    policy = moved()
    now, name = weights(policy), list(policy.trained.base)[20]
    kept = policy.trained.base[name]
    policy.trained.base[name] = kept[..., :0]  # stands for memory that runs out
    with pytest.raises(RuntimeError), policy.base_model():
        pass
    assert equal(weights(policy), now)


def test_an_optimizer_with_plain_numbers_in_its_state_is_restored(tmp_path):
    """As the 8-bit one's step is."""
    trainer = FlowGRPOTrainer(args=short_run(tmp_path))
    trainer.training_step()
    state = trainer.stage.update.optimizer.state_dict()
    for values in state["optimizer"]["state"].values():
        values["step"] = 1
    trainer.stage.update.optimizer.load_state_dict(state)
    restored = trainer.stage.update.optimizer.state_dict()["optimizer"]["state"].values()
    assert {float(values["step"]) for values in restored} == {1}
    assert any(values["exp_avg"].any() for values in restored)


def test_eval_puts_a_run_and_a_checkpoint_on_and_takes_them_off(trained):
    trainer, _, _, folder = trained
    policy = load_policy(trainer.args.model, "cpu", "bf16", **CALL)
    plain = weights(policy)
    with trainer.policy.ema.applied():
        averaged = weights(trainer.policy)
    base, run = ModelTarget("base", "", trainer.args), targets.resolve_targets([str(folder)], targets.TargetOptions())[-1]
    for target, expected in (
        (run, {name: value.bfloat16() for name, value in averaged.items()}),
        (base, plain),
        (ModelTarget("checkpoint", "", trainer.args, checkpoint=folder / "checkpoints" / "step_000002"), averaged),
        (base, plain),
    ):
        measure.load_target_weights(policy, target)
        assert equal(weights(policy), expected), target.name


def test_a_resumed_run_is_the_same_to_the_last_bit(trained, tmp_path):
    trainer, _, numbers, folder = trained
    again = FlowGRPOTrainer(args=trainer.args.model_copy(update={"output_dir": str(tmp_path)}))
    again.state.load_state_dict(checkpoint.read(folder / "checkpoints", 1))
    metrics = again.training_step()
    assert {n: v for n, v in metrics.items() if not n.startswith(MEASURED)} == {
        n: v for n, v in numbers[1].items() if not n.startswith(MEASURED)
    }
    assert equal(weights(again.policy), weights(trainer.policy))
    with again.policy.ema.applied(), trainer.policy.ema.applied():
        assert equal(weights(again.policy), weights(trainer.policy))


@pytest.mark.slow
def test_two_processes_that_share_the_weights_do_what_one_does(tmp_path):
    """FSDP2 of what is trained: gradients, moments, averages and checkpoints are sharded, and gathered to be written."""
    once = "sampling={steps: 2, transition: cps, noise_level: 0.8, window: {schedule: all}}"
    common = [*WHOLE, "memory.shard=true", "objective.kl_weight=0.1", "microbatch=6", once]
    run_alone(config(tmp_path / "1", *common))
    forked(config(tmp_path / "2", *common), 2)
    same(tmp_path / "1", tmp_path / "2")
    for processes in (1, 2):
        folder = tmp_path / f"resumed_{processes}"
        file = config(folder, *common)
        shutil.copytree(tmp_path / "2" / "run", folder / "run")
        shutil.rmtree(folder / "run" / "checkpoints" / "step_000002")
        run_alone(file, resume=True) if processes == 1 else forked(file, processes, "--resume")
        state, expected = (checkpoint.latest(place / "run" / "checkpoints")[0] for place in (folder, tmp_path / "1"))
        for part in ("adapter", "ema"):
            torch.testing.assert_close(state[part], expected[part], rtol=0, atol=2e-5)
    shared, alone = (AutoModel.from_pretrained(str(tmp_path / place / "run" / "transformer")) for place in "21")
    torch.testing.assert_close(shared.state_dict(), alone.state_dict(), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [WHOLE, ()])
def test_shards_within_two_machines_do_what_one_process_does(tmp_path, whole):
    run_alone(config(tmp_path / "1", *whole))
    call_in_ranks(partial(train_on_machines, config(tmp_path / "4", *whole, "memory.shard=hsdp"), 2), 4)
    same(tmp_path / "1", tmp_path / "4")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        *(
            (f"objective={{name: {name}}}", "keeps a slow copy of the policy as a second LoRA")
            for name in ("nft", "crd", "mend", "opsd")
        ),
        ("memory.quantize=nf4", "lora=null trains all of them"),
    ],
)
def test_what_needs_a_base_that_is_not_trained_is_refused(tmp_path, setting, sentence):
    more = ["sampling={steps: 4}"] if "objective" in setting else []
    with pytest.raises(ValueError, match=sentence):
        short_run(tmp_path, *WHOLE, *more, setting)


def test_the_plan_knows_what_all_weights_take(tmp_path):
    """Weights, two moments, an average and, here on a CPU, the base model: five times four bytes each, and a share of it."""
    args = short_run(tmp_path, *WHOLE, "memory.shard=true")
    count = sum(p.numel() for p in load_policy(args.model, "cpu", "fp32", **CALL).pipe.transformer.parameters())
    for shares in (1, 2):
        persistent = StepEstimator(args, cuda=False, count=shares).estimate(8).persistent
        assert persistent["transformer"] + persistent["base weights"] == pytest.approx(20 * count / shares)


def test_a_transformer_that_can_not_be_written_is_one_sentence(tmp_path):
    policy = tiny_policy()
    (tmp_path / "diffusion_pytorch_model.safetensors").mkdir()
    with pytest.raises(WriteError, match="could not be written: is a directory"):
        write_transformer(policy.pipe.transformer, "SD3Transformer2DModel", {"a": torch.zeros(2)}, tmp_path)
