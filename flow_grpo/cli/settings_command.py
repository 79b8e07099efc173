"""A command whose settings are `key=value` words: an option that is a setting gets the word to write."""

from typing import Any

from typer.core import TyperCommand

from flow_grpo.errors import FlowGRPOError


class SettingsCommand(TyperCommand):
    """A typer command with overrides among its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. ValueError for `--steps 3`, which is written steps=3."""
        options = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for i, word in enumerate(args):
            option, equals, value = word.partition("=")
            if word == "--":
                break
            if option.startswith("--") and option not in (*options, "--help") and (path := _setting(option)):
                following = next((next_word for next_word in args[i + 1 : i + 2] if not next_word.startswith("--")), "VALUE")
                raise FlowGRPOError(f"{option} is a setting and no option: write {path}={value if equals else following}.")
        return super().parse_args(ctx, args)


def _setting(option: str) -> str | None:
    """The dotted path of the setting that an option names, if there is one."""
    from flow_grpo.config import FlowGRPOConfig
    from flow_grpo.config.errors import setting_paths

    *_, word = option.removeprefix("--").replace("-", "_").split(".")
    return next(iter(setting_paths(FlowGRPOConfig, word)), None)
