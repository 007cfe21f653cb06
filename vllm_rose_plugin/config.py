"""The plugin's settings: ``--additional-config '{"rose": {…}}'`` first, then ``ROSE_*`` variables, then defaults."""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from vllm_rose_plugin.kernels.contracts import Activation, Rounding
from vllm_rose_plugin.kernels.peer_timeout import MOST_SECONDS

BACKEND = "rose_cutedsl"
"""The name users type after ``--moe-backend`` and ``--linear-backend``."""

ALL2ALL = "rose_nvlink"
"""The name users type after ``--all2all-backend``."""

SUPPORTED = (
    f"{BACKEND} serves MXFP8 models (E4M3 weights, one E8M0 scale for 32 of them): ModelOpt, compressed-tensors, INC, "
    "MiniMax-style and (vLLM 0.33) Quark checkpoints, and --quantization mxfp8 on BF16 ones, without LoRA; "
    "`rose quantize` makes an MXFP8 checkpoint"
)
"""What every refusal ends with."""


BATCHED_ALL2ALL = ("deepep_low_latency", "nixl_ep")
"""vLLM's own all-to-all backends with which our experts take data parallelism: those that sort tokens by expert."""

RECORDED = ("version", "target")
"""Keys that we add to ``additional_config["rose"]`` for vLLM's hash."""


class QkNorm(StrEnum):
    """What normalizes the heads of q and k in Qwen3 and Qwen3-MoE."""

    AUTO = "auto"
    """Our kernel where it can serve: NVIDIA GPUs from sm_90 on, head_dim 64, 128 or 256, bf16 or fp16; vLLM's own norms
    elsewhere."""
    REFERENCE = "reference"
    """The kernel's plain torch form, on any device: slow, for checking what `auto` computes."""
    OFF = "off"
    """vLLM's own norms."""


class AllReduceChoice(StrEnum):
    """What reduces over the ranks of a tensor-parallel group."""

    AUTO = "auto"
    """Ours where it can serve: NVLS from four ranks on where the hardware has multicast, NVLink peer-to-peer elsewhere;
    vLLM's own, with a line in the log, where neither works."""
    P2P = "p2p"
    """Ours over NVLink peer-to-peer, without multicast; start-up fails where it can't be had."""
    NVLS = "nvls"
    """Ours over NVLink multicast; start-up fails where it can't be had."""
    OFF = "off"
    """vLLM's own."""

    @property
    def setting(self) -> str:
        """As a user writes it."""
        return f'--additional-config {{"rose": {{"all_reduce": "{self}"}}}}'


class AllReduceNorm(StrEnum):
    """Whether the residual and the RMS norm behind an all-reduce go into its launch."""

    AUTO = "auto"
    """In compiled graphs, for the numbers of tokens at which start-up times that to be faster."""
    OFF = "off"
    """Never."""


class Locality(StrEnum):
    """Where the experts' weights lie, and how they are read, on a GPU whose memory is in several locality domains."""

    AUTO = "auto"
    """In parts, one beside each domain's SMs, where start-up times that to be faster for the model's shapes; whole
    elsewhere, as on every GPU of one domain."""
    OFF = "off"
    """Whole."""
    DEFAULT = "default"
    """In parts; a launch for each, on its domain's SMs alone. Start-up fails where that can't be had."""
    BACKFILL = "backfill"
    """In parts; a launch for each, on an equal share of all SMs, which can't use clusters. As above."""
    SINGLE_LAUNCH = "single_launch"
    """In parts; one launch, whose blocks take tiles of their own domain first. As above."""


