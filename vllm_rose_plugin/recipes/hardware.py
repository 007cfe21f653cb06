"""The machines that recipes are written for: memory, GPUs per node, nodes per rack."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in the node it is sold in."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    """What a process sees, which is less than the nominal size."""
    memory_source: str
    gpus_per_node: int
    """GPUs of one node: a compute tray of a rack, or an HGX board."""
    nodes_per_rack: int
    """Nodes that share one NVLink domain; 1 where NVLink ends at the node."""
    architecture: str
    """``amd64`` or ``arm64``: of the host, hence of the image."""
    locality_domains: int = 1
    """Memory domains of one GPU, each near half of its SMs."""


_NVIDIA_SMI = "MiB that nvidia-smi shows as total"
GPUS: dict[str, Gpu] = {
    "H200": Gpu(
        name="H200",
        compute_capability=(9, 0),
        memory_bytes=143_771 << 20,
        memory_source=f"{_NVIDIA_SMI}; 141 GB nominal (NVIDIA H200 data sheet)",
        gpus_per_node=8,
        nodes_per_rack=1,
        architecture="amd64",
    ),
    "GB200": Gpu(
        name="GB200",
        compute_capability=(10, 0),
        memory_bytes=189_471 << 20,
        memory_source=f"{_NVIDIA_SMI}; 186 GB nominal (NVIDIA GB200 NVL72 data sheet: 13.4 TB for 72)",
        gpus_per_node=4,
        nodes_per_rack=18,
        architecture="arm64",
    ),
    "GB300": Gpu(
        name="GB300",
        compute_capability=(10, 3),
        memory_bytes=284_208 << 20,
        memory_source=f"{_NVIDIA_SMI}; 279 GB nominal (NVIDIA GB300 NVL72 data sheet: 20 TB for 72)",
        gpus_per_node=4,
        nodes_per_rack=18,
        architecture="arm64",
    ),
    "Rubin": Gpu(
        name="Rubin",
        compute_capability=(10, 7),
        memory_bytes=270 * GIB,
        memory_source="assumed: 288 GB nominal (NVIDIA Vera Rubin NVL72 page: 20.7 TB for 72), and 3 % less visible, "
        "as on GB300",
        gpus_per_node=4,
        nodes_per_rack=18,
        architecture="arm64",
        locality_domains=2,
    ),
}
"""By the name that a recipe gives as ``hardware.gpu``."""
