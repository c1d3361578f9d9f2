"""How the hf backend will compute a model, as far as that can be known without loading anything. Loads no torch."""

from __future__ import annotations

from importlib import metadata

from backends.hf.families import ModelShape

# The distribution with Triton's kernels of gated delta nets.
FLA = "flash-linear-attention"
# Numbers in one tensor of PyTorch's delta rule, float32: more heads at a time are faster, and need more memory.
DELTA_RULE_NUMBERS = 1 << 27


def fla_version() -> str | None:
    """The version that is installed, or None. Its kernels are a distribution of their own, which is enough."""
    for name in (FLA, "fla-core"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
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


def delta_net_bytes(shape: ModelShape, tokens: int, device: str, dtype: str) -> int:
    """Memory that a gated delta net needs for a pack beside the model's dtype: what is computed in float32."""
    if shape.linear is None:
        return 0
    convolution = 2 * tokens * (2 * shape.linear.key_size + shape.linear.value_size)
    if takes_fla(device, dtype) and fla_version() is not None:
        return 4 * convolution
    # Queries, keys and values by heads, the triangular systems and their solutions; heads come in groups.
    width = max(shape.linear.key_head_dim, shape.linear.value_head_dim)
    return 4 * max(convolution, 11 * min(tokens * shape.linear.num_value_heads * width, DELTA_RULE_NUMBERS))
