"""What each vLLM version can extract from: rows of version ranges and architectures, each with its source. Loads no torch.

"source of A to B" means that vLLM's own Python files of those releases were read; what was run is in `TRIED`. The ranges are
half open: `first` is in, `before` is not. Beyond `NEWEST_READ` nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Version = tuple[int, ...]

NEWEST_READ: Version = (0, 33, 0)
# What to install where a version cannot: tried ones, the first that fits is named.
SUGGESTED = ("0.26.0", "0.32.0")

DENSE = frozenset({"qwen3", "qwen2", "llama", "mistral"})
EXPERTS = frozenset({"qwen3_moe"})
WINDOWS = frozenset({"gpt_oss"})
GEMMA3 = frozenset({"gemma3", "gemma3_text"})
QWEN3_NEXT = frozenset({"qwen3_next"})
QWEN3_5 = frozenset({"qwen3_5", "qwen3_5_moe"})
QWEN3_5_TEXT = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
HYBRIDS = QWEN3_NEXT | QWEN3_5 | QWEN3_5_TEXT
# vLLM takes the text model out of these by a flag.
WRAPPERS = QWEN3_5 | {"gemma3"}
KNOWN = DENSE | EXPERTS | WINDOWS | GEMMA3 | HYBRIDS
# Blocks of more than one kind share the KV cache there.
MIXED = HYBRIDS | WINDOWS | GEMMA3


@dataclass(frozen=True, slots=True)
class Row:
    """Of these `families` (model_type of config.json; none means all), versions `first` <= v < `before`: whether they can (`result`), and why.

    before: None is up to the newest version that was read. source: where that is from.
    """

    families: frozenset[str]
    first: Version
    before: Version | None
    result: bool
    why: str
    source: str

    def covers(self, family: str, version: Version) -> bool:
        if self.families and family not in self.families:
            return False
        return self.first <= version and (version <= NEWEST_READ if self.before is None else version < self.before)


# The first row that covers a version and a family counts.
ROWS: tuple[Row, ...] = (
    Row(
        frozenset(),
        (0,),
        (0, 17),
        False,
        "it has no extract_hidden_states yet, which came with 0.17.0",
        "source of 0.16.0 and 0.17.0; vllm-project/vllm#33736",
    ),
    Row(
        GEMMA3,
        (0, 17),
        None,
        False,
        "its Gemma 3 does not give out the states between blocks (no EAGLE3 interface)",
        "source of 0.17.0 to 0.33.0",
    ),
    Row(
        HYBRIDS,
        (0, 17),
        (0, 22),
        False,
        "its connector turns the hybrid KV cache manager off, without which gated delta nets cannot start, and with it forced on"
        " the page sizes do not fit",
        "tried: 0.20.1 on a CPU, both ways, and on an H200; source of 0.17.0 to 0.22.0; vllm-project/vllm#39949",
    ),
    Row(
        QWEN3_NEXT,
        (0, 22),
        (0, 24),
        False,
        "its Qwen3-Next does not give out the states between blocks (no EAGLE3 interface), which came with 0.24.0",
        "source of 0.22.0 to 0.24.0; the same refusal seen with 0.20.1 on an H200",
    ),
    Row(
        HYBRIDS,
        (0, 24),
        (0, 25),
        False,
        "its connector takes the states of a hybrid from the wrong places: all-zero states and no error, mended in 0.25.0",
        "source of 0.24.0 and 0.25.0; vllm-project/vllm#46301",
    ),
    Row(
        QWEN3_5_TEXT,
        (0, 22),
        (0, 27),
        False,
        "it knows Qwen3.5 only as published, with its vision part around it (qwen3_5, qwen3_5_moe), not the text model alone",
        "registry of models in the source of 0.22.0 to 0.27.0",
    ),
    Row(
        QWEN3_5,
        (0, 22),
        (0, 24),
        True,
        "its connector supports the hybrid KV cache manager",
        "source of 0.22.0 and 0.23.0; vllm-project/vllm#39949",
    ),
    Row(
        HYBRIDS,
        (0, 25),
        None,
        True,
        "its connector supports the hybrid KV cache manager and knows the size of the states' own blocks",
        "source of 0.25.0 to 0.33.0; vllm-project/vllm#46301",
    ),
    Row(
        WINDOWS,
        (0, 17),
        (0, 22),
        True,
        "it gives out the states between blocks, with the hybrid KV cache manager off",
        "source of 0.17.0 to 0.21.0",
    ),
    Row(
        DENSE | EXPERTS | WINDOWS,
        (0, 17),
        None,
        True,
        "it gives out the states between blocks",
        "source of 0.17.0 to 0.33.0",
    ),
)

# What ran and wrote the right states: versions and machines, by model_type. Nothing else may be called tried. On a CPU a plugin
# stood in for the connector's copy through pinned memory.
TRIED: dict[str, dict[str, str]] = {
    "qwen3": {"0.20.1": "an H200", "0.26.0": "an H200", "0.32.0": "a CPU"},
    "qwen3_5": {"0.26.0": "an H200"},
    "qwen3_5_text": {"0.32.0": "a CPU"},
    "qwen3_next": {"0.32.0": "a CPU"},
}


@dataclass(frozen=True, slots=True)
class Case:
    """What flags and faults depend on. gpu: the server runs on GPUs; kinds_mixed: blocks of more than one kind."""

    family: str
    version: Version
    gpu: bool
    tensor_parallel: int

    @property
    def kinds_mixed(self) -> bool:
        return self.family in MIXED or self.family not in KNOWN


@dataclass(frozen=True, slots=True)
class Note:
    """A flag of `vllm serve` that is needed, or a fault that is known: `text` where `applies`. source: where that is from."""

    text: str
    applies: Callable[[Case], bool]
    source: str


# Since then the connector copies through pinned memory, which a machine without GPUs does not have ("pin_memory=True requires …":
# source of 0.22.0, tried with 0.32.0).
PINNED_FROM: Version = (0, 22)

FLAGS: tuple[Note, ...] = (
    Note(
        "--no-enable-prefix-caching",
        lambda case: True,
        "vllm-project/vllm#44485; tried: a hybrid with 0.32.0 on a CPU dies without it",
    ),
    # Before 0.24 a sample that is computed in two steps is written before its end, and those beside it from the wrong places.
    Note(
        "--no-enable-chunked-prefill",
        lambda case: case.version < (0, 24),
        "connector in the source of 0.17.0 to 0.23.0 (0.20.1 ran without the flag, and short samples were right);"
        " vllm-project/vllm#43805",
    ),
    Note(
        "--language-model-only",
        lambda case: case.family in WRAPPERS,
        "tried: 0.26.0 on an H200; source of 0.17.0 to 0.33.0",
    ),
    Note(
        "--gdn-prefill-backend triton",
        lambda case: case.family in HYBRIDS and case.gpu and case.version >= (0, 18),
        "tried: 0.26.0 on an H200; source of 0.18.0 to 0.33.0",
    ),
)

# The backend itself keeps to it; who starts a server by hand must.
TOO_LONG_WAITS = (
    "a request longer than the server's KV cache waits for ever: keep --max-model-len at the longest sample"
)

FAULTS: tuple[Note, ...] = (
    Note(
        TOO_LONG_WAITS,
        lambda case: True,
        "vllm-project/vllm#39734",
    ),
    Note(
        "with tensor parallel above 1 it may stop at its start with `assert self.page_size_padded >= real_page_size`:"
        " choose fewer layers, or vLLM 0.30.0 or later",
        lambda case: case.tensor_parallel > 1 and case.kinds_mixed and (0, 22) <= case.version < (0, 30),
        "vllm-project/vllm#51016; mended in the source of 0.30.0",
    ),
    Note(
        "with tensor parallel above 1 a compiled model adds up through FlashInfer: on two H200s without NVLink multicast its start"
        " ended in an illegal memory access, and with `-- --enforce-eager` it worked",
        lambda case: case.tensor_parallel > 1 and case.gpu and case.version >= (0, 26),
        "tried: 0.26.0 on two H200s",
    ),
    Note(
        "it writes each file on the GPU's time; since 0.22.0 threads write them",
        lambda case: case.version < (0, 22),
        "tried: 0.20.1 and 0.26.0 on an H200; source of 0.21.0 and 0.22.0",
    ),
    Note(
        "Qwen3.5-35B-A3B came out all zero with 0.24.0; this version is not that one, yet it was not tried with experts",
        lambda case: case.family in ("qwen3_5_moe", "qwen3_5_moe_text") and case.version >= (0, 22),
        "vllm-project/vllm#46301",
    ),
)
