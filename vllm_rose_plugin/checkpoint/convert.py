"""Converts a checkpoint to MXFP8: streams it, survives being killed, publishes it in one rename."""

import contextlib
import errno
import math
import os
import queue
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_rose_plugin.checkpoint.files import checksums_text, config_text, index_text
from vllm_rose_plugin.checkpoint.headers import CHECKSUMS_NAME, INDEX_NAME, SCALE_SUFFIX, CheckpointError, TensorEntry
from vllm_rose_plugin.checkpoint.places import os_error, require_place
from vllm_rose_plugin.checkpoint.plan import Job, Options, Output, Plan, Shard, make_plan
from vllm_rose_plugin.checkpoint.quantizer import (
    CHUNK,
    BlockQuantizer,
    NonFiniteError,
    QuantizationError,
    require_finite,
)
from vllm_rose_plugin.checkpoint.rules import layer_of
from vllm_rose_plugin.checkpoint.state import WorkDirectory, write_durably
from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_COPY_BYTES = 4 << 20
_TASK_ELEMENTS = 8 * CHUNK  # what one worker takes at a time
_SLACK_BYTES = 64 << 20  # for names, indices and the file system's own needs


@dataclass
class Report:
    """What a conversion did."""

    layers: dict[str, QuantizationError]
    total: QuantizationError
    source_bytes: int
    output_bytes: int
    resumed_shards: int
    notes: list[str]


def convert(
    *, source: Path, destination: Path, options: Options | None = None, workers: int = 1, progress: bool = True
) -> Report:
    """Convert a Hugging Face checkpoint directory to MXFP8.

    Reads with plain reads into small buffers and never maps a file, so memory stays at torch's own plus a few
    megabytes per worker, and one expert's slice where stacked experts are stored transposed.

    Args:
        source: directory with config.json and safetensors of bf16, fp16 or fp32.
        destination: must not exist; appears complete, in one rename.
        options: format, rounding and what to leave unquantized.
        workers: threads that quantize; each runs torch on one core.
        progress: show a bar of source bytes on stderr.

    Raises:
        CheckpointError: the source can't be converted, the destination is taken, or the disk is full; one clear line.
    """
    options = options or Options()
    if workers < 1:
        raise CheckpointError(f"--workers {workers} is out of range: give 1 or more")
    try:
        work = _claim(source, destination)
        plan = make_plan(source, options)
    except OSError as error:
        raise CheckpointError(os_error(error)) from error
    shards = [(shard.name, shard.size, shard.header) for shard in plan.shards]
    try:
        if os.path.lexists(destination) and not (work.is_renamed() and work.is_published(shards)):
            work.remove_if_empty()
            raise CheckpointError(f"DST {destination} exists: give a new directory, or remove it")
        work.acquire()
    except OSError as error:
        raise CheckpointError(f"can't write DST {destination}: {os_error(error)}") from error
    try:
        if work.is_renamed():
            work.begin(plan.fingerprint())
            layers = _load_layers(work, plan)
            work.discard()
            return _report(plan, layers, len(plan.shards))
        work.begin(plan.fingerprint())
        return _Conversion(plan, work, workers, progress).run()
    except NonFiniteTensorError:
        work.discard()  # this source can never be converted, so there is nothing to resume
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space left while writing {work.root}: free some and run the same command again to resume"
            ) from error
        raise CheckpointError(f"{os_error(error)}; run the same command again to resume") from error
    finally:
        work.release()


class NonFiniteTensorError(CheckpointError):
    """A weight holds NaN or inf."""


def _claim(source: Path, destination: Path) -> WorkDirectory:
    """Look whether DST is a place to write to, before SRC is read; nothing is made or removed yet."""
    require_place(destination, "DST", sources={"SRC": source})
    return WorkDirectory(destination)


