import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # the working folder is gone
    # else a file rewards.py or datasets.py of the user's would hide a module of that name
    if sys.path[:1] in ([""], [os.getcwd()]):
        sys.path.append(sys.path.pop(0))

from flow_grpo.cli.app import run

if __name__ == "__main__":
    run()
