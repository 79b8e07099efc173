"""What the doctor's tests share: prompts, and results by name."""

from flow_grpo.doctor.result import CheckResult, Status

TRAIN = [f'red text "{word}" on a blue background' for word in ("CAT", "HORSE", "FOX", "EMU", "OWL", "BEE", "ANT", "COW")]
HELD_OUT = [prompt.replace("red", "white") for prompt in TRAIN]


def statuses(results: list[CheckResult]) -> dict[str, Status]:
    return {result.name: result.status for result in results}
