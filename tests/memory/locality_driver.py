"""A ``cuda.bindings.driver`` of CUDA 13.4 whose GPU has locality domains, green contexts and streams, with a ledger.

An SM is a number; domain d has ``domains[d]`` of them, ``spare`` more belong to none. Splits take SMs as the driver's
reference says, a resource being the set of what it got. Memory is :mod:`memfd_driver`'s, marked with its domain.
Destroying a context before its stream is an AssertionError, as is everything that is none of the API's.
"""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from memfd_driver import CUresult, MemfdDriver

DEVICE, IN_DOMAIN = 1, 6
BACKFILL, DOMAIN_ID, SUPPLEMENTAL = 1, 2, 4


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_COUNT = 149
    CU_DEVICE_ATTRIBUTE_LOCALITY_DOMAIN_MULTIPROCESSOR_COUNT = 157
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_LOCALIZED_MEMORY_SUPPORTED = 161


class OldDeviceAttribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110


def resource(sms: frozenset[int], *, alignment: int = 8, domain: int = 0, flags: int = 0) -> SimpleNamespace:
    """A ``CUdevResource`` of these SMs."""
    numbers = {"smCount": len(sms), "minSmPartitionSize": 8, "smCoscheduledAlignment": alignment}
    return SimpleNamespace(sms=sms, sm=SimpleNamespace(**numbers, flags=flags, localityDomainId=domain))


