"""The settings of `memory`: less of it, and the same numbers."""

import importlib.util
import shutil
import sys

import pytest
import torch
from diffusers import DiffusionPipeline
from support.embedded import PROMPTS, short_run, stir, tiny_policy
from support.families import TINY, awake

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.policy import hub, memory
from flow_grpo.policy.loading import load_policy, merge
from flow_grpo.policy.policy import Policy
from flow_grpo.trainer import FlowGRPOTrainer

ROWS = torch.arange(2)


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("flux")
    awake(TINY["flux"].build()).save_pretrained(folder)
    return folder


def velocity(policy, seed: int = 0) -> torch.Tensor:
    schedule, shape = policy.schedule(3)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    return policy.velocity(x, schedule.timesteps[1], policy.encode(PROMPTS), ROWS)


def test_prompts_of_a_former_run_need_no_encoder(tmp_path):
    memory = MemoryConfig(embedding_cache_dir=str(tmp_path))
    first = tiny_policy(memory=memory)
    expected = velocity(first)
    second = tiny_policy(memory=memory, prompts=PROMPTS)
    assert second.pipe.text_encoder is second.pipe.text_encoder_2 is second.pipe.text_encoder_3 is None
    assert torch.equal(velocity(second), expected)
    assert tiny_policy(memory=memory, prompts=[*PROMPTS, "another"]).pipe.text_encoder is not None
    other = tiny_policy(memory=memory, prompts=PROMPTS, max_sequence_length=10)
    assert other.pipe.text_encoder is not None, "a prompt of another length becomes something else"


def test_a_damaged_or_changed_store_is_written_anew(tmp_path):
    memory, model = MemoryConfig(embedding_cache_dir=str(tmp_path / "store")), tmp_path / "model"
    shutil.copytree(hub.BUNDLED_MODELS["tiny"], model)

    def load():
        return load_policy(str(model), "cpu", "fp32", memory=memory, height=32, width=80, max_sequence_length=14)

    expected = velocity(load())
    files = sorted((tmp_path / "store").rglob("*.pt"))
    assert len(files) == len(PROMPTS) + 2, "the prompts, the probe and the layout"
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(velocity(load()), expected)
    assert all(file.stat().st_size > 100 for file in files)
    (model / "model_index.json").touch()
    velocity(load())
    assert len(list((tmp_path / "store").iterdir())) == 2, "the model was touched, so its prompts have a new place"


def test_checkpointing_changes_no_bit_of_the_gradient():
    gradients = []
    for checkpointing in (False, True):
        policy = tiny_policy(memory=MemoryConfig(gradient_checkpointing=checkpointing))
        policy.add_lora(4, 8, ["to_q", "to_out.0"], seed=0)
        stir(policy)
        kept: list[int] = []

        def keep(tensor, kept=kept):
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            v = velocity(policy)
        v.square().mean().backward()
        gradients.append(({n: p.grad for n, p in policy.trainable_parameters().items()}, sum(kept)))
    (plain, whole), (recomputed, less) = gradients
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert less < whole / 2


class Block(torch.nn.Module):
    """A block of a kind of its own, as far as the compiler can see. It is compiled by a compiler that takes no time."""

    def __init__(self, kind: int, compiled: list) -> None:
        super().__init__()
        self.kind, self.compiled = kind, compiled

    def compile(self, **settings) -> None:
        def backend(graph, inputs):
            self.compiled.append((self.kind, [list(x.shape) for x in inputs if isinstance(x, torch.Tensor)]))
            return graph.forward

        super().compile(backend=backend, **settings)

    def forward(self, x):
        return x + self.kind


@torch._dynamo.config.patch(cache_size_limit=8)
def test_blocks_of_many_kinds_are_all_compiled():
    """They share a forward pass, of which torch compiles no more than eight variants by default."""
    compiled: list = []
    transformer = torch.nn.Sequential(*(Block(kind, compiled) for kind in range(12)))
    transformer._repeated_blocks = ["Block"]
    memory.compile_blocks(transformer, for_each_size=True)
    assert transformer(torch.zeros(1)) == sum(range(12))
    assert sorted(kind for kind, _ in compiled) == list(range(12))


