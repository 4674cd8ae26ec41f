# Owner(s): ["module: nn"]
"""Properties of _moe_quantize that training relies on if it saves only FP8.

Three properties are tested, each with a broken variant that lacks it: scales that are not powers of two,
exponents rounded down as the OCP specification has them, and blocks that straddle experts.
"""

import torch
from torch.nn.functional import ScalingType
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_quantized_reference import dequantize_reference, sqnr


MX = ScalingType.BlockWise1x32.value
R, D = 200, 160


def real(x, dim, offs=None):
    """Dequantises codes and scales of the op to float64."""
    data, scale = torch.ops.aten._moe_quantize(x, MX, dim=dim, offs=offs)
    return dequantize_reference(data, scale, MX, dim=dim, offs=offs)


def in_blocks(x, dim, scale_of):
    """x in blocks of 32 along dim that ignore the experts, with scales from the block maxima."""
    x = x.double().movedim(dim, -1)
    length = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -length % 32)).unflatten(-1, (-1, 32))
    scale = scale_of(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30))
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    return (codes * scale).flatten(-2)[..., :length].movedim(-1, dim)


def up(amax):
    return torch.exp2(torch.ceil(torch.log2(amax / 448)))


def fp32_scales(x, dim, offs=None):
    return in_blocks(x, dim, lambda amax: amax / 448)


def rounded_down(x, dim, offs=None):
    return in_blocks(x, dim, lambda amax: torch.exp2(torch.floor(torch.log2(amax)) - 8))


def straddling(x, dim, offs=None):
    return in_blocks(x, dim, up)


def operands():
    torch.manual_seed(0)
    # The magnitudes of rows and columns differ, as in activations.
    x = torch.randn(R, D) * torch.randn(R, 1).exp2() * torch.randn(D).exp2()
    return x.bfloat16(), torch.tensor([17, 17, 90, R], dtype=torch.int32)


def requantised_loss(quantise):
    """dB that columns lose if they are made from rows in 8 bits instead of 16 bits."""
    x, offs = operands()
    rows = quantise(x, 1).float()
    return sqnr(x, quantise(x, 0, offs)) - sqnr(x, quantise(rows, 0, offs).double())


def row_loss_by_saturation(quantise):
    """Largest relative error of the largest element of a block."""
    x, _ = operands()
    blocks = lambda t: t.double().unflatten(1, (-1, 32))  # noqa: E731
    at = blocks(x).abs().argmax(-1, keepdim=True)
    want, got = (blocks(t).gather(-1, at) for t in (x, quantise(x, 1)))
    return ((got - want) / want).abs().max().item()


def depends_on_alignment(quantise):
    """Whether the columns of an expert depend on the position of its rows."""
    x, offs = operands()
    together, begin = quantise(x, 0, offs), 0
    for end in offs.tolist():
        alone = torch.tensor([end - begin], dtype=torch.int32)
        if end > begin and not torch.equal(
            quantise(x[begin:end].clone(), 0, alone), together[begin:end]
        ):
            return True
        begin = end
    return False


class TestVariants(TestCase):
    def test_requantising_loses_nothing(self):
        self.assertLess(requantised_loss(real), 0.1)
        self.assertLess(requantised_loss(straddling), 0.1)
        self.assertGreater(requantised_loss(fp32_scales), 1.5)

    def test_nothing_saturates(self):
        self.assertLessEqual(row_loss_by_saturation(real), 1 / 16)
        self.assertLessEqual(row_loss_by_saturation(fp32_scales), 1 / 16)
        self.assertGreater(row_loss_by_saturation(rounded_down), 0.1)

    def test_alignment_changes_no_bit(self):
        self.assertFalse(depends_on_alignment(real))
        self.assertTrue(depends_on_alignment(straddling))

    @parametrize("dim", [0, 1])
    def test_the_variants_are_else_right(self, dim):
        # The variants must differ from the op only in the property.
        x, _ = operands()
        self.assertEqual(straddling(x, dim), real(x, dim), atol=0, rtol=0)
        for quantise in (fp32_scales, rounded_down):
            self.assertGreater(sqnr(x, quantise(x, dim)), 20)


instantiate_parametrized_tests(TestVariants)

if __name__ == "__main__":
    run_tests()
