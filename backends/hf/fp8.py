"""States to float8 on the device, before they are copied to the host: half the bytes of 16 bits. Loads torch.

One buffer a pack, so that it is one copy: what was measured, the scales, the values. What float8 is: `backends.fp8`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from backends.flattening import FIGURES
from backends.fp8 import LARGEST, LEAST_SCALE
from backends.hsfile import Bits, Scales

# In float32 a chunk's passes take 400 MB for 6 layers of 4,096, whatever the size of the pack.
_CHUNK_TOKENS = 1024


@torch.inference_mode()
def packed(states: torch.Tensor) -> torch.Tensor:
    """States [T, L, H] as one buffer of bytes on their device; `unpacked` tells its parts apart.

    A token's scale is the largest |value| of all its layers / 448; a token of zeros has a tiny one. Where a value is not
    finite neither is the scale, so the file's check finds it.
    """
    tokens, layers, hidden = states.shape
    parts = _parts(tokens, layers)
    buffer = torch.empty(parts[2].start + states.numel(), dtype=torch.uint8, device=states.device)
    figures = buffer[parts[0]].view(torch.float64).view(layers, len(FIGURES)).zero_()
    scales = buffer[parts[1]].view(torch.float32)
    values = buffer[parts[2]].view(torch.float8_e4m3fn).view(tokens, layers, hidden)
    # Not a plain number: by one a GPU divides through its reciprocal, and the last bit would not be the CPU's.
    divisor = torch.full((1,), LARGEST, dtype=torch.float32, device=states.device)
    for begin in range(0, tokens, _CHUNK_TOKENS):
        part = slice(begin, begin + _CHUNK_TOKENS)
        exact = states[part].float()
        largest = exact.abs().amax(2)
        scale = (largest.amax(1) / divisor).clamp_min(LEAST_SCALE)
        values[part] = (exact / scale[:, None, None]).to(torch.float8_e4m3fn)
        scales[part] = scale
        figures += _measured(exact, values[part].float() * scale[:, None, None], largest)
    return buffer


def _measured(exact: torch.Tensor, stored: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """What float8 did to each layer, summed over tokens: [L, `FIGURES`]. Tokens that are not finite are left out.

    exact, stored: float32 [t, L, H]; largest: the largest |value| of each slot, [t, L].
    """
    lost = ((stored == 0) & (exact != 0)).sum(2).double()
    error = (stored - exact).norm(dim=2).double()
    size = exact.norm(dim=2).double()
    setter = torch.nn.functional.one_hot(largest.argmax(1), exact.shape[1])
    sums = torch.stack((error**2, size**2, error / size.clamp_min(1e-30), lost, setter.double()), dim=2)
    finite = largest.amax(1).isfinite()
    return torch.where(finite[:, None, None], sums, 0.0).sum(0)


def unpacked(buffer: npt.NDArray[np.uint8], tokens: int, layers: int) -> tuple[Bits, Scales, list[list[float]]]:
    """The parts of a pack's buffer: raw float8 [T, L, H], scales [T, 1, 1], and what was measured [L][`FIGURES`]."""
    figures, scales, values = (buffer[part] for part in _parts(tokens, layers))
    measured: list[list[float]] = figures.view(np.float64).reshape(layers, len(FIGURES)).tolist()
    return values.reshape(tokens, layers, -1), scales.view(np.float32).reshape(tokens, 1, 1), measured


def _parts(tokens: int, layers: int) -> tuple[slice, slice, slice]:
    """Where the figures, the scales and the values are in a buffer; the widest come first, so that each is aligned."""
    end = 8 * layers * len(FIGURES)
    begin = end + 4 * tokens
    return slice(0, end), slice(end, begin), slice(begin, None)
