"""Whether a vLLM can extract hidden states from a model: from config.json, versions, driver and GPUs. Loads neither torch nor vllm.

What is known stands in `backends.vllm.table`. A verdict says whether that very version was tried or is only known to have what
it takes; where nobody knows, it says so instead of yes or no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backends.hf.families import FAMILIES
from backends.vllm.table import (
    FAULTS,
    FLAGS,
    KNOWN,
    NEWEST_READ,
    PINNED_FROM,
    ROWS,
    SUGGESTED,
    TRIED,
    Case,
    Row,
    Version,
)

HF = "the hf backend"

# The torch that a release is built for, by the first release that is (Requires-Dist of 0.17.0 to 0.33.0).
_TORCH = (((0, 17), "2.10.0"), ((0, 20), "2.11.0"), ((0, 27), "2.13.0"), ((0, 33), "2.14.0"))
# The oldest cards that NVIDIA's libraries of a CUDA still know, by its major number (release notes of CUDA 12 and 13).
_OLDEST_CARD = {12: (5, 0), 13: (7, 5)}
# Below it vLLM itself has no kernels, and refuses bfloat16 (its installation page; its source).
_OLDEST_FOR_VLLM = (7, 0)
_OLDEST_FOR_BFLOAT16 = (8, 0)
# Published like this; vLLM and Transformers both take it so.
_QUANTISED_AS_PUBLISHED = {("gpt_oss", "mxfp4")}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a version can (`ok`: True, False, or None where it is not known), and what follows.

    why, remedy: a line each; remedy is empty where there is nothing to mend. tried: this very version ran with this family on such a machine.
    flags: what `vllm serve` needs beside the command of `backends.vllm.command`. warnings: known faults, a line each.
    instead: the version that can, or "the hf backend"; empty where ok is True. sources: where all that is from.
    """

    ok: bool | None
    why: str
    flags: tuple[str, ...] = ()
    remedy: str = ""
    instead: str = ""
    sources: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tried: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def version_of(text: str) -> Version | None:
    """The numbers of a release, as (0, 26, 0) of "0.26.0+cu129" or "0.26.0rc1"; None where it does not begin with any."""
    found = re.match(r"\s*v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def can_extract(
    config: Mapping[str, Any],
    vllm_version: str,
    *,
    missing: Sequence[str] = (),
    torch: str | None = None,
    cuda: str | None = None,
    driver: tuple[int, int] | None = None,
    gpus: Sequence[tuple[int, int]] = (),
    tensor_parallel: int = 1,
    dtype: str = "bfloat16",
) -> Verdict:
    """Whether this vLLM can extract from the model of this config.json.

    missing: packages that vLLM cannot be imported without, and that are not beside it.
    torch, cuda: version of torch beside vLLM, and of the CUDA that it was built for; None where not known.
    driver: the newest CUDA that the NVIDIA driver takes. gpus: compute capability of each card; none means the CPU.
    """
    version = version_of(vllm_version)
    if version is None:
        return Verdict(None, f"{vllm_version!r} is no version of vLLM", remedy="name the Python that vLLM is in")
    family = str(config.get("model_type") or "")
    case = Case(family, version, bool(gpus), tensor_parallel)
    flags = tuple(word for note in FLAGS if note.applies(case) for word in note.text.split(" "))
    warnings = [note.text for note in FAULTS if note.applies(case)]
    sources = [note.source for note in (*FLAGS, *FAULTS) if note.applies(case)]
    warnings += _other_torch(version, torch)
    row = next((row for row in ROWS if row.covers(family, version)), None)
    problem = (
        _not_of_this_model(config, tensor_parallel)
        or _without(missing)
        or _not_on_this_machine(torch, cuda, driver, gpus, dtype)
        or (_not_of_this_version(row, family, vllm_version, gpus) if row is not None and not row.result else None)
    )
    if row is not None:
        sources.insert(0, row.source)
    if problem is not None:
        return Verdict(False, *problem, sources=tuple(sources), warnings=())
    ok, why, tried = _known(row, config, vllm_version, case)
    if ok and not gpus:
        pinned = "its connector stops for want of pinned memory, unless a plugin mends that"
        ok, why = None, f"{why}; without a GPU {pinned if version >= PINNED_FROM else 'it was not tried'}"
    remedy, instead = "", ""
    if ok is None and _quantisation(config):
        remedy = "give the model with weights that are not quantised, or try it with a few samples first"
    elif ok is None:
        instead = _instead(family, gpus)
        remedy = "try it with a few samples first" + (f", or use {_named(instead)}" if instead else "")
    return Verdict(ok, why, flags, remedy, instead, tuple(dict.fromkeys(sources)), tuple(warnings), tried)