class RoseConfig(BaseModel):
    """Settings that change what is computed. vLLM hashes them, since they lie in ``additional_config``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=True, validate_default=True)

    activation: Activation = Activation.MXFP8
    """What multiplies the MXFP8 weights: ``mxfp8`` quantizes activations 1x32 (W8A8), ``bf16`` leaves them (W8A16)."""
    rounding: Rounding = Rounding.RCEIL
    """How activation scales are chosen; see :class:`Rounding`."""
    qk_norm: QkNorm = QkNorm.AUTO
    """See :class:`QkNorm`. In force when a rose backend is named, or when this setting itself is given: it then names
    us for the norms alone, in models of any quantization."""
    all_reduce: AllReduceChoice = AllReduceChoice.OFF
    """See :class:`AllReduceChoice`. Any but ``off`` names us for the all-reduce alone, in models of any kind."""
    all_reduce_timeout: float = Field(default=60.0, gt=0, le=MOST_SECONDS, allow_inf_nan=False)
    """Seconds, up to a day, that our all-reduce waits for a rank before the worker raises a PeerTimeoutError."""
    all_reduce_norm: AllReduceNorm = AllReduceNorm.OFF
    """See :class:`AllReduceNorm`; with ``all_reduce``."""
    all_to_all_timeout: float = Field(default=60.0, gt=0, le=MOST_SECONDS, allow_inf_nan=False)
    """Seconds, up to a day, that ``--all2all-backend rose_nvlink`` waits for a rank before the worker raises a
    PeerTimeoutError."""
    locality: Locality = Locality.AUTO
    """See :class:`Locality`; of ``--moe-backend rose_cutedsl`` alone."""
    locality_force_domains: int = Field(default=0, ge=0, le=4)
    """For tests and measurement: so many parts and equal shares of the SMs, 2 to 4, on a GPU of one domain, where they
    gain nothing. With a ``locality`` that names a way."""
    locality_linear: bool = False
    """Whether weights of ``--linear-backend rose_cutedsl`` are split too: with locality ``auto`` those that start-up
    times to be faster in parts, with a named way all that can be split. One launch reads them, whichever way it is."""
    tune: bool = False
    """Whether start-up times other configs of the GEMM at the model's shapes and keeps the fastest, as `rose tune`
    does; that takes a while. Tuned choices on disk are used either way."""

    @field_validator("all_reduce_norm")
    @classmethod
    def _check_norm(cls, norm: AllReduceNorm, info: ValidationInfo) -> AllReduceNorm:
        if norm != AllReduceNorm.OFF and info.data.get("all_reduce") == AllReduceChoice.OFF:
            ways = ", ".join((AllReduceChoice.AUTO, AllReduceChoice.P2P, AllReduceChoice.NVLS))
            raise ValueError(f"it is part of our all-reduce, which is off: set all_reduce to {ways}")
        return norm

    @field_validator("locality_force_domains")
    @classmethod
    def _check_forced(cls, domains: int, info: ValidationInfo) -> int:
        if domains == 1:
            raise ValueError("one domain is no split; 2 to 4 force one, 0 doesn't")
        if domains and info.data.get("locality") in (Locality.AUTO, Locality.OFF):
            ways = ", ".join((Locality.DEFAULT, Locality.BACKFILL, Locality.SINGLE_LAUNCH))
            raise ValueError(f"locality={info.data['locality']} forces no domains: set locality to {ways}")
        return domains

    @field_validator("locality_linear")
    @classmethod
    def _check_linear(cls, split: bool, info: ValidationInfo) -> bool:
        if split and info.data.get("locality") == Locality.OFF:
            ways = ", ".join((Locality.AUTO, Locality.DEFAULT, Locality.BACKFILL, Locality.SINGLE_LAUNCH))
            raise ValueError(f"locality=off splits nothing: set locality to {ways}")
        return split

    @classmethod
    def load(cls, additional_config: Any = None, environ: Mapping[str, str] = os.environ) -> "RoseConfig":
        """Merge vLLM's ``additional_config`` with the environment.

        Args:
            additional_config: vLLM's value; only its ``"rose"`` key is read. What RECORDED lists is ours.
            environ: where ``ROSE_ACTIVATION``, ``ROSE_ROUNDING``, ``ROSE_QK_NORM``, ``ROSE_ALL_REDUCE``,
                ``ROSE_ALL_REDUCE_TIMEOUT``, ``ROSE_ALL_REDUCE_NORM``, ``ROSE_ALL_TO_ALL_TIMEOUT``, ``ROSE_LOCALITY``,
                ``ROSE_LOCALITY_FORCE_DOMAINS``, ``ROSE_LOCALITY_LINEAR`` and ``ROSE_TUNE`` are looked up.

        Raises:
            ValueError: an unknown key or value; the message names it, the legal ones, and where it was set.
        """
        given = additional_config.get("rose", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise ValueError(
                f'--additional-config: "rose" must be an object such as {{"activation": "bf16"}}, got {given!r}'
            )
        values: dict[str, Any] = {key: value for key, value in given.items() if key not in RECORDED}
        sources = {key: f'--additional-config {{"rose": {{"{key}": …}}}}' for key in values}
        for key in cls.model_fields:
            variable = f"ROSE_{key.upper()}"
            if key not in values and environ.get(variable):
                values[key], sources[key] = environ[variable], variable
        try:
            return cls(**values)
        except ValidationError as error:
            raise ValueError("; ".join(_explain(fault, sources, cls) for fault in error.errors())) from None

    @staticmethod
    def asks_for(
        key: Literal["qk_norm", "all_reduce"], additional_config: Any = None, environ: Mapping[str, str] = os.environ
    ) -> bool:
        """Whether a setting that can name us by itself is given, by either way, and isn't ``off``."""
        given = additional_config.get("rose", {}) if isinstance(additional_config, dict) else {}
        given = given if isinstance(given, dict) else {}
        value = given.get(key, environ.get(f"ROSE_{key.upper()}"))
        return bool(value) and value != "off"

    def recorded(self) -> dict[str, Any]:
        """What vLLM is to hash and to hand to its workers: what changes no graph stays out unless it was changed."""
        unhashed = (
            *("all_reduce_timeout", "all_reduce_norm", "all_to_all_timeout"),
            *("locality", "locality_force_domains", "locality_linear", "tune"),
        )
        return self.model_dump(exclude={key for key in unhashed if getattr(self, key) == _default(key)})


def _default(key: str) -> Any:
    return RoseConfig.model_fields[key].default


def _explain(fault: Any, sources: dict[str, str], cls: type[RoseConfig]) -> str:
    key = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        return f"{sources.get(key, key)}: unknown rose setting {key!r}; legal ones: {', '.join(cls.model_fields)}"
    return f"{sources.get(key, key)}: {fault['input']!r} is not allowed: {fault['msg']}"
