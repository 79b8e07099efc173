import os
import sys

if sys.path[:1] in (
    [""],
    [os.getcwd()],
):  # else a file rewards.py or datasets.py of the user's would hide a module of that name
    sys.path.append(sys.path.pop(0))

from flow_grpo.cli.app import run

if __name__ == "__main__":
    run()
