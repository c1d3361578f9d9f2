"""Which fast kernels this Python has for the hf backend, without loading them."""

from __future__ import annotations

from importlib import metadata

# Distribution names.
_KERNELS = ("flash-linear-attention", "causal-conv1d")


def found_kernels() -> dict[str, str]:
    """Versions of the installed ones, by the name of their distribution."""
    found = {}
    for name in _KERNELS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
