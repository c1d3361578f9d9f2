"""What the table has a row for: a tiny model of each family, and of what a config may ask for beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from backends.demo.configs import WINDOW, tiny_config
from backends.demo.model import LEAST_CHANGE, measure_changes, random_model, text_model
from backends.hf.extractor import Extractor
from backends.hf.families import FAMILIES, ModelShape, model_shape, read_config
from backends.recompute import PlainForward

# Short and long ones, some of them shorter than the windows, one of them longer than two chunks of a delta net.
LENGTHS = (5, 1, 17, 64, 2, 33, 150)
BLOCKS = 6
LAYERS = (0, 1, 3, 4, 5, 6)
VOCABULARY = 1500


@dataclass(frozen=True)
class Case:
    """fields: of the text config. without: fields that take the feature away again, to see that it matters."""

    name: str
    family: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] = field(default_factory=dict)


_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
_PLAIN_ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
# So short that most positions of the samples are beyond it, where the kinds of scaling differ.
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0}

FAMILY_CASES = tuple(Case(family, family) for family in FAMILIES)
FEATURE_CASES = (
    Case("qwen3 tied", "qwen3", {"tie_word_embeddings": True}),
    Case("llama tied", "llama", {"tie_word_embeddings": True}),
    Case("gemma3_text tied", "gemma3_text", {"tie_word_embeddings": True}),
    Case("gemma3 tied", "gemma3", {"tie_word_embeddings": True}),
    Case(
        "qwen2 upper windows",
        "qwen2",
        {**_WINDOWS, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * BLOCKS},
    ),
    Case(
        "qwen3 upper windows",
        "qwen3",
        {**_WINDOWS, "max_window_layers": 3},
        {"layer_types": ["full_attention"] * BLOCKS},
    ),
    Case("qwen3_moe windows", "qwen3_moe", _WINDOWS, {"sliding_window": None}),
    Case("qwen3_moe dense blocks", "qwen3_moe", {"mlp_only_layers": [1, 4], "norm_topk_prob": False}),
    Case("mistral no window", "mistral", {"sliding_window": None}, {"sliding_window": WINDOW}),
    Case("llama3 rope", "llama", {"rope_parameters": _LLAMA3}, _PLAIN_ROPE),
    Case("linear rope", "llama", {"rope_parameters": _LINEAR}, _PLAIN_ROPE),
    Case("yarn rope", "qwen3", {"rope_parameters": _YARN}, _PLAIN_ROPE),
    Case(
        "biases",
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": False, "mlp_bias": False},
    ),
    Case("biases of attention", "qwen3", {"attention_bias": True}, {"attention_bias": False}),
    Case("wide heads", "qwen3", {"head_dim": 48}),
    Case("very wide heads", "gemma3_text", {"head_dim": 320}),
    Case("one head for keys", "llama", {"num_key_value_heads": 1, "head_dim": 24}),
)


def samples() -> list[list[int]]:
    """Random tokens, the same every time."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def plain_states(folder: Path, tokens: list[list[int]], without: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """Every layer id 0..N of every sample, [N + 1, T, H], by the stock model with its head, alone, eager, float32.

    without: fields of the text config that are put instead of the folder's own.
    """
    config = AutoConfig.from_pretrained(folder)
    for name, value in (without or {}).items():
        setattr(config.get_text_config(), name, value)
    kind = AutoModelForImageTextToText if FAMILIES[config.model_type].text else AutoModelForCausalLM
    stock = kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    states = []
    before_norm: list[torch.Tensor] = []
    text_model(stock).norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        for ids in tokens:
            found = stock(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
            # The stock model's last entry is after the norm; the trainer wants what went in.
            states.append(torch.stack([*(state[0] for state in found[:-1]), before_norm.pop()[0]]))
    return states


class Model:
    """A case's model in a folder, made on first use and kept, with what is known of it."""

    def __init__(self, case: Case, root: Path, device: str = "cpu") -> None:
        self.case = case
        self.device = device
        self.samples = samples()
        self._root = root
        self._opened: dict[str, Extractor] = {}

    @cached_property
    def folder(self) -> Path:
        folder = self._root / self.case.name.replace(" ", "-")
        probe = torch.tensor([self.samples[-1]])
        model = random_model(tiny_config(self.case.family, BLOCKS, 64, VOCABULARY, **self.case.fields), probe)
        # A block that hardly changes its stream would hide a wrong id.
        assert min(measure_changes(model, probe)) >= LEAST_CHANGE
        model.save_pretrained(folder)
        return folder

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(read_config(self.folder), self.folder)

    @cached_property
    def plain(self) -> list[torch.Tensor]:
        return plain_states(self.folder, self.samples)

    @cached_property
    def recomputed(self) -> list[torch.Tensor]:
        """As `plain`, by what `verify --recompute` uses."""
        forward = PlainForward(self.folder)
        return [torch.stack(forward.states(ids)) for ids in self.samples]

    def open(self, dtype: str) -> Extractor:
        return Extractor.open(self.folder, LAYERS, dtype=dtype, device=self.device, output=self.folder)

    def opened(self, dtype: str) -> Extractor:
        """One that is kept: do not change it."""
        if dtype not in self._opened:
            self._opened[dtype] = self.open(dtype)
        return self._opened[dtype]

    def packed(self, using: Extractor) -> list[torch.Tensor]:
        """The samples' states [T, L, H] in float32, from one pack."""
        states = using.states(self.samples).float().cpu()
        return list(states.split([len(ids) for ids in self.samples]))