class LocalityDriver(MemfdDriver):
    """Stands in for the module, in one process.

    Args:
        domains: SMs in each.
        spare: SMs in none.
        nominal: SMs that the attribute gives each domain; None: those of the smallest.
        version: CUDA's, as the driver counts.
        absent: functions that the driver library lacks; the bindings raise a RuntimeError of their own then.
        room: bytes of memory in each domain; None: enough.
        strays: memory that is asked for in this domain lies in no one.
        rdma: whether memory can be asked for that others reach by RDMA: anywhere, in a domain.
        (others): see :class:`MemfdDriver`.
    """

    CUdevice_attribute: Any = CUdevice_attribute
    CUmemLocationType = SimpleNamespace(
        CU_MEM_LOCATION_TYPE_DEVICE=DEVICE, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN=IN_DOMAIN
    )
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_LOCALITY_DOMAIN_ORDINAL=22)
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUdevSmResourceGroup_flags = SimpleNamespace(
        CU_DEV_SM_RESOURCE_GROUP_BACKFILL=BACKFILL,
        CU_DEV_SM_RESOURCE_GROUP_LOCALITY_DOMAIN_ID=DOMAIN_ID,
        CU_DEV_SM_RESOURCE_GROUP_LOCALITY_DOMAIN_SUPPLEMENTAL_SMS=SUPPLEMENTAL,
    )
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(
        self,
        *,
        domains: tuple[int, ...] = (100, 100),
        spare: int = 12,
        nominal: int | None = None,
        version: int = 13040,
        absent: tuple[str, ...] = (),
        room: int | None = None,
        strays: int | None = None,
        rdma: tuple[bool, bool] = (True, True),
        **others: Any,
    ):
        super().__init__(**others)
        owners = [domain for domain, count in enumerate(domains) for _ in range(count)] + [None] * spare
        self.owner: dict[int, int | None] = dict(enumerate(owners))
        self.domains = len(domains)
        self.nominal = min(domains) if nominal is None else nominal
        self.version = version
        self.absent = absent
        self.room, self.strays, self.rdma = room, strays, rdma
        self.memory_domain: dict[int, int] = {}  # handle -> domain, -1 for none
        self.by_rdma: set[int] = set()  # handles of memory that others reach
        self.contexts: dict[int, Any] = {}
        self.streams: dict[int, int] = {}  # stream -> context

    def ledger(self) -> dict[str, int]:
        """What this process holds."""
        return super().ledger() | {"contexts": len(self.contexts), "streams": len(self.streams)}

    def _begin(self, call: str, handle_type: Any = None) -> CUresult:
        if call in self.absent:
            raise RuntimeError(f"function {call} is not found")
        return super()._begin(call, handle_type)

    def sms_of(self, stream: int) -> frozenset[int]:
        """Where work in a stream runs."""
        return self.contexts[self.streams[stream]].sms

    CUmemAllocationProp = staticmethod(
        lambda: SimpleNamespace(
            type=0,
            location=SimpleNamespace(type=0, id=-1, localized=SimpleNamespace(deviceId=-1, localityDomainId=-1)),
            requestedHandleTypes=0,
            allocFlags=SimpleNamespace(compressionType=0, gpuDirectRDMACapable=0, usage=0),
        )
    )
    CU_DEV_SM_RESOURCE_GROUP_PARAMS = staticmethod(
        lambda: SimpleNamespace(
            smCount=0, coscheduledSmCount=0, preferredCoscheduledSmCount=0, flags=0, localityDomainId=0
        )
    )

    def cuDriverGetVersion(self) -> tuple[CUresult, Any]:
        return self._value("cuDriverGetVersion", self.version)

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> tuple[CUresult, Any]:
        values = {16: len(self.owner), 110: self.rdma[0], 149: self.domains, 157: self.nominal, 161: self.rdma[1]}
        return self._value("cuDeviceGetAttribute", values[attribute])

    def _domain(self, properties: Any) -> int:
        location = properties.location
        assert properties.type == 1 and location.type in (DEVICE, IN_DOMAIN)
        if location.type == DEVICE:
            assert location.id == self.device
            return -1
        assert location.localized.deviceId == self.device and 0 <= location.localized.localityDomainId < self.domains
        return location.localized.localityDomainId

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[CUresult, Any]:
        self._domain(properties)
        return self._value("cuMemGetAllocationGranularity", self.granularity)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, Any]:
        assert size > 0 and size % self.granularity == 0
        domain, asked = self._domain(properties), properties.allocFlags.gpuDirectRDMACapable
        assert not asked or self.rdma[domain >= 0], "the device doesn't have it"
        if self.room is not None and domain >= 0:
            held = sum(n for handle, (_, n) in self.handles.items() if self.memory_domain[handle] == domain)
            if held + size > self.room:
                return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        result, handle = self._create("cuMemCreate", size, None)
        if not result:
            self.memory_domain[handle] = -1 if domain == self.strays else domain
            self.by_rdma |= {handle} if asked else set()
        return (result, handle)

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[CUresult, Any]:
        assert attribute == 22
        handle = next((h for s, (n, h) in self.mapped.items() if s <= address < s + n), None)
        if handle is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, None)
        return self._value("cuPointerGetAttribute", self.memory_domain[handle])

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[CUresult, Any]:
        assert kind == 1
        return self._value("cuDeviceGetDevResource", resource(frozenset(self.owner)))

    def cuDevSmResourceSplit(self, count: int, whole: Any, flags: int, groups: list[Any]) -> tuple[Any, Any, Any]:
        assert count == len(groups) > 0 and flags == 0
        if result := self._begin("cuDevSmResourceSplit"):
            return (result, None, None)
        left, made = set(whole.sms), []
        for group in groups:
            assert group.flags & DOMAIN_ID and 0 <= group.localityDomainId < self.domains
            assert group.smCount % 2 == 0 and group.coscheduledSmCount % 2 == 0
            own = sorted(sm for sm in left if self.owner[sm] == group.localityDomainId)
            nearest = own if group.flags & SUPPLEMENTAL else own[: self.nominal]
            if group.flags & BACKFILL:
                far = sorted(left - set(nearest), key=lambda sm: (self.owner[sm] is not None, sm))
                got = (nearest + far)[: group.smCount] if nearest else []
            else:
                wanted = group.smCount or len(nearest)
                got = nearest[: wanted // group.coscheduledSmCount * group.coscheduledSmCount]
            if len(got) < max(group.coscheduledSmCount, group.smCount):
                return (Result.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None, None)
            left -= set(got)
            alignment = group.coscheduledSmCount
            made.append(resource(frozenset(got), alignment=alignment, domain=group.localityDomainId, flags=group.flags))
        return (Result.CUDA_SUCCESS, made, resource(frozenset(left)))

    def cuDevSmResourceSplitByCount(self, count: int, whole: Any, flags: int, least: int) -> tuple[Any, Any, Any, Any]:
        assert flags == 0 and count > 0
        if result := self._begin("cuDevSmResourceSplitByCount"):
            return (result, None, None, None)
        size = -(-least // whole.sm.smCoscheduledAlignment) * whole.sm.smCoscheduledAlignment
        sms = sorted(whole.sms)
        made = [frozenset(sms[size * i : size * (i + 1)]) for i in range(min(count, len(sms) // size))]
        rest = frozenset(sms[size * len(made) :])
        nothing = [resource(frozenset())] * (count - len(made))
        return (Result.CUDA_SUCCESS, [*map(resource, made), *nothing], len(made), resource(rest))

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[CUresult, Any]:
        assert count == len(resources) == 1 and resources[0].sms
        return self._value("cuDevResourceGenerateDesc", resources[0])

    def cuGreenCtxCreate(self, description: Any, device: int, flags: int) -> tuple[CUresult, Any]:
        assert device == self.device and flags == 1, "drivers before 13.4 want the default stream"
        return self._held("cuGreenCtxCreate", self.contexts, description)

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[CUresult, Any]:
        assert context in self.contexts and flags == 1 and priority == 0
        return self._held("cuGreenCtxStreamCreate", self.streams, context)

    def _held(self, call: str, where: dict[int, Any], value: Any) -> tuple[CUresult, Any]:
        if result := self._begin(call):
            return (result, None)
        number, self._next = self._next, self._next + 1
        where[number] = value
        return (result, number)

    def cuStreamDestroy(self, stream: int) -> tuple[CUresult]:
        del self.streams[stream]
        return (self._begin("cuStreamDestroy"),)

    def cuGreenCtxDestroy(self, context: int) -> tuple[CUresult]:
        assert context not in self.streams.values(), "its stream would be detached"
        del self.contexts[context]
        return (self._begin("cuGreenCtxDestroy"),)


def one_domain(**arguments: Any) -> LocalityDriver:
    """Like an H200 under CUDA 13.0: green contexts, no locality domains."""
    fake = LocalityDriver(**{"domains": (132,), "spare": 0, "version": 13000} | arguments)
    fake.CUdevice_attribute = OldDeviceAttribute
    return fake
