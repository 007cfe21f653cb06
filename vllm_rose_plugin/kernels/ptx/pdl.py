"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

Only for kernels launched with `use_pdl=True`. Whatever the previous kernel may write must be read after `pdl_wait`.
"""

import cutlass.cute as cute


def pdl_wait() -> None:
    """Waits until the previous kernel has ended and its stores are visible (`griddepcontrol.wait`).

    Every kernel of ours waits, also one that reads nothing of its predecessor's: the kernel after it counts on the
    whole chain before it having ended.
    """
    cute.arch.griddepcontrol_wait()


def pdl_launch_next() -> None:
    """Lets the next kernel of the stream start once all blocks have come here (`griddepcontrol.launch_dependents`).

    Promises nothing about memory: the next kernel waits for our end in its own `pdl_wait`.
    """
    cute.arch.griddepcontrol_launch_dependents()
