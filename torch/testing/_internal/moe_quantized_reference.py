"""Float64 reference of the low-precision MoE ops: scales, codes and the numbers that they encode.

It follows the definitions, without the bit operations of the kernels. The exponent of a block is the
smallest one for which its largest element fits. A code is the nearest number of a table.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.testing._internal.moe_reference import apply_activation, MoeMlpGrads


E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
BLOCK = {
    ScalingType.RowWise: None,
    ScalingType.BlockWise1x32: 32,
    ScalingType.BlockWise1x128: 128,
    ScalingType.BlockWise128x128: 128,
}
RECIPES = tuple(BLOCK)
ROW, MX, B128, SQUARE = (recipe.value for recipe in RECIPES)
# Codes of activations and of weights, by recipe of F.moe_mlp.
CODES = {"mxfp8": (MX, MX), "fp8_blockwise": (B128, SQUARE), "fp8_rowwise": (ROW, ROW)}


def _bytes_of(amax: Tensor, largest: float) -> Tensor:
    """Biased exponents of blocks whose largest magnitudes are given (float64)."""
    mantissa, exponent = torch.frexp(amax / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    byte = torch.where(amax == 0, 0, exponent + 127).clamp(0, 254)
    return torch.where(amax.isfinite(), byte, 255)


def _nearest_codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds scaled float64 numbers to the dtype: ties to even, too large numbers saturate."""
    if dtype == torch.int8:
        return x.round().clamp(-127, 127).nan_to_num(0).to(torch.int8)
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).double()
    magnitude = x.abs().clamp(max=448).nan_to_num(0)
    upper = torch.searchsorted(numbers, magnitude).clamp(1, 0x7E)
    below, above = magnitude - numbers[upper - 1], numbers[upper] - magnitude
    takes_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    code = torch.where(takes_upper, upper, upper - 1)
    code = torch.where(x.isnan(), 0x7F, code + 128 * x.signbit())
    return code.to(torch.uint8).view(E4M3)


