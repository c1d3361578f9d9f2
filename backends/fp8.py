"""float8_e4m3fn with one scale a token, as the speculators trainer (0.9.0, backend "fp8") reads it. Loads neither torch nor numpy.

A token's scale is the largest |value| over all its layers / 448; what is read is `value * scale`. Three bits of mantissa
round by 2**-4 at most (about 0.026 of a layer's norm). Below 2**-6 of the scale the steps are even, so a layer whose values
are ten thousands of times smaller than another layer's largest loses its digits: it is *flattened*.
"""

from __future__ import annotations

FLOAT8 = "float8_e4m3fn"
LARGEST = 448.0
# A token of zeros has a scale too, so that nothing is divided by zero; the connector for vLLM takes the same.
LEAST_SCALE = 1e-12
# Unit roundoff of 3 bits of mantissa.
ROUNDOFF = 2.0**-4
# A layer's relative error beyond what rounding can make of any values: it is flattened.
LIMIT = ROUNDOFF