@pytest.mark.parametrize(("for_each_size", "count"), [(True, 3), (False, 2)])
def test_blocks_are_compiled_for_each_size_or_for_any(for_each_size, count):
    """By default torch compiles for any size once it has seen a second one, so that an evaluation would make training slower."""
    torch._dynamo.reset()  # it remembers the sizes of other tests
    compiled: list = []
    transformer = torch.nn.Sequential(Block(0, compiled))
    transformer._repeated_blocks = ["Block"]
    memory.compile_blocks(transformer, for_each_size)
    for rows in (2, 12, 5, 12):
        transformer(torch.zeros(rows, 3))
    assert len(compiled) == count
    assert not for_each_size or [sizes for _, sizes in compiled] == [[[rows, 3]] for rows in (2, 12, 5)]


def test_torch_does_not_choose_cudnn_for_attention():
    """Its backward pass is wrong for some lengths: tests/test_cuda.py. So also with a user's own pipeline."""
    pipe = tiny_policy().pipe
    torch.backends.cuda.enable_cudnn_sdp(True)
    Policy(pipe, torch.float32, height=32, width=80, max_sequence_length=14)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.slow  # the compiler
def test_a_run_with_compiled_and_checkpointed_blocks_has_a_ratio_of_exactly_1(flux, tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    size = {"model": str(flux), "pipeline_kwargs": "{max_sequence_length: 16}", "height": 32, "width": 48}
    pairs = ["memory={compile: true, gradient_checkpointing: true}", *(f"{key}={value}" for key, value in size.items())]
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *pairs, "lora.targets=null"))
    for _ in range(2):
        assert trainer.training_step()["ratio/first_update_max_deviation"] == 0


def test_slices_are_the_same_images():
    latents = torch.randn(3, 8, 8, 20, generator=torch.Generator().manual_seed(0))
    sliced = tiny_policy(memory=MemoryConfig(vae_slicing="tiles"))
    torch.testing.assert_close(sliced.decode(latents), tiny_policy().decode(latents), rtol=0, atol=1e-5)


def test_offloaded_weights_take_little_more_page_locked_memory_than_their_bytes(monkeypatch):
    """Torch rounds each request up to a power of two: the weights of a Flux block, 1/16 as wide and alone, would take 1.6 times theirs."""
    monkeypatch.setattr(memory, "PINNED_BUFFER", 2**20)
    shapes = [(192, 192), (192,), (768, 192), (768,), (192, 768), (1152, 192), (1152,), (), (0, 3)]
    dtypes = [torch.bfloat16, torch.float32, memory.FLOAT8, torch.int64]
    tensors = [torch.randn(s).to(dtypes[block % 4]) for block in range(24) for s in (*shapes, *shapes[:1] * 6)]
    copies, requested, total = [tensor.clone() for tensor in tensors], [], sum(tensor.nbytes for tensor in tensors)

    def allocate(size):
        requested.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def rounded(size):
        return 1 << max(0, size - 1).bit_length()

    memory.pin_together(tensors, allocate)
    assert sum(rounded(tensor.nbytes) for tensor in tensors) > 1.5 * total
    assert sum(map(rounded, requested)) < 1.05 * total
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(requested) > 8
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (tensor.dtype, tensor.shape) == (copy.dtype, copy.shape)
        assert torch.equal(tensor.float(), copy.float())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_offloaded_blocks_change_no_bit_of_a_gradient(flux, monkeypatch, checkpointing):
    """On a CPU, where a copy to the device is a plain copy. The weights in memory may then be anything until the backward pass."""
    call = {"height": 32, "width": 48, "max_sequence_length": 16}
    copies = []

    def copy(tensor, device):
        copies.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(memory, "on_device", copy)
    gradients = []
    for offload in (None, "groups"):
        settings = MemoryConfig(gradient_checkpointing=checkpointing, offload=offload)
        policy = load_policy(str(flux), "cpu", "fp32", memory=settings, **call)
        policy.add_lora(4, 8, None, seed=0)
        stir(policy)
        v = velocity(policy)
        frozen = [
            p
            for block in memory.repeated_blocks(policy.pipe.transformer, "")
            for p in block.parameters()
            if not p.requires_grad
        ]
        if offload is not None:
            assert copies
            assert sum(copies) % sum(p.numel() for p in frozen) == 0, "all weights of the blocks in each pass"
        for parameter in frozen if offload is not None and not checkpointing else ():
            parameter.data.fill_(torch.nan)
        v.square().mean().backward()
        gradients.append({n: p.grad for n, p in policy.trainable_parameters().items()})
    plain, offloaded = gradients
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_graph_holds_the_copies_of_offloaded_weights_unless_their_blocks_are_checkpointed(
    flux, monkeypatch, checkpointing
):
    """So that graphs that a rollout keeps hold no copies with checkpointing; without it the config refuses them."""
    copies, held = {}, set()

    def copy(tensor, device):
        copied = tensor.clone()
        copies[copied.untyped_storage().data_ptr()] = copied  # kept, so that no other tensor has its address
        return copied

    def save(tensor):
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    monkeypatch.setattr(memory, "on_device", copy)
    settings = MemoryConfig(gradient_checkpointing=checkpointing, offload="groups")
    policy = load_policy(str(flux), "cpu", "fp32", memory=settings, height=32, width=48, max_sequence_length=16)
    policy.add_lora(4, 8, None, seed=0)
    velocity(policy)  # also what the first call tries out
    copies.clear()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        velocity(policy)
    assert held, "of parts that are no blocks"
    matrices = {pointer for pointer, copied in copies.items() if copied.ndim == 2}
    assert bool(held & matrices) == (not checkpointing), "those through which a gradient goes on to an earlier LoRA"


