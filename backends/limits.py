"""How far apart two sets of hidden states may be, by their dtypes. Loads no torch."""

from __future__ import annotations

from backends.fp8 import FLOAT8, ROUNDOFF

# float32: other kernels and another order of summing.
_FLOAT32_LIMIT = 1e-5
# Unit roundoff: the relative error of one rounding.
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def limit(dtype: str, layer_id: int, file_dtype: str = "") -> float:
    """The largest relative error of a slot at `layer_id` that computing in `dtype` and storing in `file_dtype` explain.

    In 16 bits: one unit roundoff for each block, and two for the embeddings and the file, as if all went one way. Random
    models whose blocks each change the stream by half reach up to 0.55 of it (8, 36 and 64 blocks); trained ones are calmer.
    Where it is wide, late in a deep model, a fault of the whole forward shows in the early slots, and a wrong id as the best.
    float8 files add one unit roundoff of theirs, 2**-4; what is beyond that, a scale made by another layer has flattened.
    """
    computed = _FLOAT32_LIMIT if dtype == "float32" else _ROUNDOFF[dtype] * (layer_id + 2)
    return computed + (ROUNDOFF if file_dtype == FLOAT8 else 0.0)


def pair_limit(first: tuple[str, str], second: tuple[str, str], layer_id: int) -> float:
    """The largest relative error between two folders' slots of `layer_id`; each side is (dtype, file_dtype).

    Of the two ways of computing the wider limit counts, not the sum: each side stays well within its own, and they do not
    err in one direction. Every side that is stored in float8 adds its own rounding.
    """
    stored = sum(ROUNDOFF for _, file_dtype in (first, second) if file_dtype == FLOAT8)
    return max(limit(dtype, layer_id) for dtype, _ in (first, second)) + stored
