"""What was made, so that it can be given back in reverse order, whatever fails meanwhile."""

from collections.abc import Callable
from typing import Any


class Undo:
    """A stack of calls that give things back."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], dict[str, Any]]] = []

    def add(self, function: Callable[..., Any], /, **arguments: Any) -> None:
        """Call this before everything that was added earlier."""
        self._calls.append((function, arguments))

    def close(self) -> None:
        """Make all calls, also behind one that fails; afterwards the stack is empty.

        Raises:
            Exception: the first one that a call raised, with the later ones as notes.
        """
        first: Exception | None = None
        while self._calls:
            function, arguments = self._calls.pop()
            try:
                function(**arguments)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"then {error}")
        if first is not None:
            raise first

    def close_after(self, error: BaseException) -> None:
        """Make all calls because of ``error``; what they raise becomes a note of it."""
        try:
            self.close()
        except Exception as another:
            error.add_note(f"while freeing what was made: {another}")
