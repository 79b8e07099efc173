"""What `plan` says of a CPU's memory, beside what a run takes: peak of the process, each in a process of its own.

python benchmarks/memory.py
"""

import json
import subprocess
import sys

CONFIGS = {
    "tiny_ocr": ["tiny_ocr"],
    "tiny_grpo, 128 rows at once": ["tiny_grpo", "microbatch=128"],
    "tiny_paper, 192 rows at once": ["tiny_paper", "microbatch=192", "updates=1"],
    "all weights": ["tiny_ocr", "lora=null", "optimizer.lr=1e-4"],
    "pictures of 64 x 160, checkpointing": ["tiny_ocr", "height=64", "width=160", "memory.checkpointing=true"],
}


def predicted(words: list[str]) -> float:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.plan import Plan, occupied

    args = FlowGRPOConfig.read(words[0], words[1:])
    base = occupied(args)
    return Plan(args, cuda=False).forecast(args.microbatch, base).peak


def measured(words: list[str]) -> float:
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.memory import peak_bytes
    from flow_grpo.train import FlowGRPOTrainer

    trainer = FlowGRPOTrainer(args=FlowGRPOConfig.read(words[0], words[1:]))
    for _ in range(2):
        trainer.training_step()
    return peak_bytes(trainer.policy.device)


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(globals()[sys.argv[1]](sys.argv[2:])))
        return
    for name, words in CONFIGS.items():
        both = []
        for what in ("predicted", "measured"):
            ran = subprocess.run([sys.executable, __file__, what, *words], capture_output=True, text=True, check=True)
            both.append(json.loads(ran.stdout.splitlines()[-1]))
        print(
            f"{name}: predicted {both[0] / 1e6:.0f} MB, measured {both[1] / 1e6:.0f} MB, ratio {both[0] / both[1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
