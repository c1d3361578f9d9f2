"""How the hf backend will compute a model, as far as that can be known without loading anything. Loads no torch."""

from __future__ import annotations

from importlib import metadata

from backends.hf.families import ModelShape

# The distribution with Triton's kernels of gated delta nets.
FLA = "flash-linear-attention"


def fla_version() -> str | None:
    """The version that is installed, or None."""
    try:
        return metadata.version(FLA)
    except metadata.PackageNotFoundError:
        return None


def takes_fla(device: str, dtype: str) -> bool:
    """Whether its kernels may be used. In float32 they multiply numbers of 10 bits, which is not what float32 is asked for."""
    return device == "cuda" and dtype != "float32"


def expected_packing(shape: ModelShape, device: str, dtype: str) -> tuple[str, list[str]]:
    """How samples will be computed, and warnings. device: "cuda" or "cpu"."""
    if shape.linear is None:
        return "packs", []
    version = fla_version()
    if not takes_fla(device, dtype) or version is not None:
        kernels = f"{FLA} {version}" if takes_fla(device, dtype) else "PyTorch"
        return f"packs, if proven at start; gated delta nets by {kernels}", []
    warning = (
        f"{FLA} is not installed in this Python: the gated delta nets of this model are computed by PyTorch, which is slower"
        f" (pip install {FLA})"
    )
    return "packs, if proven at start; gated delta nets by PyTorch", [warning]
