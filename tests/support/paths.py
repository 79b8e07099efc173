"""Where the repository is, and the files that tests hand to commands."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
SAMPLE_REWARDS = SUPPORT / "sample_rewards.py"
SAMPLE_OBJECTIVES = SUPPORT / "sample_objectives.py"
