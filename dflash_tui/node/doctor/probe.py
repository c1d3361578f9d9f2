"""Run by a worker Python as a job would be: says what it has, a JSON object a line, each as soon as it is known.

`{"stage": NAME}` stands before what may take long or never end, so that a reader knows where it hung. Nothing of ours is
imported, for that Python has none of it; it may be of any version from 3.6 on. With `--versions` nothing is imported at
all: versions are read from what the installer wrote.
"""

import importlib
import inspect
import json
import os
import sys
import time
from typing import Any, Callable, Dict

Facts = Dict[str, Any]

PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "datasets",
    "safetensors",
    "numpy",
    "triton",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "vllm",
    "speculators",
)


def main() -> None:
    # Our folder must not stand in for other modules. All else of the path stays, for a job sees that too.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    # What a library prints must not stand between our lines.
    out = os.dup(1)
    os.dup2(2, 1)

    def say(**facts: Any) -> None:
        os.write(out, json.dumps(facts).encode("utf-8", "replace") + b"\n")

    say(python=list(sys.version_info[:3]), executable=sys.executable, prefix=sys.prefix)
    found = versions()
    say(packages=found)
    if "--versions" not in sys.argv[1:]:
        for stage, installed, look in STAGES:
            if any(found.get(name) for name in installed):
                say(stage=stage)
                started = time.time()
                facts = attempt(look)
                facts["seconds"] = round(time.time() - started, 2)
                say(**{stage: facts})
    say(whole=True)


def versions() -> Facts:
    """Versions of the packages, from their metadata; None where one is not installed."""
    try:
        metadata = importlib.import_module("importlib.metadata")
    except ImportError:
        return {}
    found: Facts = {}
    for name in PACKAGES:
        try:
            found[name] = str(metadata.version(name))
        except Exception:  # not installed, or by an installer that wrote nothing usable
            found[name] = None
    return found


def attempt(look: Callable[[], Facts]) -> Facts:
    """What `look` finds, or `error`: the line that names the cause."""
    try:
        return look()
    except BaseException as error:
        return {"error": cause(error)}


def cause(error: Any) -> str:
    """The innermost error of a chain: a package that wraps an import's failure hides its reason."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    texts = ["%s: %s" % (type(one).__name__, one) for one in seen]
    return " ".join(next((text for text in texts if "torchvision" in text), texts[-1]).split())[:400]


def look_at_torch() -> Facts:
    torch = importlib.import_module("torch")
    facts = {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
    facts["varlen_attn"] = attempt(look_at_varlen)
    if not (facts["cuda"] or facts["hip"]):
        return facts
    facts["gpus"] = []
    try:
        torch.cuda.init()
        facts["architectures"] = list(torch.cuda.get_arch_list())
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            facts["gpus"].append({"name": about.name, "capability": [about.major, about.minor]})
    except Exception as error:
        facts["gpu_error"] = " ".join(str(error).split())[:400]
    return facts


def look_at_varlen() -> Facts:
    varlen = importlib.import_module("torch.nn.attention.varlen")
    return {"window_size": "window_size" in inspect.signature(varlen.varlen_attn).parameters}


def look_at_fla() -> Facts:
    # What the hf backend takes of it; older ones know no boundaries of chunks.
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    if not {"cu_seqlens", "chunk_indices"} <= set(inspect.signature(rule).parameters):
        raise ImportError("its chunk_gated_delta_rule takes no chunk_indices")
    return {}


def imported(name: str) -> Callable[[], Facts]:
    def look() -> Facts:
        importlib.import_module(name)
        return {}

    return look


def look_at_transformers() -> Facts:
    # The class, not only the package: what is wrong with torch or torchvision shows when a model's module is loaded.
    package = importlib.import_module("transformers")
    return {"version": str(package.__version__), "class": package.Qwen3ForCausalLM.__name__}


# Name, the packages of which one must be installed, what is looked at.
STAGES = (
    ("torch", ("torch",), look_at_torch),
    ("safetensors", ("safetensors",), imported("safetensors.torch")),
    ("torchvision", ("torchvision",), imported("torchvision")),
    ("transformers", ("transformers",), look_at_transformers),
    ("datasets", ("datasets",), imported("datasets")),
    ("causal_conv1d", ("causal-conv1d",), imported("causal_conv1d")),
    ("fla", ("flash-linear-attention", "fla-core"), look_at_fla),
)


if __name__ == "__main__":
    main()