class _Worker(threading.local):
    """Buffers of one thread."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)  # the parallelism is over tensors
        self.quantizer = BlockQuantizer(rounding=options.rounding)
        self.raw = torch.empty(_COPY_BYTES, dtype=torch.uint8)


class _Conversion:
    def __init__(self, plan: Plan, work: WorkDirectory, workers: int, progress: bool) -> None:
        self.plan, self.work, self.workers = plan, work, workers
        self.worker = _Worker(plan.options)
        self.bar = tqdm(
            total=plan.source_bytes, unit="B", unit_scale=True, desc="quantize", disable=not progress, mininterval=0.5
        )
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def run(self) -> Report:
        manifests = {
            shard.name: self.work.finished(shard=shard.name, size=shard.size, header=shard.header)
            for shard in self.plan.shards
        }
        missing = [shard for shard in self.plan.shards if manifests[shard.name] is None]
        self._require_space(missing)
        self.bar.update(self.plan.source_bytes - sum(shard.source_bytes for shard in missing))
        threads_before = torch.get_num_threads()
        try:
            # One more thread syncs a written shard to disk while the next is being quantized.
            with ThreadPoolExecutor(self.workers) as pool, ThreadPoolExecutor(1) as finisher:
                try:
                    pending: Future[None] | None = None
                    for shard in missing:
                        finish = self._convert_shard(shard, pool)
                        if pending is not None:
                            pending.result()
                        pending = finisher.submit(finish)
                    if pending is not None:
                        pending.result()
                except BaseException:
                    self.stop.set()
                    raise
        finally:
            torch.set_num_threads(threads_before)
            self.bar.close()
        layers = _load_layers(self.work, self.plan)
        self._copy_other_files()
        self._write_index()
        self._write_checksums()
        write_durably(self.work.checkpoint / "config.json", config_text(self.plan.config))
        self.work.publish()
        return _report(self.plan, layers, len(self.plan.shards) - len(missing))

    def _require_space(self, missing: list[Shard]) -> None:
        needed = sum(shard.size for shard in missing) + _SLACK_BYTES
        needed += sum((self.plan.source / path).stat().st_size for path in self.plan.other_files)
        reused = sum(self.work.allocated(shard.name) for shard in missing)
        available = shutil.disk_usage(self.work.root).free + reused
        if needed > available:
            raise CheckpointError(
                f"not enough space for DST {self.work.destination}: {needed / 1e9:.2f} GB needed, "
                f"{available / 1e9:.2f} GB available"
            )

    def _convert_shard(self, shard: Shard, pool: ThreadPoolExecutor) -> Callable[[], None]:
        """Write a shard's data; the returned function makes it durable and records it."""
        path = self.work.checkpoint / shard.name
        output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        sources: dict[Path, int] = {}
        errors: dict[str, QuantizationError] = defaultdict(QuantizationError)
        try:
            os.ftruncate(output, shard.size)
            _write(output, memoryview(shard.header), 0)
            for job in shard.jobs:
                if job.source.path not in sources:
                    sources[job.source.path] = os.open(job.source.path, os.O_RDONLY)
            # A bounded number of tasks in flight: a shard of many experts has tens of thousands.
            tasks = _tasks(shard)
            in_flight: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
            try:
                for count, (job, task) in enumerate(tasks):
                    if count >= 4 * self.workers:
                        in_flight.get().result()
                    in_flight.put(
                        pool.submit(self._run_task, job, task, shard, sources[job.source.path], output, errors)
                    )
            except BaseException:
                self.stop.set()
                raise
            finally:
                failure: BaseException | None = None
                while not in_flight.empty():
                    failure = in_flight.get().exception() or failure
            if failure is not None:
                raise failure
        except BaseException:
            os.close(output)
            raise
        finally:
            for descriptor in sources.values():
                os.close(descriptor)

        def finish() -> None:
            try:
                os.fsync(output)
                scales = _scale_checksums(shard, output)
            finally:
                os.close(output)
            layers = {layer: asdict(error) for layer, error in sorted(errors.items())}
            self.work.finish(shard=shard.name, header=shard.header, layers=layers, scales=scales)

        return finish

    def _run_task(
        self, job: Job, task: "_Task", shard: Shard, source: int, output: int, errors: dict[str, QuantizationError]
    ) -> None:
        if self.stop.is_set():
            return
        worker = self.worker
        try:
            if task.output is None:
                self._copy(job.source, task, shard, source, output)
                return
            at = shard.offsets[task.output.name] + task.begin
            scale_at = shard.offsets[task.output.name + SCALE_SUFFIX] + task.begin // MXFP8_BLOCK
            total = QuantizationError()
            for values in _chunks(job.source, task, source, worker.raw):
                codes, scales, error = worker.quantizer(values)
                _write(output, codes.view(torch.uint8).numpy().data, at)
                _write(output, scales.numpy().data, scale_at)
                total.add(error)
                at += codes.numel()
                scale_at += scales.numel()
        except NonFiniteError:
            raise NonFiniteTensorError(
                f"{job.source.name} in {job.source.path.name} holds NaN or inf: MXFP8 can't carry it, mend the source"
            ) from None
        with self.lock:
            errors[layer_of(task.output.name)].add(total)
            self.bar.update((task.end - task.begin) * job.source.nbytes // max(1, _elements(job.source)))

    def _copy(self, entry: TensorEntry, task: "_Task", shard: Shard, source: int, output: int) -> None:
        dtype = _TORCH_DTYPES.get(entry.dtype)
        at = shard.offsets[entry.name] + task.begin
        raw = self.worker.raw[: task.end - task.begin]
        _read(source, raw, entry.begin + task.begin, entry.path)
        if dtype is not None:
            require_finite(raw.view(dtype))
        _write(output, raw.numpy().data, at)
        with self.lock:
            self.bar.update(raw.numel())

    def _copy_other_files(self) -> None:
        for path in self.plan.other_files:
            target = self.work.checkpoint / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.plan.source / path, target)
            with contextlib.closing(os.fdopen(os.open(target, os.O_RDONLY))) as file:
                os.fsync(file.fileno())

    def _write_index(self) -> None:
        weight_map = {name: shard.name for shard in self.plan.shards for name in shard.offsets}
        size = sum(shard.size - len(shard.header) for shard in self.plan.shards)
        write_durably(self.work.checkpoint / INDEX_NAME, index_text(weight_map=weight_map, total_size=size))

    def _write_checksums(self) -> None:
        checksums: dict[str, str] = {}
        for shard in self.plan.shards:
            checksums |= self.work.recorded(shard.name, "scales") or {}
        write_durably(self.work.checkpoint / CHECKSUMS_NAME, checksums_text(checksums))


