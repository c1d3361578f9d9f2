"""Random models of real shapes, made on the GPU; every block changes its stream. Loads torch when one is built."""

from __future__ import annotations

from typing import Any

# Sizes beside those of the family's tiny config.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "family": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "qwen3.6-27b": {
        "family": "qwen3_5_text",
        "num_hidden_layers": 8,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248_320,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}
# The same as it is published, with a vision part around it, and fewer tokens.
PUBLISHED = "qwen3.6-27b-published"
ALL = {**SHAPES, PUBLISHED: {**SHAPES["qwen3.6-27b"], "family": "qwen3_5", "vocab_size": 32_000}}
VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "depth": 1}
TINY = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TINY_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
# What vLLM's kernels for the CPU take; its Qwen3.5 would need torchvision.
TINY_PUBLISHED: dict[str, Any] = {
    "family": "qwen3_next",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
}
HYBRID = "qwen3.6-27b"


def config_of(name: str, tiny: bool) -> Any:
    from backends.demo.configs import tiny_config

    sizes = {**ALL[name], **(TINY if tiny else {})}
    if tiny:
        sizes |= {"vocab_size": 1500, "num_hidden_layers": 8, **(TINY_DELTA_NET if name != "qwen3-8b" else {})}
        sizes |= TINY_PUBLISHED if name == PUBLISHED else {}
    family, layers, hidden, vocabulary = (
        sizes.pop(key) for key in ("family", "num_hidden_layers", "hidden_size", "vocab_size")
    )
    config = tiny_config(family, layers, hidden, vocabulary, **sizes)
    if name == PUBLISHED and not tiny:
        for field, value in {**VISION, "out_hidden_size": hidden}.items():
            setattr(config.vision_config, field, value)
    return config


def build(name: str, tiny: bool) -> tuple[Any, list[float]]:
    """A bfloat16 model with its head on the GPU (or the CPU), and each block's change of its stream."""
    import torch

    from backends.demo.model import measure_changes, random_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = config_of(name, tiny)
    with torch.device(device), torch.inference_mode(False):
        probe = torch.randint(0, config.get_text_config().vocab_size, (1, 256))
        model = random_model(config, probe).to(torch.bfloat16)
        return model, measure_changes(model, probe)
