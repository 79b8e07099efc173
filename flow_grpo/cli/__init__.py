"""The command line, one file per verb."""

from flow_grpo.cli.app import run

__all__ = ["run"]
