"""Launches side by side: one stream for each partition of the SMs, forked from the current stream and joined to it.

Only events order anything, so the same code runs eagerly and while a CUDA graph is captured, where forks and joins
become the edges of the graph. Whatever the launches share (routing, quantized tokens, counts) belongs in front of them,
in the current stream, where it is done once.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Launch = Callable[[], None]
"""Launches kernels on the current stream. It must allocate nothing that outlives it: memory would be its stream's."""


class ForkedStreams:
    """Streams to launch on, launch i always on stream i.

    Events are made anew at each call, so that threads, engines and captures that share the streams can't wait for each
    other's by mistake.
    """

    def __init__(self, streams: "Sequence[torch.cuda.Stream]"):
        """Args: streams: other ones than those that callers are in; what made them keeps them alive.

        Raises:
            ValueError: no stream, or one twice.
        """
        if not streams or len({stream.cuda_stream for stream in streams}) < len(streams):
            raise ValueError(f"{len(streams)} streams must be 1 or more, and all different")
        self.streams = tuple(streams)

    def run(self, *rounds: Sequence[Launch]) -> None:
        """Launch, one round after another, between what the current stream holds and what will follow there.

        Within a round launches may run at the same time; every launch of a round sees what all of the round before
        have written. A launch that raises leaves the streams joined, so that a capture can be ended.

        Args:
            rounds: at least one launch and no more than there are streams in each.

        Raises:
            ValueError: no rounds, or another number of launches; nothing is launched.
            Exception: the first that a launch raised; those behind it aren't made.
        """
        import torch

        sizes = [len(launches) for launches in rounds]
        if not sizes or min(sizes) < 1 or max(sizes) > len(self.streams):
            raise ValueError(f"rounds of {sizes} launches must be of 1 to {len(self.streams)}, and not none")
        parent = torch.cuda.current_stream(self.streams[0].device)
        before = [(parent, parent.record_event())]
        reached: dict[torch.cuda.Stream, None] = {}
        try:
            for launches in rounds:
                used = self.streams[: len(launches)]
                for stream in used:
                    for source, event in before:
                        if source is not stream:
                            stream.wait_event(event)
                    reached[stream] = None
                for stream, launch in zip(used, launches, strict=True):
                    with torch.cuda.stream(stream):
                        launch()
                before = [(stream, stream.record_event()) for stream in used]
        finally:
            # Those of an earlier, wider round too: a capture can end only with all streams joined that it forked.
            for stream in reached:
                parent.wait_event(stream.record_event())
