"""The order of the calls of a step, the same for every exchange."""

_ORDER = ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive")
_BEFORE = {
    "dispatch_send": ("dispatch_receive", "combine_receive"),
    "dispatch_receive": ("dispatch_send",),
    "combine_send": ("dispatch_receive",),
    "combine_receive": ("combine_send",),
}
"""What may come before a call. Dispatch may be repeated without combine, combine never without dispatch."""


class StepOrder:
    """Refuses calls that would let a rank overwrite what a peer still reads, or wait for what never comes."""

    def __init__(self) -> None:
        self.last = "combine_receive"

    def next(self, call: str) -> None:
        """Note a call.

        Raises:
            RuntimeError: it is not its turn; nothing was noted.
        """
        if self.last not in _BEFORE[call]:
            raise RuntimeError(
                f"{call} after {self.last}: a step is {', '.join(_ORDER)}; two steps under way at once need an "
                "exchange each"
            )
        self.last = call
