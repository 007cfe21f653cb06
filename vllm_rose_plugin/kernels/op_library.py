"""How an op that writes into its caller's memory is registered under ``torch.ops.rose``."""

import functools
from collections.abc import Callable

import torch

NAMESPACE = "rose"


def register_op(name: str, schema: str, implementation: Callable[..., None]) -> None:
    """Register ``torch.ops.rose.<name>``, once per process; a second call (or a reload) changes nothing.

    As in ``kernels/ops.py``, the library object is kept on the namespace, so that the op outlives the module.

    Args:
        schema: with the name; returns nothing.
        implementation: for every device.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    key = f"_{name}_library"
    if key in namespace.__dict__:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", functools.partial(_nothing), lib=library)
    namespace.__dict__[key] = library


def _nothing(*arguments: object, **how: object) -> None:
    """Of tensors without memory: there is no result to describe."""
