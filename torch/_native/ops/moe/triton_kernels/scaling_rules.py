"""What one scale of low-precision rows and weights covers.

Imports no Triton, as experts.py.
"""

from typing import NamedTuple


class ScalingRule(NamedTuple):
    """A row of ``kScalingRules`` in aten/src/ATen/native/MoEScaling.h.

    Attributes:
        block: neighbours along the scaled dimension; 0 for all.
        square: as many neighbours along the last two dimensions instead.
        as_byte: scales are float8_e8m0fnu, not float32.
    """

    block: int
    square: bool
    as_byte: bool


# By code of torch.nn.functional.ScalingType.
SCALING_RULES: dict[int, ScalingRule] = {
    1: ScalingRule(0, False, False),
    3: ScalingRule(32, False, True),
    4: ScalingRule(128, False, False),
    5: ScalingRule(128, True, False),
}
