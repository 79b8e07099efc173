"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """`1 image`, `2 images`, `0 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
