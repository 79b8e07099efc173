"""The PNG text field `parameters`, in which AUTOMATIC1111's program, and many that follow it, keep the prompt of an image."""

import json
import re

FIELD = "parameters"
SETTINGS = re.compile(r"\n[A-Z][\w ]*: [^\n]*, [A-Z][\w ]*: [^\n]*$")  # the last line, such as `Steps: 20, Seed: 1`


def write_parameters(prompt: str, **settings: object) -> str:
    """The text of an image: its prompt, then a line of settings, of which those programs expect at least three."""
    return "\n".join([prompt, ", ".join(f"{name}: {_quoted(str(value))}" for name, value in settings.items())])


def prompt_of(parameters: str | None) -> str | None:
    """The prompt in such a text, without the negative one and the settings; None if it has another form."""
    settings = SETTINGS.search((parameters or "").rstrip())
    if parameters is None or settings is None:
        return None
    return parameters[: settings.start()].split("\nNegative prompt: ")[0].strip() or None


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r"[,:\n]", value) else value
