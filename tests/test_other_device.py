"""On a device that is not the CPU: the same steps, without mixing devices or waiting in every sampling step.

`support/fake_device.py` takes the place of a GPU, so this is about where tensors are, not about kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.embedded import short_model
from support.fake_device_runs import on_cpu, on_fake_device
from torch.utils import backend_registration

TESTS = Path(__file__).parent
SMALL = ["trackers=[]", "prompts_per_step=2", "images_per_prompt=4", "microbatch=4", "steps=2"]
UNSEEN = ["evaluation.prompts=null"]
OFFLOADED = "memory.offload_trajectories=true"
FEW_LAYERS = "lora.targets=[to_q, to_out.0]"  # the other configs train all of them
REPLAYED = "objective.keep_graphs=false"
AUTO_CLIP = ["objective.clip_low=auto", "objective.clip_high=auto"]

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} has no device backends in Python",
)


def two_blocks() -> str:
    """A setting: the embedded model's first and last block. What is sent and waited for is the same for each block between them."""
    return f"model={short_model()}"


def run(script: list[str]) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_alike(cpu: dict, other: dict) -> None:
    """Equal but for rounding, which an attention of other kernels changes; the ratio is exact on both."""
    for ours, theirs in zip(cpu["steps"], other["steps"], strict=True):
        assert theirs == pytest.approx(ours, rel=2e-3, abs=1e-5)
        assert theirs.get("ratio/first_update_max_deviation", 0) == 0
    assert cpu["steps"][1]["grad_norm"] > 0
    assert other["evaluation"] == pytest.approx(cpu["evaluation"], abs=1e-3)


def test_the_device_tells_mixed_tensors_and_counts_waits():
    script = (
        "import torch\nfrom support import fake_device as p\np.register()\n"
        "with p.FakeDevice() as d:\n"
        "    w = torch.nn.Linear(3, 2).to('fake')\n"
        "    x = torch.randn(4, 3).to('fake')\n"
        "    w(x).square().mean().backward()\n"
        "    torch.optim.AdamW(w.parameters()).step()\n"
        "    assert w.weight.grad.device.type == 'fake' and not d.waits\n"
        "    x.mean().item(), x.cpu(), x[x > 0]\n"
        "    print(len(d.waits))\n"
        "    try:\n        w(torch.randn(4, 3))\n    except RuntimeError as error:\n        print(error, flush=True)\n"
        # without torch's thread for the device, which sometimes aborts a process that ends by itself
        "import os\nos._exit(0)\n"
    )
    waits, error = run(["-c", script]).splitlines()
    assert waits == "3"
    assert "expected all tensors on one device" in error


SIGNAL = "rewards={ocr: 1, color: 1, jpeg_size: 1}"  # sizes differ in every group
CPS = ["objective.transition=cps", "objective.noise_level=0.5"]
FEW_STEPS = ["sampling.steps=4", "objective.window={schedule: random, size: 2, last_step: 2}"]
CONFIGS = {
    "grpo": (
        "tiny_grpo",
        [
            *CPS,  # noise between images makes more of rounding, and a file's size has steps
            *FEW_STEPS,
            SIGNAL,
            "evaluation.max_prompts=4",
            "evaluation.rewards=[ocr_exact]",
            "evaluation.steps=3",
        ],
    ),
}
MORE = {
    "edits": ("tiny_edit", UNSEEN),
    "replays": (
        "tiny_grpo",
        [*UNSEEN, *FEW_STEPS, FEW_LAYERS, REPLAYED, "updates=2", "objective.kl_weight=0.1", OFFLOADED, *AUTO_CLIP],
    ),
    "awm": (
        "tiny_ocr",
        [*UNSEEN, FEW_LAYERS, "updates=2", "objective.anchors=[{to: ema, weight: 1, decay: 0.3}]"],
    ),
    "shared start": ("tiny_grpo", [*UNSEEN, REPLAYED, *CPS, "objective.shared_initial_noise=true"]),
    "ppo": ("tiny_grpo", [*UNSEEN, REPLAYED, "objective={name: ppo, kl_weight: 0}"]),
    "crd in parts": ("tiny_ocr", [*UNSEEN, "objective=crd", "microbatch=2"]),
    "nft": ("tiny_ocr", [*UNSEEN, "objective=nft"]),
    "dpo": ("tiny_ocr", [*UNSEEN, "objective=dpo"]),
}


@pytest.mark.parametrize("name", [*CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_steps_are_those_of_the_cpu(tmp_path, name):
    config, overrides = {**CONFIGS, **MORE}[name]
    model = [] if config == "tiny_edit" else [two_blocks()]
    settings = [*SMALL, *model, *overrides]
    assert_alike(*(train(tmp_path / train.__name__, config, *settings) for train in (on_cpu, on_fake_device)))


@pytest.mark.parametrize("graphs", [REPLAYED, pytest.param("objective.keep_graphs=true", marks=pytest.mark.slow)])
def test_no_sampling_step_waits_for_the_device(tmp_path, graphs):
    """It waits once for the embeddings of new prompts, once for the images of each micro-batch, and once for the numbers of an update."""
    window = "objective.window={{schedule: all, first_step: 0, last_step: {}}}"
    settings = [*UNSEEN, two_blocks(), FEW_LAYERS, graphs, "rewards={jpeg_size: 1}"]  # which differs in every group
    few, many = (
        on_fake_device(tmp_path / str(steps), "tiny_grpo", *SMALL, *settings, f"sampling.steps={steps}", window.format(last))
        for steps, last in ((3, 1), (5, 3))
    )
    assert len(few["waits"]) == len(many["waits"]) == 1 + 2 + 1


def test_each_update_of_a_step_waits_once_and_prompts_that_are_known_are_not_waited_for(tmp_path):
    """The gradient's norm is fetched with the losses. The second step has the prompts of the first, as the file has no others."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('red text "AB" on a white background\nblue text "CD" on a white background\n')
    settings = [two_blocks(), f"prompts={prompts}", "rewards={jpeg_size: 1}", "updates=2", *UNSEEN, FEW_LAYERS]
    assert len(on_fake_device(tmp_path / "run", "tiny_ocr", *SMALL, *settings)["waits"]) == 2 + 2


def test_the_noise_of_final_latents_is_sent_once_for_all_models_that_see_it(tmp_path):
    """The policy, its slow copy, an average and the base model see the same noised latents."""
    anchors = "[{to: ema, weight: 1, decay: 0.3}, {to: base, weight: 1}]"
    settings = [two_blocks(), "rewards={jpeg_size: 1}", *UNSEEN, FEW_LAYERS]
    one, four = (
        on_fake_device(tmp_path / str(len(objective)), "tiny_ocr", *SMALL, *settings, f"objective={objective}")["copies"]
        for objective in ("{name: pepg}", f"{{name: nft, anchors: {anchors}}}")
    )
    one, four = ([shape for shape in shapes if len(shape) == 4] for shapes in (one, four))
    assert len(one) > 2
    assert four == one