def _scale_checksums(shard: Shard, output: int) -> dict[str, str]:
    """CRC-32 of each scale tensor of a written shard."""
    checksums = {}
    for job in shard.jobs:
        for part in job.outputs:
            name = part.name + SCALE_SUFFIX
            at, end, checksum = shard.offsets[name], shard.offsets[name] + math.prod(part.scale_shape), 0
            while at < end:
                data = os.pread(output, min(_COPY_BYTES, end - at), at)
                if not data:
                    raise CheckpointError(f"{shard.name} ended at byte {at}: something else changed it")
                checksum, at = zlib.crc32(data, checksum), at + len(data)
            checksums[name] = f"{checksum:08x}"
    return checksums


@dataclass(frozen=True)
class _Task:
    """A piece of one output (elements), or of a copied tensor (bytes)."""

    output: Output | None
    begin: int
    end: int


def _elements(entry: TensorEntry) -> int:
    return entry.nbytes // _TORCH_DTYPES[entry.dtype].itemsize


def _tasks(shard: Shard) -> Iterator[tuple[Job, _Task]]:
    for job in shard.jobs:
        if not job.outputs:
            for begin in range(0, job.source.nbytes, _COPY_BYTES):
                yield job, _Task(None, begin, min(begin + _COPY_BYTES, job.source.nbytes))
        for output in job.outputs:
            size = output.shape[0] * output.shape[1]
            # A transposed output is read whole, since every one of its rows touches every row of the source.
            step = max(1, size) if output.transposed else _TASK_ELEMENTS
            for begin in range(0, size, step):
                yield job, _Task(output, begin, min(begin + step, size))


def _chunks(entry: TensorEntry, task: _Task, source: int, raw: torch.Tensor) -> Iterator[torch.Tensor]:
    """The task's values, row-major as the output wants them, in runs of at most CHUNK elements of whole blocks."""
    output = task.output
    assert output is not None
    dtype = _TORCH_DTYPES[entry.dtype]
    if not output.transposed:
        for begin in range(task.begin, task.end, CHUNK):
            size = min(CHUNK, task.end - begin)
            values = raw[: size * dtype.itemsize]
            _read(source, values, entry.begin + (output.offset + begin) * dtype.itemsize, entry.path)
            yield values.view(dtype)
        return
    rows, columns = output.shape
    if rows == 0 or columns == 0:
        return
    region = torch.empty(columns, rows, dtype=dtype)  # (K, N) as stored
    _read_rows(source, region, entry, output)
    rows_at_once = max(1, CHUNK // columns)
    for begin in range(0, rows, rows_at_once):
        flat = region[:, begin : begin + rows_at_once].T.contiguous().view(-1)
        yield from flat.split(CHUNK)


def _read_rows(source: int, region: torch.Tensor, entry: TensorEntry, output: Output) -> None:
    """Fill (K, N) from rows that lie ``stride`` elements apart."""
    item = region.element_size()
    begin = entry.begin + output.offset * item
    if output.stride == region.shape[1]:
        _read(source, region.view(-1).view(torch.uint8), begin, entry.path)
        return
    for row in range(region.shape[0]):
        _read(source, region[row].view(torch.uint8), begin + row * output.stride * item, entry.path)


def _read(descriptor: int, target: torch.Tensor, offset: int, path: Path) -> None:
    """Fill a contiguous uint8 tensor from a file."""
    view = target.numpy().data
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise CheckpointError(f"{path.name} ended at byte {offset}: it was truncated during the conversion")
        view, offset = view[count:], offset + count


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _load_layers(work: WorkDirectory, plan: Plan) -> dict[str, QuantizationError]:
    """Per-layer errors from the shards' manifests: of this run and of the ones before it."""
    layers: dict[str, QuantizationError] = {}
    for shard in plan.shards:
        manifest = work.recorded(shard.name, "layers")
        if manifest is None:  # an earlier run was killed while it cleaned up
            plan.notes.append(f"the errors of {shard.name} are no longer known")
            continue
        for layer, error in manifest.items():
            layers.setdefault(layer, QuantizationError()).add(QuantizationError(**error))
    return layers


def _report(plan: Plan, layers: dict[str, QuantizationError], resumed: int) -> Report:
    total = QuantizationError()
    for error in layers.values():
        total.add(error)
    output_bytes = sum(shard.size for shard in plan.shards)
    return Report(layers, total, plan.source_bytes, output_bytes, resumed, plan.notes)
