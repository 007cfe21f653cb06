"""Run a function when a module has been imported.

vLLM loads plugins while it builds its command line. Importing the modules that hold our targets there would add
seconds to ``vllm --help`` and pull layer code into processes that never build a layer, so a seam waits until vLLM
itself imports its module.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if ``module`` is loaded, else right after it is; what it raises fails that import."""
    if module in sys.modules:  # also while it is being imported: then the target must exist already, or this raises
        action()
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(module, []).append(action)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: asks the other finders and wraps the loader of a module that is waited for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, fullname)  # type: ignore[assignment]
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes the module with its own loader, then runs the actions."""

    def __init__(self, loader: Any, fullname: str):
        self._loader, self._fullname = loader, fullname

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:  # copying and pickling ask before __init__
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # whoever asks later gets the module's real loader
        self._loader.exec_module(module)
        for action in _waiting.get(self._fullname, []):
            action()
        _waiting.pop(self._fullname, None)
