"""float8_e4m3fn with one scale a token, as the speculators trainer (0.9.0, backend "fp8") reads it. Loads no torch.

A token's scale is the largest |value| over all its layers / 448; what is read is `value * scale`. Three bits of mantissa
round by 2**-4 at most (about 0.026 of a layer's norm). Below 2**-6 of the scale the steps are even, so a layer whose values
are ten thousands of times smaller than another layer's largest loses its digits: it is *flattened*.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FLOAT8 = "float8_e4m3fn"
LARGEST = 448.0
# A token of zeros has a scale too, so that nothing is divided by zero; the connector for vLLM takes the same.
LEAST_SCALE = 1e-12
# Unit roundoff of 3 bits of mantissa.
ROUNDOFF = 2.0**-4
# A layer's relative error beyond what rounding can make of any values: it is flattened.
LIMIT = ROUNDOFF


def _values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 bit patterns; two are NaN, none is infinite."""
    patterns = np.arange(256)
    exponent, mantissa = (patterns >> 3) & 15, patterns & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(patterns & 127) == 127] = np.nan
    return np.where(patterns & 128, -size, size).astype(np.float32)


VALUES = _values()


def dequantised(bits: npt.NDArray[Any], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The values of raw bytes [T, L, H] with scales [T, 1, 1], as float32: exact, but for the rounding of one product."""
    values: npt.NDArray[np.float32] = np.take(VALUES, bits)
    values *= scales
    return values
