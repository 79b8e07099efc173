"""Checks of the settings of several prompt sets."""

from flow_grpo.config.settings import RunSettings
from flow_grpo.errors import FlowGRPOError


def check_prompt_sets(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with several prompt sets. A run checks their rewards once they are built."""
    for setting, sets in (("prompts", args.prompts), ("evaluation.prompts", args.evaluation.prompts)):
        if not isinstance(sets, list):
            continue
        if not sets:
            raise FlowGRPOError(
                f"{setting} is an empty list: give a file, or a list of sets such as [{{file: prompts.txt}}]."
            )
        names = [prompt_set.label for prompt_set in sets]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise FlowGRPOError(f"two sets of {setting} are called {repeated}: give each a name of its own by `name`.")
        for prompt_set in sets:
            if setting == "evaluation.prompts" and prompt_set.weight != 1:
                raise FlowGRPOError(f"evaluation.prompts measures all prompts of {prompt_set.label}: leave its weight out.")