def _known(row: Row | None, config: Mapping[str, Any], text: str, case: Case) -> tuple[bool | None, str, bool]:
    """ok, why and tried, where nothing forbids it."""
    family, version = case.family, case.version
    method = _quantisation(config)
    if family not in KNOWN:
        return (
            None,
            f"vLLM {text}: nothing is known of extracting from the family {family or 'unnamed'!r}; not tried",
            False,
        )
    if row is None:
        newest = ".".join(map(str, NEWEST_READ))
        return None, f"vLLM {text} is newer than the newest that was looked at, {newest}; not tried", False
    if method and (family, method) not in _QUANTISED_AS_PUBLISHED:
        return None, f"vLLM {text}: {row.why}, but with quantised weights ({method}) it was not tried", False
    runs = {version_of(name): place for name, place in TRIED.get(family, {}).items()}
    release = re.fullmatch(r"\s*v?[\d.]+(\+\S*)?\s*", text) is not None
    if release and version in runs:
        here = ("CPU" in runs[version]) != case.gpu
        return True, f"vLLM {text}: {row.why}; tried on {runs[version]}{'' if here else ' alone'}", here
    older = [known for known in runs if known is not None and known < version]
    newer = [known for known in runs if known is not None and known > version]
    if older and newer:
        low, high = (".".join(map(str, known)) for known in (max(older), min(newer)))
        return True, f"vLLM {text}: {row.why}; not tried itself, {low} and {high} were", False
    seen = " and ".join(TRIED.get(family, {}))
    only = f", only {seen} {'were' if ' and ' in seen else 'was'}" if seen else ""
    return None, f"vLLM {text}: {row.why}; not tried{only}", False


Problem = tuple[str, tuple[str, ...], str, str]


def _problem(why: str, remedy: str, instead: str = "") -> Problem:
    """The first four fields of a Verdict."""
    return why, (), remedy, instead


def _not_of_this_version(row: Row, family: str, text: str, gpus: Sequence[tuple[int, int]]) -> Problem:
    instead = _instead(family, gpus)
    return _problem(f"vLLM {text} cannot extract from {family}: {row.why}", f"use {_named(instead)}", instead)


def _instead(family: str, gpus: Sequence[tuple[int, int]]) -> str:
    """A version that was tried with this family (best on a GPU), the hf backend, or "" where neither is known."""
    runs = [version for version in SUGGESTED if version in TRIED.get(family, {})]
    if runs and gpus:
        return min(runs, key=lambda version: "CPU" in TRIED[family][version])
    return HF if family in FAMILIES else ""


def _named(instead: str) -> str:
    if not instead:
        return "a model of another family"
    return "the backend hf" if instead == HF else f"vLLM {instead} (setup --vllm {instead}) or the backend hf"


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    fields = inner if isinstance(inner, Mapping) else config
    family = FAMILIES.get(str(config.get("model_type")))
    return {**(family.defaults if family else {}), **fields}


def _quantisation(config: Mapping[str, Any]) -> str:
    """quant_method of the weights, "" where they are not quantised."""
    found = config.get("quantization_config") or text_fields(config).get("quantization_config")
    if not found:
        return ""
    return str(found.get("quant_method", "unknown")) if isinstance(found, Mapping) else str(found)


