"""What the output of a process that failed says; the tests' servers read theirs with it too."""

import re


def first_errors(output: str, last: int = 60) -> str:
    """Lines that name an error, the first few, which are the cause of later ones, and the last lines."""
    lines = output.splitlines()
    before = [line for line in lines[:-last] if re.search(r"\w(Error|Exception)\b", line)]
    return "\n".join([*before[:12], "…"] * bool(before) + lines[-last:])
