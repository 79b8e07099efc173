"""Two training steps of a config on the CPU or on the fake device, and the evaluation after them, each in a process of its own.

The processes are forked from one that has imported everything, as those of the command line are.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from flow_grpo.policy.library_logging import before_imports
from support import fake_device
from support.cli_process import FORKS

TIMING_METRICS = ("time/", "speed/", "memory/")


def on_fake_device(folder: Path, config: str, *overrides: str) -> dict[str, Any]:
    """What two steps log, and the held-out means.

    Of the second step also the operations for which it waited for the device, and the shapes of what it sent there.
    """
    return _forked(True, folder, config, overrides)


def on_cpu(folder: Path, config: str, *overrides: str) -> dict[str, Any]:
    """The same on the CPU, without the fake device: nothing is waited for."""
    return _forked(False, folder, config, overrides)


def _forked(is_fake: bool, folder: Path, config: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    before_imports()
    folder.mkdir(parents=True)
    process = FORKS.Process(target=_run, args=(is_fake, folder, config, overrides))
    process.start()
    process.join()
    assert process.exitcode == 0, (folder / "output.txt").read_text()[-3000:]
    return json.loads((folder / "result.json").read_text())


def _run(is_fake: bool, folder: Path, config: str, overrides: tuple[str, ...]) -> None:
    with (folder / "output.txt").open("w") as output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
    torch.set_num_threads(1)
    if is_fake:
        fake_device.register()
        with fake_device.FakeDevice() as device:
            result = _train(fake_device.NAME, device, folder, config, overrides)
    else:
        result = _train("cpu", fake_device.FakeDevice(), folder, config, overrides)
    (folder / "result.json").write_text(json.dumps(result))


def _train(
    device: str, used: fake_device.FakeDevice, folder: Path, config: str, overrides: tuple[str, ...]
) -> dict[str, Any]:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.trainer import FlowGRPOTrainer

    settings = [f"device={device}", "dtype=fp32", f"output_dir={folder / 'run'}", *overrides]
    trainer = FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml(config, settings))
    steps = []
    for _ in range(2):
        used.waits.clear(), used.copies.clear()
        steps.append(trainer.training_step())
    return {
        "steps": [{k: v for k, v in step.items() if not k.startswith(TIMING_METRICS)} for step in steps],
        "waits": sorted(used.waits),
        "copies": sorted(used.copies),
        "evaluation": trainer.evaluate().means() if trainer.eval_set else {},
    }