def _not_of_this_model(config: Mapping[str, Any], tensor_parallel: int) -> Problem | None:
    """What no version can do."""
    if config.get("is_encoder_decoder"):
        return _problem(
            "the model is an encoder and a decoder (is_encoder_decoder), and states are extracted from decoders alone",
            "give a causal language model",
        )
    fields = text_fields(config)
    for name in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"):
        heads = fields.get(name)
        if isinstance(heads, int) and not isinstance(heads, bool) and heads % tensor_parallel:
            return _problem(
                f"tensor_parallel {tensor_parallel} does not divide the model's {heads} heads ({name})",
                f"choose one that does: {_divisors(heads)}",
            )
    groups = fields.get("num_key_value_heads")
    if isinstance(groups, int) and groups > 0 and groups % tensor_parallel and tensor_parallel % groups:
        return _problem(
            f"tensor_parallel {tensor_parallel} neither divides the model's {groups} key and value heads"
            " (num_key_value_heads) nor is a multiple of them",
            f"choose one that does: {_divisors(groups)}",
        )
    return None


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, min(number, 64) + 1) if number % part == 0)


def _without(missing: Sequence[str]) -> Problem | None:
    if not missing:
        return None
    names = " and ".join(missing)
    return _problem(
        f"{names} {'is' if len(missing) == 1 else 'are'} not beside this vLLM, which cannot be imported so",
        f"install {names} into its Python, or make a whole one (setup --vllm 0.26.0)",
    )


def _not_on_this_machine(
    torch: str | None,
    cuda: str | None,
    driver: tuple[int, int] | None,
    gpus: Sequence[tuple[int, int]],
    dtype: str,
) -> Problem | None:
    """What this vLLM's torch cannot do with these GPUs and this driver."""
    if not gpus:
        return None
    if cuda is None and torch is not None:
        tag = re.search(r"\+(?:cu(\d+)(\d)|(cpu))", torch)
        if tag and tag.group(3):
            return _problem(
                f"the torch {torch} beside vLLM was built for the CPU, and GPUs were chosen",
                "install vLLM for CUDA, or choose no GPUs",
            )
        cuda = f"{tag.group(1)}.{tag.group(2)}" if tag else None
    built = version_of(cuda) if cuda else None
    oldest = max(_OLDEST_FOR_VLLM, _OLDEST_CARD.get(built[0], (0, 0)) if built else (0, 0))
    card = min(gpus)
    if card < oldest:
        return _problem(
            f"a chosen GPU has compute capability {card[0]}.{card[1]}, and this vLLM{_for(cuda)} needs"
            f" {oldest[0]}.{oldest[1]}",
            "choose newer GPUs, or use the backend hf",
            HF,
        )
    if dtype == "bfloat16" and card < _OLDEST_FOR_BFLOAT16:
        return _problem(
            f"a chosen GPU has compute capability {card[0]}.{card[1]}, and vLLM computes bfloat16 from 8.0 on",
            "choose newer GPUs, or dtype float16",
        )
    if built and driver and built[0] > driver[0]:
        return _problem(
            f"vLLM's torch was built for CUDA {cuda}, and the NVIDIA driver takes CUDA up to {driver[0]}.{driver[1]}",
            f"install a newer driver, or a vLLM built for CUDA {driver[0]}",
        )
    return None


def _for(cuda: str | None) -> str:
    return f" (built for CUDA {cuda})" if cuda else ""


def _other_torch(version: Version, torch: str | None) -> list[str]:
    built = [needed for first, needed in _TORCH if first <= version]
    found = version_of(torch) if torch else None
    if not built or version > NEWEST_READ or found is None or found == version_of(built[-1]):
        return []
    return [f"torch {torch} is beside it, and this release was built for torch {built[-1]}: it may not start"]
