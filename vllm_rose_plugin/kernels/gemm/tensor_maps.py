"""One of several tensor maps, chosen on the device: parts of a weight have one each, and are loaded alike."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import cute as cute_ir
from cutlass._mlir.dialects import cute_nvgpu as nvgpu_ir
from cutlass.cutlass_dsl import dsl_user_op

_MAP_BYTES = 128


@dsl_user_op
def tensor_map_of(atoms: list, part: Int32, *, loc=None, ip=None):
    """The address of the tensor map of one of several TMA loads that differ in nothing else."""
    kind = nvgpu_ir.TmaDescriptorTiledType.get()
    place = cute_ir.PtrType.get(kind, cute.AddressSpace.generic, _MAP_BYTES)
    executed = [nvgpu_ir.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip) for atom in atoms]
    found, *others = (
        nvgpu_ir.get_tma_desc_addr(place, each, loc=loc, ip=ip).toint(loc=loc, ip=ip) for each in executed
    )
    for i, address in enumerate(others, 1):
        found = Int64(cutlass.select_(part == i, address, found))
    whole = cute_ir.ConstrainedIntType.get(_MAP_BYTES, 64)
    aligned = cute_ir.assume(whole, found.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
    return cute_ir.inttoptr(place, aligned, loc=loc, ip=ip)