def _segments(length: int, block: int | None, offs: Tensor | None):
    """(begin, end, index of the scale) of every block of a dimension, and the number of scales."""
    if offs is None:
        step = block or max(length, 1)
        ends = range(0, length, step)
        count = 1 if block is None else len(ends)
        return [(b, min(b + step, length), i) for i, b in enumerate(ends)], count
    segments, begin = [], 0
    for e, end in enumerate(offs.tolist()):
        step = block or max(end - begin, 1)
        first = 0 if block is None else begin // block
        for i, b in enumerate(range(begin, end, step)):
            segments.append((b, min(b + step, end), first + e + i))
        begin = end
    return segments, (0 if block is None else length // block) + len(offs)


def _as_scale(byte: Tensor, recipe: ScalingType) -> Tensor:
    if recipe == ScalingType.BlockWise1x32:
        return byte.to(torch.uint8).view(torch.float8_e8m0fnu)
    value = torch.exp2(byte.double() - 127).float()
    return torch.where(byte == 255, torch.nan, value)


def moe_quantize_reference(
    self: Tensor,
    recipe: int,
    *,
    offs: Tensor | None = None,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``self`` as of ``_moe_quantize``, without a swizzle."""
    kind, dtype = ScalingType(recipe), dtype or E4M3
    largest, block = LARGEST[dtype], BLOCK[kind]
    if kind == ScalingType.BlockWise128x128:
        x = self.double()
        byte = torch.zeros(
            *x.shape[:-2], *(-(-n // 128) for n in x.shape[-2:]), dtype=torch.int64
        )
        spread = torch.zeros(x.shape, dtype=torch.int64)
        for i in range(byte.shape[-2]):
            for j in range(byte.shape[-1]):
                tile = (
                    ...,
                    slice(128 * i, 128 * i + 128),
                    slice(128 * j, 128 * j + 128),
                )
                amax = torch.where(x[tile].isnan(), torch.inf, x[tile].abs())
                byte[..., i, j] = _bytes_of(amax.flatten(-2).amax(-1), largest)
                spread[tile] = byte[..., i : i + 1, j : j + 1]
        data = _nearest_codes(_scaled(x, spread), dtype)
        return data, _as_scale(byte, kind)
    x = self.double().movedim(dim, -1)
    segments, count = _segments(x.shape[-1], block, offs)
    byte = torch.zeros(*x.shape[:-1], count, dtype=torch.int64)
    places = torch.zeros(x.shape[-1], dtype=torch.int64)
    is_live = torch.zeros(x.shape[-1], dtype=torch.bool)
    for begin, end, place in segments:
        part = x[..., begin:end]
        amax = torch.where(part.isnan(), torch.inf, part.abs()).amax(-1)
        byte[..., place] = _bytes_of(amax, largest)
        places[begin:end], is_live[begin:end] = place, True
    # Codes of rows after the last expert are 0.
    spread = torch.where(is_live, byte[..., places], 0)
    scaled = _scaled(torch.where(is_live, x, 0), spread)
    data = _nearest_codes(scaled, dtype)
    return data.movedim(-1, dim), _as_scale(byte, kind).movedim(-1, dim)


def _scaled(x: Tensor, byte: Tensor) -> Tensor:
    return torch.where(byte == 255, torch.nan, x * torch.exp2(127 - byte.double()))


def scale_to_double(scale: Tensor) -> Tensor:
    """The values of scales of any dtype; the float8_e8m0fnu byte 255 is NaN."""
    if scale.dtype == torch.float8_e8m0fnu:
        byte = scale.view(torch.uint8).double()
        return torch.where(byte == 255, torch.nan, torch.exp2(byte - 127))
    return scale.double()


def dequantize_reference(
    data: Tensor,
    scale: Tensor,
    recipe: int,
    *,
    offs: Tensor | None = None,
    dim: int = -1,
) -> Tensor:
    """Dequantises codes and scales of :func:`moe_quantize_reference` to float64."""
    kind = ScalingType(recipe)
    value, numbers = scale_to_double(scale), data.to(torch.float64)
    if kind == ScalingType.BlockWise128x128:
        rows, cols = (torch.arange(n) // 128 for n in data.shape[-2:])
        return numbers * value[..., rows, :][..., cols]
    place = torch.zeros(data.shape[dim], dtype=torch.int64)
    segments, _ = _segments(data.shape[dim], BLOCK[kind], offs)
    for begin, end, where in segments:
        place[begin:end] = where
    return numbers * value.index_select(dim, place)


def quantized_values(
    x: Tensor,
    recipe: int,
    *,
    offs: Tensor | None = None,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``x`` quantised and dequantised, float64."""
    data, scale = moe_quantize_reference(x, recipe, offs=offs, dim=dim, dtype=dtype)
    return dequantize_reference(data, scale, recipe, offs=offs, dim=dim)


def swizzle_reference(scale: Tensor) -> Tensor:
    """(R, C) scales in the order of SWIZZLE_32_4_4, entry by entry, flat."""
    rows, cols = scale.shape
    tiles = -(-cols // 4)
    out = torch.zeros(-(-rows // 128) * 128 * tiles * 4, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = r // 128 * tiles + c // 4
            place = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            out[place] = scale[r, c].view(torch.uint8)
    return out


def sqnr(reference: Tensor, x: Tensor) -> float:
    """Signal to quantisation noise of ``x`` in dB."""
    reference, x = reference.double(), x.double()
    noise = (reference - x).square().sum().clamp(min=1e-300)
    return (10 * torch.log10(reference.square().sum() / noise)).item()


def apart_from_limit(
    h: Tensor,
    activation: str,
    *,
    gate_interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """H (R, g*F) as it is saved in 8 bits: below 15/16 of the limit, or 9/8 of it."""
    if limit is None:
        if activation != "swiglu_oai":
            return h
        limit = 7.0
    size = torch.where(
        h.abs() < limit, h.abs().clamp(max=limit * 15 / 16), limit * 9 / 8
    )
    moved = torch.where(h.isnan(), h, size.copysign(h))
    column = torch.arange(h.shape[1])
    is_gate = column % 2 == 0 if gate_interleaved else column < h.shape[1] // 2
    # The gate has no limit from below.
    return torch.where(is_gate & (h < 0), h, moved)


class ScaledMlp:
    """``_moe_mlp_scaled`` and its backward as a loop over experts, from quantised operands.

    The reference above quantises every operand of a product along the summed dimension. The steps run in
    float64. With ``dtype`` they run in that dtype and round each result, as the yardstick of a kernel.

    Args:
        ops: operands, a :class:`torch.testing._internal.moe_generators.MoeOperands`.
        recipe_a: code of the activations, None for weight-only.
        recipe_w: code of the weights.
        dtype: None for float64.
        preact_dtype: dtype in which H is kept for the backward; None keeps H as it is.
        hp_wgrad: the operands of the weight gradients are not quantised along the rows.
        activation: keyword arguments of ``apply_activation``.
    """

    def __init__(
        self,
        ops,
        recipe_a,
        recipe_w,
        *,
        dtype=None,
        preact_dtype=E4M3,
        hp_wgrad=False,
        **activation,
    ):
        self.ops, self.a, self.w = ops, recipe_a, recipe_w
        self.dtype, self.preact_dtype = dtype, preact_dtype
        self.columns = recipe_a is not None and not hp_wgrad
        self.activation = {"activation": "swiglu", **activation}
        rows = ops.input.shape[0] if ops.row_slots is None else len(ops.row_slots)
        slots = torch.arange(rows) if ops.row_slots is None else ops.row_slots.long()
        self.live = (slots >= 0) & (torch.arange(rows) < ops.offs[-1])
        self.slots = torch.where(self.live, slots, 0)
        self.tokens = self.slots // (
            1 if ops.slot_rows is None else ops.slot_rows.shape[1]
        )
        self.expert = torch.searchsorted(ops.offs, torch.arange(rows), right=True)
        self.expert = self.expert.clamp_max(len(ops.offs) - 1)

    def _round(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype).double()

    def _rows(self, x: Tensor) -> Tensor:
        return x if self.a is None else quantized_values(x, self.a)

    def _gather(self, tokens: Tensor) -> Tensor:
        return tokens[self.tokens] * self.live[:, None]

    def _weight(self, w: Tensor, dim: int) -> Tensor:
        return quantized_values(w, self.w, dim=dim)

    def _multiply(self, x: Tensor, w: Tensor) -> Tensor:
        """Rows times w_e (E, K, N), summed from the far end in the dtype of the yardstick."""
        if self.dtype is not None:
            x, w = x.flip(-1).to(self.dtype), w.flip(-2).to(self.dtype)
        out = x.new_zeros(x.shape[0], w.shape[2])
        begin = 0
        for e, end in enumerate(self.ops.offs.tolist()):
            out[begin:end] = x[begin:end] @ w[e]
            begin = end
        return out.double() * self.live[:, None]

    def _reduce(self, left: Tensor, right: Tensor) -> Tensor:
        if self.columns:
            left, right = (
                quantized_values(x, self.a, dim=0, offs=self.ops.offs)
                for x in (left, right)
            )
        if self.dtype is not None:
            left, right = left.to(self.dtype), right.to(self.dtype)
        parts, begin = [], 0
        for end in self.ops.offs.tolist():
            parts.append(left[begin:end].t() @ right[begin:end])
            begin = end
        return torch.stack(parts).double()

    def _sum_slots(self, rows: Tensor) -> Tensor:
        out = rows.new_zeros(self.ops.input.shape)
        return out.index_add(0, self.tokens[self.live], self._round(rows)[self.live])

    def _weights(self) -> Tensor:
        s = self.ops.topk_weights
        s = torch.ones(()) if s is None else s.reshape(-1)[self.slots][:, None]
        return s.double() * self.live[:, None]

    def _preact(self, x: Tensor) -> Tensor:
        rows = self._gather(x)
        matrices = [w for w in (self.ops.w_in, self.ops.w_up) if w is not None]
        parts = [
            self._multiply(rows, self._weight(w, 2).transpose(1, 2)) for w in matrices
        ]
        h = torch.cat(parts, 1)
        if self.ops.b_in is not None:
            h = h + self.ops.b_in.double()[self.expert]
        return self._round(h) * self.live[:, None]

    def forward(self) -> tuple[Tensor, Tensor]:
        """output (T, D) and preact (R, g*F) before it is quantised, float64."""
        x = self._rows(self.ops.input.double())
        h = self._preact(x)
        a = self._rows(self._round(apply_activation(h, **self.activation)))
        o = self._multiply(a, self._weight(self.ops.w_out, 2).transpose(1, 2))
        if self.ops.b_out is not None:
            o = o + self.ops.b_out.double()[self.expert]
        return self._round(self._sum_slots(o * self._weights())), h

    def backward(self) -> MoeMlpGrads:
        """Gradients for ``ops.grad_out``."""
        ops, s = self.ops, self._weights()
        x = self._rows(ops.input.double())
        h = self._preact(x)
        if self.preact_dtype is not None:
            code = ScalingType.BlockWise1x32.value
            h = self._round(apart_from_limit(h, **self.activation))
            saved = moe_quantize_reference(h, code, dtype=self.preact_dtype)
            h = dequantize_reference(*saved, code)
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            act = apply_activation(h, **self.activation)
        a = self._round(act.detach())
        dy = self._gather(ops.grad_out.double())
        dy_rows = self._rows(dy)
        grad_act = self._multiply(dy_rows, self._weight(ops.w_out, 1))
        (dh,) = torch.autograd.grad(act, h, grad_act * s)
        dh = self._round(dh) * self.live[:, None]
        matrices = [w for w in (ops.w_in, ops.w_up) if w is not None]
        halves = [self._rows(half) for half in dh.chunk(len(matrices), 1)]
        dh_rows = torch.cat(halves, 1)
        dx = sum(
            self._multiply(d, self._weight(w, 1))
            for d, w in zip(halves, matrices, strict=True)
        )
        ds = (grad_act * a).sum(1)
        if ops.b_out is not None:
            ds = ds + (dy * ops.b_out.double()[self.expert]).sum(1)
        grad_s = None
        if ops.topk_weights is not None:
            grad_s = torch.zeros(ops.topk_weights.numel(), dtype=torch.float64)
            grad_s[self.slots[self.live]] = ds[self.live]
            grad_s = grad_s.view(ops.topk_weights.shape)
        left = dh_rows if self.columns else dh
        w_grads = [
            self._reduce(d, self._gather(x)) for d in left.chunk(len(matrices), 1)
        ]
        experts = len(ops.offs)

        def bias_grad(rows):
            out = torch.zeros(experts, rows.shape[1], dtype=torch.float64)
            return out.index_add(0, self.expert[self.live], rows[self.live])

        return MoeMlpGrads(
            self._round(self._sum_slots(dx)),
            w_grads[0],
            self._reduce(dy_rows if self.columns else dy, self._round(a * s)),
            grad_s,
            None if ops.b_in is None else bias_grad(dh),
            None if ops.b_out is None else bias_grad(self._round(dy * s)),
            w_grads[1] if ops.w_up is not None else None,
        )
