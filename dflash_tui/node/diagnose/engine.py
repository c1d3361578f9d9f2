"""Causes that vLLM's own words tell: what it cannot extract from, what it does not understand, and how it dies."""

from dflash_tui.node.diagnose.rules import WEAK, Rule

_HYBRID = "use vLLM 0.22.0 or later (0.24.0 for Qwen3-Next, 0.26.0 for Qwen3.5) with --no-enable-prefix-caching, or the hf backend"

ROWS = (
    Rule(
        "vllm-hybrid-kv-manager-off",
        r"failed to convert the KV cache specs to one unified type",
        "this vLLM turns its hybrid KV-cache manager off where hidden states are extracted, and cannot run a model with"
        " layers of several kinds without it",
        _HYBRID,
        "recording v0.20.1-hybrid-kv-manager-off",
    ),
    Rule(
        "vllm-hybrid-page-size",
        r"page size of the layer is not divisible by the maximum page size",
        "this vLLM cannot bring the states of a hybrid model and the extraction's own cache to one page size",
        _HYBRID,
        "recording v0.20.1-hybrid-page-size",
    ),
    Rule(
        "vllm-no-eagle3-interface",
        r"Model does not support EAGLE3 interface",
        "this vLLM's code for the model cannot hand out hidden states of its layers (no EAGLE3 interface)",
        _HYBRID,
        "recording v0.20.1-h200-no-eagle3-interface",
    ),
    Rule(
        "vllm-hybrid-prefix-caching",
        r"TypeError: 'function' object is not subscriptable",
        "prefix caching of a hybrid model needs Triton kernels that are not there",
        "give vLLM --no-enable-prefix-caching: extraction needs it on every machine",
        "recording v0.32.0-cpu-prefix-caching",
        frame=r"mamba_utils\.py$",
    ),
    Rule(
        "no-pinned-memory",
        r"pin_memory=True requires a CUDA or other accelerator|Cannot access accelerator device when none is available",
        "hidden states are copied through pinned memory, which this machine without a GPU does not have",
        "run on a node with a GPU, or use the hf backend with the device cpu",
        "recording v0.32.0-cpu-pin-memory",
    ),
    Rule(
        "vllm-cannot-extract",
        r"literal_error, input_value='extract_hidden_states'|[Uu]nsupported connector type: ExampleHiddenStates"
        r"|Unknown speculative (?:decoding )?method:? .?extract_hidden_states",
        "this vLLM is too old to extract hidden states",
        "use vLLM 0.22.0 or later, or the hf backend",
        "vLLM: config/speculative.py, kv_connector/factory.py",
    ),
    Rule(
        "vllm-takes-no-uuids",
        r"invalid literal for int\(\) with base 10: '(?P<uuid>(?:GPU|MIG)-[0-9a-f-]+)'",
        "this vLLM takes the GPUs of CUDA_VISIBLE_DEVICES by number alone, and was given {uuid}",
        "give it their numbers, with CUDA_DEVICE_ORDER=PCI_BUS_ID, or use vLLM 0.26.0 or later",
        "vLLM 0.20.1 on an H200: platforms/interface.py",
    ),
    Rule(
        "vllm-architecture",
        r"Model architectures (?P<architectures>\[.*?\]) (?:are not supported|failed to be inspected)"
        r"|(?P<one>\w+) has no vLLM implementation",
        "this vLLM has no code for the model's architecture {architectures}{one}",
        "use a newer vLLM, or the hf backend",
        "vLLM: model_executor/models/registry.py",
    ),
    Rule(
        "vllm-tensor-parallel",
        r"must be divisible by tensor parallel size|World size \(\d+\) is larger than the number of available GPUs"
        r"|is not divisible by (?:the )?(?:tensor parallel|tp)",
        "the model cannot be split over so many GPUs: {said}",
        "choose another tensor parallel size: a divisor of the attention heads, and no more than there are GPUs",
        "vLLM: config/model.py, config/parallel.py",
    ),
    Rule(
        "request-too-long",
        r"maximum context length is (?P<most>\d+)|[Pp]rompt (?:\(length \d+\) |length of \d+ )?is longer than the maximum model"
        r"|longer than the maximum number of tokens in the KV cache|exceeds? (?:the )?(?:max_model_len|KV cache capacity)",
        "a sample is longer than what the server takes: {said}",
        "leave out the long samples (--max-tokens of prepare), raise --max-model-len, or free GPU memory for the KV cache",
        "vLLM: renderers, v1/engine/input_processor.py",
    ),
    Rule(
        "kv-cache-too-small",
        r"is larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)"
        r"|To serve at least one request with the models?'?s? max seq len|No available memory for the cache blocks",
        "the GPU memory left beside the weights is too small for the KV cache of one request",
        "lower --max-model-len, raise --gpu-memory-utilization, or use more GPUs (tensor parallel size)",
        "vLLM: v1/core/kv_cache_utils.py",
    ),
    Rule(
        "gpu-memory-taken",
        r"Free memory on device (?P<free>.*?) on startup is less than desired GPU memory utilization(?P<wanted>.*)"
        r"|Error in memory profiling",
        "another process holds memory of the GPU that this one was to take: {said}",
        "see who holds it on the Fleet screen and end that, choose another GPU, or lower --gpu-memory-utilization",
        "vLLM: v1/worker/gpu_worker.py, utils/mem_utils.py",
    ),
    Rule(
        "memory-taken",
        r"Available memory on node \d+ .*? on startup is less than desired CPU memory utilization",
        "too little of this machine's memory is free for the share that vLLM takes on a CPU",
        "give --gpu-memory-utilization a smaller share, or end what holds the memory",
        "vLLM: v1/worker/cpu_worker.py",
    ),
    Rule(
        "unrecognised-arguments",
        r"^(?!gcc|g\+\+|cc1?|ld|clang|nvcc|git|make|ninja)[\w./-]+(?: [\w.-]+)*: error: (?P<what>.+)",
        "the program does not take its arguments: {what}",
        "mend the extra arguments (what stands after --): `vllm serve --help` lists those that this version takes",
        "Python: argparse",
        plain=True,
    ),
    Rule(
        "unrecognised-arguments",
        r"^error: (?:unrecognized arguments|argument |the following arguments)(?P<what>.*)",
        "the program does not take its arguments: {said}",
        "mend the extra arguments (what stands after --)",
        "Python: argparse without a program name",
        plain=True,
    ),
    Rule(
        "engine-timeout",
        r"RPC call to \w+ timed out|execute_model timed out|Timed out waiting for (?:the )?engine|Did not receive response"
        r" from front-end process within|Timed out after .* waiting for .*engine",
        "the engine did not answer in time: {said}",
        "look what its workers do (py-spy dump), and whether the GPUs or the disk of the model hang",
        "vLLM: v1/executor/multiproc_executor.py, v1/engine/utils.py",
    ),
    Rule(
        "hidden-states-not-written",
        r"Hidden-states write failed for req_id=\S+ (?P<why>(?!.*(?:No space left|quota exceeded|StorageFull|os error 28)).+)",
        "vLLM could not write the states of a sample: {why}",
        "see that the folder of the output can be written to, and that hs-connectors and safetensors fit this vLLM",
        "vLLM: kv_connector/v1/example_hidden_states_connector.py",
    ),
    Rule(
        "killed-by-sigkill",
        r"(?P<who>Worker proc \S+|Engine core proc \S+) died unexpectedly \(exit code: -9\)",
        "{who} was killed by SIGKILL: the kernel's out-of-memory killer, or somebody on the node",
        "see `dmesg -T | grep -i 'killed process'` and the memory limit of the container; then start it again",
        "recording v0.32.0-cpu-killed",
        rank=WEAK,
    ),
    Rule(
        "killed-by-sigkill",
        r"SIGKILL|exitcode *: *-9\b|DataLoader worker \(pid\(?s?\)? .*\) (?:is killed by signal: Killed|exited unexpectedly)"
        r"|signal 9\b|exit(?:ed with)? (?:code|status) (?:-9|137)\b",
        "a process was killed by SIGKILL: the kernel's out-of-memory killer, or somebody on the node",
        "see `dmesg -T | grep -i 'killed process'` and the memory limit of the container; then start it again",
        "torchrun: elastic; torch: utils/data/dataloader.py; supervisors of processes",
        rank=WEAK,
    ),
    Rule(
        "process-died",
        r"(?P<who>Worker proc \S+|Engine core proc \S+|WorkerProc) (?:died unexpectedly|initialization failed)"
        r"(?: \(exit code: (?P<code>-?\d+)\))?",
        "{who} ended by itself and the log does not say why",
        "a status below 0 is a signal: see `dmesg -T`, and the log of the process where it has one of its own",
        "vLLM: v1/executor/multiproc_executor.py",
        rank=WEAK,
    ),
)
