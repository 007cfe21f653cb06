"""RMS norm of every head of q and k in one launch, and the same followed by the rotary embedding.

A group of lanes (half a warp for 128 elements in 16 bits) works on up to `heads_per_lane` heads of one token. Heads are
dealt round: group g takes g, g + groups, g + 2 * groups, ... so that neighbouring groups read neighbouring heads.
Groups beyond the last token or head work on the last one and store nothing, which keeps the loads free of branches and
every lane of a warp in its shuffles.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from vllm_rose_plugin.kernels.ptx.pdl import pdl_launch_next, pdl_wait
from vllm_rose_plugin.kernels.ptx.reduce import lane_exchange, warp_sums
from vllm_rose_plugin.kernels.ptx.wide import load_global, prefetch_l2, store_global
from vllm_rose_plugin.kernels.qk_norm.config import QkNormConfig

_TYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


class QkNorm:
    """The kernel of one config; an instance is what cute.compile takes."""

    def __init__(self, config: QkNormConfig) -> None:
        self.config = config
        self.dtype = _TYPES[config.dtype]
        self.weight_dtype = _TYPES[config.weight_dtype]
        self.cos_sin_dtype = _TYPES.get(config.cos_sin_dtype, Float32)
        # vLLM rounds the normalized value to the weight's dtype before the multiplication. A weight with an offset
        # is a float32 weight there.
        self.round_before_weight = config.weight_dtype == config.dtype and config.weight_offset == 0.0

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, Hq, D), any strides of the first two
        k: cute.Tensor,  # (T, Hkv, D)
        q_out: cute.Tensor,  # (T, Hq, D), may be q
        k_out: cute.Tensor,  # (T, Hkv, D), may be k
        q_weight: cute.Tensor,  # (D,)
        k_weight: cute.Tensor,  # (D,)
        positions,  # (T,) int64, None without rotary embedding
        cos_sin_cache,  # (P, rotary_dim), None without rotary embedding
        stream: cuda.CUstream,
    ):
        cfg = self.config
        groups = q.shape[0] * cfg.groups_per_token
        blocks = cute.ceil_div(groups, cfg.groups_per_block)
        self.kernel(q, k, q_out, k_out, q_weight, k_weight, positions, cos_sin_cache).launch(
            grid=[blocks, 1, 1], block=[cfg.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        q_out: cute.Tensor,
        k_out: cute.Tensor,
        q_weight: cute.Tensor,
        k_weight: cute.Tensor,
        positions,
        cos_sin_cache,
    ):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % cfg.lanes_per_head
        first = lane * cfg.elements_per_lane
        item = block * cfg.groups_per_block + thread // cfg.lanes_per_head
        num_items = q.shape[0] * cfg.groups_per_token
        in_range = item < num_items
        item = Uint32(cutlass.min(item, num_items - 1))
        token = item // cfg.groups_per_token
        group = Int32(item % cfg.groups_per_token)

        # Brings the weights from HBM to L2 while the kernel before us ends. Not a load: it may be writing them. One
        # block does it: a prefetch always goes to L2, and there every block would queue for the same few lines.
        if block == 0:
            prefetch_l2(q_weight.iterator + first)
            prefetch_l2(k_weight.iterator + first)
        pdl_wait()
        pdl_launch_next()

        xs = [None] * cfg.heads_per_lane
        weights = [None] * cfg.heads_per_lane
        sources = self._addresses(q, k, token, group, first)
        for i in cutlass.range_constexpr(cfg.heads_per_lane):
            xs[i] = load_global(self._pointer(sources[i]), cfg.elements_per_lane, max_bits=cfg.vector_bits)
        for i in cutlass.range_constexpr(cfg.heads_per_lane):
            weights[i] = self._load_weight(q_weight, k_weight, group, i, first)
        cos, sin = None, None
        if const_expr(cfg.rotary_dim > 0):
            cos, sin = self._load_cos_sin(positions, cos_sin_cache, token, first)
        # All sums together: the shuffles of one head fill the latency of another's.
        scales = self._scales(xs)
        targets = self._addresses(q_out, k_out, token, group, first)
        for i in cutlass.range_constexpr(cfg.heads_per_lane):
            y = self._normalize(xs[i], scales[i], weights[i])
            if const_expr(cfg.rotary_dim > 0):
                y = self._rotate(y, cos, sin, lane)
            if in_range & (self._head_unclamped(group, i) < cfg.num_q_heads + cfg.num_kv_heads):
                store_global(self._pointer(targets[i]), y, max_bits=cfg.vector_bits)

    def _head_unclamped(self, group, i):
        return group + i * self.config.groups_per_token

    def _head(self, group, i):
        cfg = self.config
        heads = cfg.num_q_heads + cfg.num_kv_heads
        head = self._head_unclamped(group, i)
        return head if (i + 1) * cfg.groups_per_token <= heads else cutlass.min(head, heads - 1)

    def _addresses(self, q, k, token, group, first):
        """Addresses of a lane's elements in all of its heads, counted through q and then k."""
        cfg = self.config
        size = self.dtype.width // 8
        q_row = q.iterator.toint() + (Int64(token) * Int64(q.stride[0]) + Int64(first)) * size
        k_row = k.iterator.toint() + (Int64(token) * Int64(k.stride[0]) + Int64(first)) * size
        # The strides between heads come in 64 bits but fit in 32: the host checks it.
        q_stride, k_stride = Int32(q.stride[1]) * size, Int32(k.stride[1]) * size
        addresses = []
        for i in range(cfg.heads_per_lane):
            head = self._head(group, i)
            if (i + 1) * cfg.groups_per_token <= cfg.num_q_heads:
                addresses.append(q_row + _wide_product(head, q_stride))
                continue
            is_q = head < cfg.num_q_heads
            row = _select(is_q, q_row, k_row)
            local = _select(is_q, head, head - cfg.num_q_heads)
            addresses.append(row + _wide_product(local, _select(is_q, q_stride, k_stride)))
        return addresses

    def _pointer(self, address):
        align = self.config.vector_bits // 8
        return cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=align)

    def _load_weight(self, q_weight, k_weight, group, i, first):
        """A lane's weights for its i-th head, as they are stored."""
        cfg = self.config
        if (i + 1) * cfg.groups_per_token <= cfg.num_q_heads:
            base = q_weight.iterator.toint()
        else:
            is_q = self._head(group, i) < cfg.num_q_heads
            base = _select(is_q, q_weight.iterator.toint(), k_weight.iterator.toint())
        size = self.weight_dtype.width // 8
        bits = min(cfg.weight_bits, cfg.elements_per_lane * size * 8)
        pointer = cute.make_ptr(
            self.weight_dtype, base + Int64(first * size), cute.AddressSpace.gmem, assumed_align=bits // 8
        )
        return load_global(pointer, cfg.elements_per_lane, max_bits=bits)

    def _load_cos_sin(self, positions, cos_sin_cache, token, first):
        """Cosines and sines of a lane's pairs; lanes past rotary_dim read those of element 0 and don't use them."""
        cfg = self.config
        half = cfg.rotary_dim // 2
        if cfg.interleaved:
            count, index = cfg.elements_per_lane // 2, first // 2
        else:
            count, index = cfg.elements_per_lane, _select(first < half, first, first - half)
        index = _select(first < cfg.rotary_dim, index, Int32(0))
        size = self.cos_sin_dtype.width // 8
        bits = min(cfg.cos_sin_bits, count * size * 8, _power_of_two_factor(half * size) * 8)
        row = cos_sin_cache.iterator.toint() + (positions[token] * cfg.rotary_dim + Int64(index)) * size
        cos = cute.make_ptr(self.cos_sin_dtype, row, cute.AddressSpace.gmem, assumed_align=bits // 8)
        sin = cute.make_ptr(self.cos_sin_dtype, row + half * size, cute.AddressSpace.gmem, assumed_align=bits // 8)
        return load_global(cos, count, max_bits=bits), load_global(sin, count, max_bits=bits)

    def _scales(self, xs):
        """1 / sqrt(mean(x ** 2) + eps) of every head, in all of its lanes."""
        cfg = self.config
        n = cfg.elements_per_lane
        totals = []
        for x in xs:
            squares = cute.make_rmem_tensor((n,), Float32)
            values = x.load().to(Float32)  # (n,)
            squares.store(values * values)
            even, odd = squares[0], squares[1]
            for i in range(2, n, 2):
                even, odd = even + squares[i], odd + squares[i + 1]
            totals.append(even + odd)
        totals = warp_sums(totals, lanes=cfg.lanes_per_head)
        return [cute.math.rsqrt(total * (1.0 / cfg.head_dim) + cfg.eps, fastmath=True) for total in totals]

    def _normalize(self, x, scale, weight):
        """A lane's elements of one normalized head, in the model's dtype."""
        cfg = self.config
        n = cfg.elements_per_lane
        scaled = x.load().to(Float32) * scale  # (n,)
        if self.round_before_weight:
            scaled = scaled.to(self.dtype).to(Float32)
        factor = weight.load().to(Float32)
        if cfg.weight_offset != 0.0:
            factor = factor + cfg.weight_offset
        y = cute.make_rmem_tensor((n,), self.dtype)
        y.store((scaled * factor).to(self.dtype))
        return y

    def _rotate(self, y, cos, sin, lane):
        """Rotates a lane's elements, in float32 from the rounded norm, rounded once."""
        cfg = self.config
        n = cfg.elements_per_lane
        out = cute.make_rmem_tensor((n,), self.dtype)
        rotated_lanes = cfg.rotary_dim // n
        if cfg.interleaved:
            values = cute.make_rmem_tensor((n,), Float32)
            values.store(y.load().to(Float32))
            turned = cute.make_rmem_tensor((n,), Float32)
            for i in range(n // 2):
                a, b = values[2 * i], values[2 * i + 1]
                c, s = cos[i].to(Float32), sin[i].to(Float32)
                turned[2 * i] = a * c - b * s
                turned[2 * i + 1] = b * c + a * s
            out.store(turned.load().to(self.dtype))
        else:
            half_lanes = rotated_lanes // 2
            is_first = lane < half_lanes
            partner = lane_exchange(
                y, lane=lane, source=_select(is_first, lane + half_lanes, lane - half_lanes), lanes=cfg.lanes_per_head
            )
            sign = _select(is_first, Float32(-1.0), Float32(1.0))
            values = y.load().to(Float32) * cos.load().to(Float32)
            out.store((values + partner.load().to(Float32) * (sin.load().to(Float32) * sign)).to(self.dtype))
        if cfg.rotary_dim == cfg.head_dim:
            return out
        kept, new = cute.recast_tensor(y, Int32), cute.recast_tensor(out, Int32)
        for i in range(n // 2):
            new[i] = _select(lane < rotated_lanes, new[i], kept[i])
        return out


def _select(condition, a, b):
    return cutlass.select_(condition, a, b)


def _wide_product(a, b):
    return Int64(a) * Int64(b)


def _power_of_two_factor(n: int) -> int:
    return n & -n


def build(config: QkNormConfig) -> tuple:
    """The jit function of a config and the tensors that describe its arguments, for `jit.compile`."""
    kernel = QkNorm(config)
    tokens = cute.sym_int32()
    align = config.vector_bits // 8

    def heads(count):
        # Strides are free: `vector_bits` was chosen for them, and torch may report any for a dimension of size 1.
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(kernel.dtype, (tokens, count, config.head_dim), strides, assumed_align=align)

    def weight():
        return make_fake_compact_tensor(kernel.weight_dtype, (config.head_dim,), assumed_align=config.weight_bits // 8)

    positions = cos_sin = None
    if config.rotary_dim:
        positions = make_fake_compact_tensor(Int64, (tokens,), assumed_align=8)
        cos_sin = make_fake_compact_tensor(
            kernel.cos_sin_dtype,
            (cute.sym_int32(), config.rotary_dim),
            stride_order=(1, 0),
            assumed_align=config.cos_sin_bits // 8,
        )
    q, k = config.num_q_heads, config.num_kv_heads
    arguments = (heads(q), heads(k), heads(q), heads(k), weight(), weight(), positions, cos_sin)
    return kernel, (*arguments, make_fake_stream(use_tvm_ffi_env_stream=True))
