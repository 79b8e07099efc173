"""Numbers and other libraries' errors in sentences."""


def counted(number: int, noun: str) -> str:
    """`1 image`, `2 images`, `0 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def first_line(error: Exception) -> str:
    """The first line of an error's message; the error's class if it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
