"""Compile a kernel once per machine: a dictionary in the process, then object files on disk, then the compiler."""

import functools
import importlib.metadata as metadata
import inspect
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm_rose_plugin.kernels.jit import store
from vllm_rose_plugin.kernels.jit.fingerprint import config_text, sources_of
from vllm_rose_plugin.kernels.jit.install import DSL, check_install, require_target
from vllm_rose_plugin.kernels.jit.portable import make_portable
from vllm_rose_plugin.kernels.jit.targets import choose_target

logger = logging.getLogger(__name__)

_STARTED = time.time()
"""A source file changed after this may differ from the code that was imported."""

_NOT_IN_KEY = {"CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_LIBS", "CUTE_DSL_NO_CACHE"}
"""Settings of the DSL that don't change what we get: the target is always given, its own cache isn't used."""

_OPTIONS = "--enable-tvm-ffi"

Build = Callable[[Any], tuple[Callable, tuple]]


@dataclass
class Counts:
    """What start-up did in this process. The import of the DSL (most of a second, once) is in neither time."""

    compiled: int = 0
    loaded: int = 0
    """From disk."""
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    self_check_seconds: float = 0.0
    """Of the providers; the compiles that they ask for are in it."""

    def line(self) -> str:
        """For a log: what start-up cost."""
        return (
            f"{self.compiled} kernels compiled in {self.compile_seconds:.2f} s, "
            f"{self.loaded} loaded from disk in {self.load_seconds:.3f} s; "
            f"self-check {self.self_check_seconds:.2f} s (with what it compiled)"
        )


@dataclass(frozen=True)
class Artifacts:
    """What the compiler made, to be read by tests."""

    ptx: str
    cubin: bytes = field(repr=False)


counts = Counts()
_kernels: dict[tuple, Callable] = {}
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def compile(*, family: str, config: Any, build: Build, target: str | None = None) -> Callable:
    """The kernel of ``family`` for ``config``.

    Args:
        family: folder name under ``kernels/``, such as ``"qk_norm"``.
        config: frozen dataclass that holds everything the code depends on besides its sources.
        build: a function at module level; ``build(config)`` gives the ``@cute.jit`` host function and its example
            arguments: fake tensors, constexpr values and, where it launches, ``make_fake_stream(
            use_tvm_ffi_env_stream=True)``. It is called only where there is something to compile.
        target: such as ``"sm_90a"``; None: the current device's.

    Returns:
        A callable that takes torch tensors in the order of the example arguments, without the constexpr values and
        the stream, and runs on torch's current stream.

    Raises:
        RuntimeError: nvidia-cutlass-dsl is missing, mixed or too old, or the device has no target.
        TypeError: ``config`` or ``build`` can't serve as a cache key.
    """
    target = target or current_target()
    slot = (family, build, target, config)
    kernel = _kernels.get(slot)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(slot)
            if kernel is None:
                kernel = _kernels[slot] = _load_or_compile(family, config, build, target)
    return kernel


def compile_to_artifacts(*, family: str, config: Any, build: Build, target: str) -> Artifacts:
    """PTX and machine code of a kernel; needs no GPU and touches no cache.

    Args: as in :func:`compile`.
    """
    del family
    config_text(config)
    check_build(build)
    with _lock, tempfile.TemporaryDirectory() as folder:
        made = _run_compiler(config, build, target, keep=folder)
        return Artifacts(ptx=made.artifacts.PTX, cubin=made.artifacts.CUBIN)


def clear_memory() -> None:
    """Forget the kernels of this process; the disk keeps them."""
    _kernels.clear()


def cache_key(*, family: str, config: Any, build: Build, target: str) -> store.Key:
    """Everything the compiled kernel depends on, apart from the host's CPU.

    Raises:
        TypeError: ``config`` or ``build`` can't serve as a cache key.
        ValueError: ``family`` isn't a name.
    """
    check_build(build)
    if not family.isidentifier():
        raise ValueError(f"family {family!r} must be a folder's name under kernels/, such as 'qk_norm'")
    return store.Key(
        family=family,
        target=target,
        config=config_text(config),
        build=f"{build.__module__}.{build.__qualname__}",
        sources=sources_of(build).digest,
        compiler=compiler_versions(),
        settings=compiler_settings(),
    )


def compiler_settings() -> str:
    """Options and environment variables that change what the compiler makes."""
    names = [name for name in sorted(os.environ) if name.startswith("CUTE_DSL_") and name not in _NOT_IN_KEY]
    return " ".join([_OPTIONS, *(f"{name}={os.environ[name]}" for name in names)])


