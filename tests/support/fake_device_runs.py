"""Two training steps of a config on the CPU and on the fake device, as JSON: `python fake_device_runs.py FOLDER CONFIG [override ...]`.

Also the evaluation after them, and how often the second step waited for the device.
"""

import json
import sys
from pathlib import Path

import torch

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.trainer import FlowGRPOTrainer
from support import fake_device

TIMING_METRICS = ("time/", "speed/", "memory/")


def main(folder: str, config: str, *overrides: str) -> None:
    torch.set_num_threads(1)
    fake_device.register()
    result: dict = {}
    for device in ("cpu", fake_device.NAME):
        settings = [f"device={device}", "dtype=fp32", f"output_dir={Path(folder) / device}", *overrides]
        with fake_device.FakeDevice() as fake:
            trainer = FlowGRPOTrainer(args=FlowGRPOConfig.from_yaml(config, settings))
            steps = []
            for _ in range(2):
                fake.waits.clear()
                steps.append(trainer.training_step())
            result[device] = {
                "steps": [{k: v for k, v in step.items() if not k.startswith(TIMING_METRICS)} for step in steps],
                "waits": sorted(fake.waits),
                "evaluation": trainer.evaluate().means() if trainer.eval_set else {},
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
