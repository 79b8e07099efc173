"""Train by Ray Train: a process for each GPU of the cluster. A process or a node that is lost is replaced, and the run goes on.

    pip install -e '.[ray]'
    python examples/ray_train.py sd35_medium_ocr --workers 16 prompts_per_step=32 output_dir=/shared/sd35
    python examples/ray_train.py sd35_medium_ocr --workers 15 --serve ocr prompts_per_step=30 output_dir=/shared/sd35

output_dir is a folder that all nodes share. --serve gives a reward a GPU of its own, or without GPUs a CPU: an actor runs
`flow-grpo serve` on the node that Ray finds for it. A new start asks the actor for its address, which changes if its node was lost.
"""

import argparse
import os
import secrets
import subprocess
import sys

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


@ray.remote(max_restarts=-1, max_task_retries=-1)
class RewardServer:
    def __init__(self, reward):
        self.reward, self.process, self.address = reward, None, ""

    def url(self):
        """The server's address, after it has loaded its reward. One that has ended is started again."""
        if self.process is None or self.process.poll() is not None:
            host = ray.util.get_node_ip_address()
            command = [sys.executable, "-m", "flow_grpo", "serve", self.reward, "--host", host, "--port", "0"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.address = self.process.stdout.readline().split()[-1]
        return self.address


def train(settings):
    """What each process runs. The process group is Ray's."""
    from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer

    remote = [f"rewards.{name}.remote={ray.get(server.url.remote())}" for name, server in settings["servers"].items()]
    args = FlowGRPOConfig.from_yaml(settings["config"], [*settings["overrides"], *remote])
    FlowGRPOTrainer(args=args).train(resume="auto")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--serve", action="append", default=[], metavar="REWARD")
    given, gpu = parser.parse_intermixed_args(), torch.cuda.is_available()
    os.environ.setdefault("REWARD_TOKEN", secrets.token_hex(16))
    ray.init(runtime_env={"env_vars": {"REWARD_TOKEN": os.environ["REWARD_TOKEN"]}})
    place = {"num_gpus": 1} if gpu else {"num_cpus": 1}
    servers = {name: RewardServer.options(**place).remote(name) for name in given.serve}
    TorchTrainer(
        train,
        train_loop_config={"config": given.config, "overrides": given.overrides, "servers": servers},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
