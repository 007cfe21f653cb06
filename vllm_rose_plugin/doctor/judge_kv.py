"""Findings about the way that KV takes between a prefill and a decode server."""

from collections.abc import Iterator

from vllm_rose_plugin.doctor.facts import Facts
from vllm_rose_plugin.doctor.finding import Finding

_RDMA = {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x"}
_RDMA |= {"ud_verbs", "ud_mlx5", "gga", "gga_x", "gga_mlx5"}
"""Names in UCX_TLS that let UCX use InfiniBand or RoCE, by UCX's own list (`ucx_info -f`)."""
_COST = "KV between hosts that share no NVLink domain goes over TCP, far below the network's rate, and nothing says so"


def kv_findings(facts: Facts) -> Iterator[Finding]:
    """Why KV would go over TCP; nothing where no KV is moved, or between CPUs, where it may."""
    kv = facts.kv_transport
    if kv.nixl is None or not facts.gpus:
        return
    if not kv.usable:
        there = f"this host has {', '.join(kv.rdma_devices)}, but " if kv.rdma_devices else ""
        yield Finding(
            "warning",
            "kv_no_rdma",
            f"NIXL {kv.nixl} is installed, and {there}no device under /dev/infiniband can be opened here",
            _COST,
            "pass the devices into the container (`--device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1`; "
            "Kubernetes: the resource of the RDMA device plugin)",
        )
        return
    names = kv.ucx.get("UCX_TLS", "all").split(",")
    excluding = names[0].startswith("^")
    listed = {name.lstrip("^") for name in names}
    if ({"ib", "rc", "all"} & listed) if excluding else not (_RDMA & listed):
        yield Finding(
            "warning",
            "kv_ucx_tls",
            f"UCX_TLS={kv.ucx['UCX_TLS']} keeps UCX from InfiniBand",
            _COST,
            "unset UCX_TLS, or add rc to it (and cuda_copy, cuda_ipc for GPU memory)",
        )
    devices = [name.partition(":")[0] for name in kv.ucx.get("UCX_NET_DEVICES", "all").split(",")]
    if kv.rdma_devices and "all" not in devices and not set(devices) & set(kv.rdma_devices):
        yield Finding(
            "warning",
            "kv_ucx_net_devices",
            f"UCX_NET_DEVICES={kv.ucx['UCX_NET_DEVICES']} names none of {', '.join(kv.rdma_devices)}",
            _COST,
            f"unset UCX_NET_DEVICES, or name RDMA devices in it, such as {kv.rdma_devices[0]}:1",
        )
