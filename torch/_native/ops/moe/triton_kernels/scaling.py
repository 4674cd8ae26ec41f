"""Power-of-two scales: the bit rules of ``aten::_moe_quantize`` as device functions.

They are those of aten/src/ATen/native/MoEQuantize.cpp, bit for bit:

    byte     e + 127 with e = ceil(log2(largest magnitude / largest number)), at least -127;
             a block of zeros has 0, one with an infinity or a NaN 255
    scale    2^(byte - 127), NaN for 255: the byte itself (float8_e8m0fnu) or as float32
    code     x * 2^(127 - byte), rounded to nearest even; of a block with 255 NaN (int8: 0)

Largest magnitudes are bits of float32, whose order as integers is that of the magnitudes,
infinity and NaN on top. Products with powers of two are exact, so that fusing them into a
later sum changes nothing.

Codes are uint8, with the bits of float8_e4m3fn or int8. With ``NATIVE`` the hardware
makes them (compute capability 8.9 and newer). Otherwise integer arithmetic makes the same bits,
without types that the architecture lacks.
"""

import triton
import triton.language as tl


NAN_BYTE = tl.constexpr(255)
# Adding one rounds to multiples of 2^-9, the step of the subnormals of float8_e4m3fn, or to
# integers.
_ROUND_SUBNORMAL = tl.constexpr(16384.0)
_ROUND_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def magnitude_bits(x):
    """int32 bits of \\|x\\|, x float32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax_bits, INT8: tl.constexpr):
    """int32 byte of a block from the ``magnitude_bits`` of its largest number."""
    LARGEST: tl.constexpr = 0x42FE0000 if INT8 else 0x43E00000  # 127 and 448
    # The exponent is relative to the largest number; the bias is 127.
    byte = tl.maximum((amax_bits + (0x3FFFFFFF - LARGEST)) >> 23, 0)
    return tl.where(amax_bits >= 0x7F800000, NAN_BYTE, byte)


@triton.jit
def power_of_two(byte):
    """float32 2^(byte - 127), NaN for 255; ``byte`` int32."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == NAN_BYTE, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def as_scale(byte, DTYPE: tl.constexpr):
    """The stored form of a scale: a power of two in float32, or its byte."""
    return power_of_two(byte) if DTYPE == tl.float32 else byte.to(DTYPE)


@triton.jit
def reciprocal(byte):
    """float32 2^(127 - byte), as if 255 were 254; ``byte`` int32."""
    return power_of_two(tl.maximum(254 - byte, 0))


@triton.jit
def encode(scaled, is_nan, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 codes of float32 numbers that are scaled already; NaN (int8: 0) where ``is_nan``."""
    if INT8:
        # Also for NaN, whose conversion to an integer is undefined.
        finite = tl.where(is_nan, 0.0, scaled)
        finite = tl.minimum(tl.maximum(finite, -127.0), 127.0)
        rounded = (finite + _ROUND_INTEGER) - _ROUND_INTEGER
        return rounded.to(tl.int8).to(tl.uint8, bitcast=True)
    if NATIVE:
        # Saturates.
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(is_nan, 0x7F, code).to(tl.uint8)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of mantissa remain; the exponent bias is 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    rounded = magnitude.to(tl.float32, bitcast=True) + _ROUND_SUBNORMAL
    subnormal = rounded.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E)
    code = tl.where(is_nan, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def decode(code, INT8: tl.constexpr):
    """float32 numbers of uint8 codes, not yet scaled; the hardware converts."""
    if INT8:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def quantize_rows(
    x, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    INT8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantises (M, N) float32 in blocks of 1 x BLOCK.

    Returns:
        uint8 codes (M, N), and int32 bytes (M, N / BLOCK).
    """
    blocks = tl.reshape(x, (M, N // BLOCK, BLOCK))
    byte = scale_byte(tl.max(magnitude_bits(blocks), 2), INT8)
    is_nan = (byte == NAN_BYTE)[:, :, None]
    code = encode(blocks * reciprocal(byte)[:, :, None], is_nan, INT8, NATIVE)
    return tl.reshape(code, (M, N)), byte


@triton.jit
def quantize_columns(x, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Quantises (M, N) float32 in blocks of BLOCK x 1, to float8_e4m3fn by the hardware.

    Returns:
        uint8 codes (M, N), and int32 bytes (M / BLOCK, N).
    """
    blocks = tl.reshape(x, (M // BLOCK, BLOCK, N))
    byte = scale_byte(tl.max(magnitude_bits(blocks), 1), False)
    is_nan = (byte == NAN_BYTE)[:, None, :]
    code = encode(blocks * reciprocal(byte)[:, None, :], is_nan, False, True)
    return tl.reshape(code, (M, N)), byte


@triton.jit
def dequantize_rows(
    code, byte, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """float32 numbers (M, N) of codes (M, N) and int32 bytes (M, N / BLOCK)."""
    blocks = tl.reshape(decode(code, INT8), (M, N // BLOCK, BLOCK))
    return tl.reshape(blocks * power_of_two(byte)[:, :, None], (M, N))