def check_build(build: Build) -> None:
    """Refuse what could carry values past the key.

    Raises:
        TypeError: naming what was given.
    """
    if not inspect.isfunction(build) or build.__closure__ or "<" in build.__qualname__ or build.__defaults__:
        name = getattr(build, "__qualname__", repr(build))
        raise TypeError(
            f"build must be a plain function at module level, without default values, got {name}: "
            "what else it carries would be missing from the cache key; put it into the config"
        )


def _load_or_compile(family: str, config: Any, build: Build, target: str) -> Callable:
    check_install()
    require_target(target)
    key = cache_key(family=family, config=config, build=build, target=target)
    if sources_of(build).newest > _STARTED:
        logger.info("%s: its sources changed after this process started, so it is not cached on disk", family)
        return _compiled(key, config, build)
    disk = store.open_store()
    if disk is None:
        return _compiled(key, config, build)
    kernel = _loaded(disk, key)
    if kernel is not None:
        return kernel
    with disk.locked(key) as writable:
        kernel = _loaded(disk, key)  # another process may have been first
        if kernel is not None:
            return kernel
        made = _compiled(key, config, build)
        if not writable or not disk.put(key, partial(_export, made, key.symbol), cpu=make_portable(made)):
            return made
    # Taken from the file, as every later start does: what runs doesn't depend on who compiled it.
    return _load(disk.path(key), key) or made


def _export(made: Any, symbol: str, path: str) -> None:
    made.export_to_c(object_file_path=path, function_name=symbol)


def _loaded(disk: store.Store, key: store.Key) -> Callable | None:
    begin = time.perf_counter()
    path = disk.get(key)
    if path is None:
        return None
    looked = time.perf_counter()
    _cute()
    imported = time.perf_counter()
    kernel = _load(path, key)
    if kernel is not None:
        counts.loaded += 1
        counts.load_seconds += looked - begin + time.perf_counter() - imported
    return kernel


def _load(path: Path, key: store.Key) -> Callable | None:
    try:
        return getattr(_cute().runtime.load_module(str(path), enable_tvm_ffi=True), key.symbol)
    except Exception as error:
        logger.warning("%s: can't load %s (%s): compiling it again", key.family, path, error)
        return None


def _compiled(key: store.Key, config: Any, build: Build) -> Any:
    _cute()
    begin = time.perf_counter()
    made = _run_compiler(config, build, key.target)
    counts.compiled += 1
    counts.compile_seconds += time.perf_counter() - begin
    logger.debug("compiled %s for %s: %s", key.family, key.target, key.config)
    return made


def _run_compiler(config: Any, build: Build, target: str, keep: str | None = None) -> Any:
    cute = _cute()
    function, arguments = build(config)
    for argument in arguments:
        if getattr(argument, "use_tvm_ffi_env_stream", True) is False:
            raise TypeError(f"{build.__qualname__}: make the stream with make_fake_stream(use_tvm_ffi_env_stream=True)")
    options = f"{_OPTIONS} --gpu-arch {target}"
    if keep is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {keep}"
    return cute.compile(function, *arguments, options=options)


def _cute() -> Any:
    """cutlass.cute, imported at first need: it takes most of a second, and `rose doctor` runs without it."""
    check_install()
    import cutlass.cute
    import cutlass.cute.runtime
    import tvm_ffi  # noqa: F401  loading an object file would import it, and torch with it

    return cutlass.cute


@functools.cache
def compiler_versions() -> str:
    """Of all packages that the compiler consists of."""
    names = sorted(
        {name for dist in metadata.distributions() if (name := (dist.name or "").lower()).startswith(DSL)}
        | {"apache-tvm-ffi"}
    )
    return " ".join(f"{name}={metadata.version(name)}" for name in names)


def current_target() -> str:
    """The compile target of torch's current CUDA device.

    Raises:
        RuntimeError: there is no CUDA device, or no kernel of ours runs on it.
    """
    import torch

    return _target_of(torch.cuda.current_device())


@functools.cache
def _target_of(device: int) -> str:
    import torch

    check_install()
    choice = choose_target(capability=torch.cuda.get_device_capability(device), dsl_version=metadata.version(DSL))
    if choice.target is None:
        raise RuntimeError(choice.note)
    if choice.note:
        logger.warning("%s", choice.note)
    return choice.target
