"""Causes around models and packages: what is missing, not allowed, damaged, or does not fit together."""

from dflash_tui.node.diagnose.rules import WEAK, Rule

_FITS = "doctor says which versions fit, and setup makes an environment of them"

ROWS = (
    Rule(
        "gated-model",
        r"GatedRepoError|[Cc]annot access gated repo|Access to model (?P<model>\S+) is restricted|is not in the authorized list"
        r"|You are trying to access a gated repo",
        "the model {model} is gated, and the token has no access to it or was not sent",
        "accept its terms on its page, and give a token of that account with --hf-token-file",
        "huggingface_hub: utils/_http.py; transformers: utils/hub.py",
    ),
    Rule(
        "token-refused",
        r"Invalid (?:credentials in Authorization header|user token|username or password)|401 Client Error|HTTP 401|\b401 Unauthorized",
        "the hub refuses the token (401): it is missing, wrong or expired, or there is no such model",
        "give a valid token with --hf-token-file, and check the model's name",
        "huggingface_hub: utils/_http.py",
    ),
    Rule(
        "hub-forbidden",
        r"403 (?:Client Error|Forbidden)|HTTP 403",
        "the hub does not let this be read (403)",
        "give a token that may read it with --hf-token-file, or accept the model's terms on its page",
        "huggingface_hub: utils/_http.py",
    ),
    Rule(
        "hub-unreachable",
        r"couldn't connect to '?https?://|LocalEntryNotFoundError|OfflineModeIsEnabled|offline mode is enabled"
        r"|Temporary failure in name resolution|Max retries exceeded with url|Name or service not known|Network is unreachable",
        "the node cannot reach the hub: {said}",
        "give a folder on the node, set HF_ENDPOINT to a mirror, or copy the model there with `hf download` and rsync",
        "transformers: utils/hub.py; huggingface_hub; requests",
    ),
    Rule(
        "missing-model",
        r"(?<!\S)(?P<model>\S+) is not a local folder and is not a valid model identifier|RepositoryNotFoundError|Repository Not Found for url"
        r"|Invalid repository ID or local directory specified|HFValidationError"
        r"|(?<!\S)(?P<folder>\S+) does not appear to have a file named (?P<file>[\w.-]+)|Can't load (?:the )?(?:configuration|model) (?:of|for) '(?P<name>[^']*)'"
        r"|Cannot find any model weights with [`'](?P<weights>[^`']*)",
        "there is no such model: {model}{folder}{name}{weights} {file}",
        "check the name or the folder (config.json and *.safetensors must be in it); for a private one give a token",
        "transformers: utils/hub.py; vLLM: transformers_utils/config.py, model_loader/default_loader.py",
    ),
    Rule(
        "missing-tokenizer",
        r"Can't load tokenizer for '(?P<name>[^']*)'|Couldn't instantiate the backend tokenizer|no file named tokenizer",
        "the model has no tokenizer: {name}",
        "add tokenizer.json and tokenizer_config.json to its folder",
        "transformers: tokenization_utils_base.py",
    ),
    Rule(
        "custom-code",
        r"contains? custom code which must be executed|requires you to execute the (?:configuration|model|code)|Please pass the argument"
        r" [`']trust_remote_code=True",
        "the model brings code of its own, which is not run unasked",
        "read that code; where you trust it, give --trust-remote-code",
        "transformers: dynamic_module_utils.py",
    ),
    Rule(
        "transformers-too-old",
        r"model type [`'](?P<type>[^`']+)[`'] but Transformers does not recognize this architecture|KeyError: '(?P<key>qwen3_\w+|gpt_oss)'",
        "this Transformers does not know models of the type {type}{key}",
        "use a newer Transformers in that Python: " + _FITS,
        "transformers: models/auto/configuration_auto.py",
    ),
    Rule(
        "torchvision-misfit",
        r"operator torchvision::\w+ does not exist|Couldn't load custom C\+\+ ops|torchvision.*(?:undefined symbol|has no attribute 'extension')",
        "torchvision does not fit this torch, and then no model class of Transformers can be imported",
        "uninstall torchvision and torchaudio from that Python (nothing here needs them), or install those of this torch",
        "FACTS section 9, tried with torch 2.13.0 and torchvision 0.28.0",
        plain=True,
    ),
    Rule(
        "missing-module",
        r"No module named '?(?P<module>[\w.]+)'?",
        "the Python that ran this has no module {module}",
        "name a Python that has it (--python), or make an environment: dflash-tui setup",
        "Python; `python -m vllm` where vLLM is not installed",
        plain=True,
    ),
    Rule(
        "library-misfit",
        r"undefined symbol: (?P<symbol>\w+)|(?P<library>lib[\w.+-]+\.so[\d.]*): cannot open shared object file"
        r"|version [`'](?P<version>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
        "compiled packages do not fit together: {said}",
        "install packages that were built for this torch and CUDA: " + _FITS,
        "the dynamic linker",
    ),
    Rule(
        "broken-import",
        r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'|Could not import module '(?P<lazy>\w+)'"
        r"|Failed to import (?P<failed>[\w.]+)",
        "packages do not fit together: {said}",
        "see the first traceback for the package that cannot be imported; torchvision is often it: " + _FITS,
        "Python; transformers: utils/import_utils.py",
    ),
    Rule(
        "damaged-weights",
        r"SafetensorError: .*(?:header|Header|buffer|Buffer|deserializ)|MetadataIncompleteBuffer|PytorchStreamReader failed"
        r"|invalid load key|Expecting value: line 1 column 1|unpickling stack underflow",
        "a file of the model or the data is damaged or was not written to its end: {said}",
        "copy or download it anew; a file of 130 bytes is a Git LFS pointer and not the file",
        "safetensors; torch: serialization.py",
    ),
    Rule(
        "missing-compiler",
        r"Failed to find C compiler|Could not find nvcc|(?:nvcc|ninja|gcc|g\+\+): (?:command )?not found|Ninja is required|Python\.h: No such file"
        r"|Failed to find nvcc|No such file or directory: '?(?:\S*/)?(?:nvcc|ninja|gcc|cc|g\+\+)'",
        "kernels are compiled at the start, and the node lacks what that needs: {said}",
        "install a compiler, python3-dev and the CUDA toolkit, or choose kernels that need none (VLLM_USE_FLASHINFER_SAMPLER=0,"
        " --gdn-prefill-backend triton)",
        "triton: runtime/build.py; flashinfer; torch: utils/cpp_extension.py",
    ),
    Rule(
        "all-zero-states",
        r"slot \d+ is all zero|[Hh]idden states .*(?:all zero|only zeros)",
        "the hidden states that came back are all zero ({said})",
        "known of vLLM with Qwen3.5-35B-A3B (its issue 46301): use another version of vLLM, or the hf backend",
        "FACTS section 3; backends/hsfile.py",
        plain=True,
    ),
    Rule(
        "missing-file",
        r"FileNotFoundError: .*No such file or directory: '?(?P<path>[^'\n]+)",
        "there is no file {path}",
        "check the path: it is one on the node",
        "Python",
    ),
    Rule(
        "missing-program",
        r"^(?:\S*(?:sh|bash): )?(?:(?:line )?\d+: )?(?P<program>[\w./-]+): (?:command )?not found$",
        "the node has no program {program}",
        "install it, or put its folder on the PATH",
        "sh, bash",
        plain=True,
        rank=WEAK,
    ),
)
