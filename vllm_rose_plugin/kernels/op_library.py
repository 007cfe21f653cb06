"""How an op of one kernel family is registered under ``torch.ops.rose``."""

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "rose"


def _nothing(*arguments: object, **how: object) -> None:
    """Of tensors without memory, for an op that writes into its caller's memory: there is no result to describe."""


def register_op(
    name: str, schema: str, implementation: Callable[..., Any], *, fake: Callable[..., Any] = _nothing
) -> None:
    """Register ``torch.ops.rose.<name>``, once per process; a second call (or a reload) changes nothing.

    As in ``kernels/ops.py``, the library object is kept on the namespace, so that the op outlives the module.

    Args:
        schema: with the name.
        implementation: for every device.
        fake: what its result looks like, for torch.compile; by default there is none.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    key = f"_{name}_library"
    if key in namespace.__dict__:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(fake), lib=library)
    namespace.__dict__[key] = library