@pytest.mark.parametrize("keep", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_run_with_offloaded_blocks_has_a_ratio_of_exactly_1(flux, tmp_path, keep):
    size = [f"model={flux}", "height=32", "width=48", "pipeline_kwargs={max_sequence_length: 16}", "lora.targets=null"]
    settings = ["memory={offload: groups, gradient_checkpointing: true}", f"objective.keep_graphs={keep}"]
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *size, *settings))
    for _ in range(2):
        assert trainer.training_step()["ratio/first_update_max_deviation"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory={offload: groups, gradient_checkpointing: true, compile: true}"], r"does not go with memory\.compile"),
        (
            ["memory={offload: groups, gradient_checkpointing: true, quantize: nf4}"],
            r"does not go with memory\.quantize=nf4",
        ),
        (["memory={offload: groups, gradient_checkpointing: true, shard: true}"], r"does not go with memory\.shard=fsdp2"),
        (["memory={offload: groups, gradient_checkpointing: true}", "lora=null"], "does not go with lora=null"),
    ],
)
def test_offloading_that_cannot_work_is_refused(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        FlowGRPOTrainer(args=short_run(tmp_path, *words))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bitsandbytes quantises on a GPU alone")
def test_a_quantised_base_is_near_the_whole_one_and_trains(flux, tmp_path):
    pytest.importorskip("bitsandbytes")
    call = {"height": 32, "width": 48, "max_sequence_length": 16}
    expected = velocity(load_policy(str(flux), "cpu", "fp32", **call))
    quantised = load_policy(str(flux), "cpu", "fp32", memory=MemoryConfig(quantize="nf4"), **call)
    off = (velocity(quantised) - expected).norm() / expected.norm()
    assert 0 < off < 0.4
    size = ["height=32", "width=48", f"model={flux}", "pipeline_kwargs={max_sequence_length: 16}"]
    trainer = FlowGRPOTrainer(args=short_run(tmp_path, *size, "memory={quantize: nf4}", "lora.targets=null"))
    assert trainer.training_step()["ratio/first_update_max_deviation"] == 0
    assert all(parameter.dtype == torch.float32 for parameter in trainer.policy.trainable_parameters().values())


@pytest.fixture(scope="module", params=["flux", "sana"])
def cast(request, tmp_path_factory):
    """A model, and one whose weights are rounded where diffusers' own layerwise casting stores float8. Sana has convolutions."""
    torch.manual_seed(0)
    tiny, (model, rounded) = TINY[request.param], (tmp_path_factory.mktemp(name) for name in ("model", "rounded"))
    awake(tiny.build()).to(torch.bfloat16).to(torch.float32).save_pretrained(model)  # bf16 rounds nothing more
    pipe, stored = (DiffusionPipeline.from_pretrained(model) for _ in range(2))
    stored.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    pipe.transformer.load_state_dict({name: value.float() for name, value in stored.transformer.state_dict().items()})
    pipe.save_pretrained(rounded)
    return model, rounded, {"height": tiny.size[0], "width": tiny.size[1], **tiny.call}


LAYERWISE = MemoryConfig(quantize="fp8_layerwise")


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("offload", [None, "groups"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_weights_stored_in_float8_change_no_bit_of_the_gradient_of_rounded_ones(cast, checkpointing, offload, dtype):
    model, rounded, call = cast
    found = []
    for source, settings in ((rounded, {}), (model, {"quantize": "fp8_layerwise", "offload": offload})):
        settings = MemoryConfig(gradient_checkpointing=checkpointing, **settings)
        policy = load_policy(str(source), "cpu", dtype, memory=settings, **call)
        policy.add_lora(4, 8, "all", seed=0)
        initial = policy.adapter_state()
        stir(policy)
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            v = velocity(policy)
        v.square().mean().backward()
        gradients = {name: p.grad for name, p in policy.trainable_parameters().items()}
        found.append(({"v": v, **initial, **{f"{name}.grad": g for name, g in gradients.items()}}, sum(kept.values())))
    (expected, graph), (stored, smaller_graph) = found
    assert expected.keys() == stored.keys()
    for name, value in expected.items():
        assert torch.equal(stored[name], value), name
    assert smaller_graph < graph, "it keeps no copies of linear layers' weights"


def test_layers_in_float8_take_a_quarter_of_the_memory_and_others_stay_as_they_are(cast):
    model, rounded, call = cast
    plain, other = (
        load_policy(str(source), "cpu", "fp32", **call).pipe.transformer.state_dict() for source in (model, rounded)
    )
    transformer = load_policy(str(model), "cpu", "fp32", memory=LAYERWISE, **call).pipe.transformer
    stored = transformer.state_dict()
    layers = {f"{name}." for name, layer in transformer.named_modules() if layer in memory.cast_layers(transformer)}
    small = {name for name in stored if name.startswith(tuple(layers))}
    assert {name for name in plain if not torch.equal(plain[name], other[name])} <= small
    assert sum(stored[name].nbytes for name in small) * 4 == sum(plain[name].nbytes for name in small)
    for name in stored.keys() - small:
        assert stored[name].dtype == torch.float32
        assert torch.equal(stored[name], plain[name])
    assert transformer.dtype == torch.float32, "it computes in it"


def test_steps_on_weights_in_float8_are_those_on_rounded_ones(cast, tmp_path):
    model, rounded, call = cast
    size = [f"height={call['height']}", f"width={call['width']}", "guidance=1", "lora.targets=null", "trackers=[]"]
    kwargs = {name: value for name, value in call.items() if name not in ("height", "width")}
    states = []
    for source, quantize in ((rounded, "null"), (model, "fp8_layerwise")):
        words = [f"model={source}", f"pipeline_kwargs={kwargs}", f"memory.quantize={quantize}"]
        trainer = FlowGRPOTrainer(args=short_run(tmp_path / quantize, *size, *words))
        for _ in range(2):
            metrics = trainer.training_step()
            assert metrics["ratio/first_update_max_deviation"] == 0
            assert metrics["grad_norm"] > 0
        states.append(trainer.policy.adapter_state())
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_a_lora_is_read_unrounded_onto_weights_in_float8(cast, tmp_path):
    model, _, call = cast
    policy = load_policy(str(model), "cpu", "fp32", memory=LAYERWISE, **call)
    policy.add_lora(4, 8, None, seed=0)
    stir(policy)
    policy.save(tmp_path / "lora")
    again = load_policy(str(model), "cpu", "fp32", tmp_path / "lora", memory=LAYERWISE, **call)
    state = again.adapter_state()
    for name, value in policy.adapter_state().items():  # in the file, alpha / rank is a factor of lora_B
        assert torch.equal(state[name], value * (8 / 4 if "lora_B" in name else 1))
    assert torch.equal(velocity(again), velocity(policy))
    with pytest.raises(ValueError, match="export the LoRA without merging"):
        merge(again)


def test_weights_in_float8_are_not_trained(cast):
    model, _, call = cast
    with pytest.raises(ValueError, match=r"fp8_layerwise stores base weights in float8.*leave it out"):
        load_policy(str(model), "cpu", "fp32", memory=LAYERWISE, **call).enable_full_finetuning()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory={quantize: fp8_layerwise, compile: true}"], r"does not go with memory\.compile, which can't trace"),
        (["memory={quantize: fp8_layerwise, shard: fsdp2}"], r"does not go with memory\.shard=fsdp2, which casts"),
        (["memory.quantize=fp8_layerwise", "lora=null"], "lora=null trains all of them"),
    ],
)
def test_layerwise_casting_that_cannot_work_is_refused(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        short_run(tmp_path, *words)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_quantised_base_needs_its_package(flux):
    with pytest.raises(ValueError, match=r"memory\.quantize=nf4 needs bitsandbytes"):
        load_policy(str(flux), "cpu", "fp32", memory=MemoryConfig(quantize="nf4"))


def test_8_bit_adam_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match=r"adamw_8bit needs bitsandbytes.*pip install bitsandbytes"):
        FlowGRPOTrainer(args=short_run(tmp_path, "optimizer.name=adamw_8bit"))
