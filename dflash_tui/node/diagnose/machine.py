"""Causes of the machine: memory, drivers, NCCL, disks, ports, permissions, and what kills processes."""

from dflash_tui.node.diagnose.rules import WEAK, Rule

_OOM = r"CUDA out of memory|OutOfMemoryError: CUDA|CUDA error: out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED"
_DMESG = "see `dmesg -T`, and the card's health on the Fleet screen; if it comes again, take the card out of use"

ROWS = (
    Rule(
        "cuda-out-of-memory-loading",
        _OOM,
        "the GPU's memory is not enough to load the model and get ready: {said}",
        "use more GPUs (tensor parallel size) or a larger one, lower --max-model-len or --gpu-memory-utilization, or end"
        " what else holds its memory (Fleet screen)",
        "torch: c10/cuda/CUDACachingAllocator.cpp",
        plain=True,
        when="loading",
    ),
    Rule(
        "cuda-out-of-memory-running",
        _OOM,
        "the GPU's memory ran out at work: {said}",
        "give smaller batches (--max-num-batched-tokens or --max-num-seqs of vLLM, pack_tokens of hf), leave more room with a"
        " lower --gpu-memory-utilization, or end what else holds its memory",
        "torch: c10/cuda/CUDACachingAllocator.cpp",
        plain=True,
        when="running",
    ),
    Rule(
        "driver-too-old",
        r"driver version is insufficient for CUDA runtime|NVIDIA driver on your system is too old|unsupported toolchain"
        r"|forward compatibility was attempted on non supported HW|cudaErrorInsufficientDriver",
        "the node's NVIDIA driver is too old for the CUDA of this torch",
        "update the driver, or use a torch built for an older CUDA: doctor names both",
        "CUDA runtime; torch: cuda/__init__.py",
        plain=True,
    ),
    Rule(
        "driver-mismatch",
        r"[Dd]river/library version mismatch",
        "the driver in the kernel and its library are of two versions: it was updated and not loaded anew",
        "reboot the node, or unload and load the nvidia modules",
        "NVML",
        plain=True,
    ),
    Rule(
        "gpu-not-visible",
        r"Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device is detected|torch sees no CUDA device"
        r"|invalid device ordinal|CUDA unknown error|Failed to infer device type|Can't initialize NVML|cudaErrorNoDevice",
        "the process sees no GPU, or not so many: {said}",
        "see `nvidia-smi` on the node, CUDA_VISIBLE_DEVICES, and whether the container was given the GPUs",
        "torch: cuda/__init__.py; vLLM: config/device.py",
    ),
    Rule(
        "fabric-manager",
        r"system not yet initialized|cudaErrorSystemNotReady|Error 802",
        "the node's NVSwitch fabric is not ready",
        "start the service nvidia-fabricmanager in the driver's own version",
        "CUDA runtime",
        plain=True,
    ),
    Rule(
        "kernel-misfit",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation"
        r"|only supported on GPUs with compute capability",
        "this torch or vLLM has no kernels for this GPU: {said}",
        "use a build for the card's architecture, or another card; for bfloat16 on an old card give --dtype float16",
        "CUDA runtime; torch: cuda/__init__.py; vLLM: platforms/cuda.py",
    ),
    Rule(
        "gpu-fault",
        r"uncorrectable ECC error|GPU is lost|fallen off the bus|CUDA error: unspecified launch failure|hardware stack error"
        r"|Xid \(PCI:\S+\): (?:48|63|64|74|79|94|95)\b",
        "the GPU failed: {said}",
        _DMESG,
        "CUDA runtime; NVIDIA's list of Xids",
        plain=True,
    ),
    Rule(
        "gpu-illegal-access",
        r"illegal memory access was encountered|device-side assert triggered|misaligned address|CUBLAS_STATUS_INTERNAL_ERROR",
        "a kernel on the GPU went wrong: {said}",
        "run it again with CUDA_LAUNCH_BLOCKING=1 to see where; ids beyond the vocabulary are a common reason, and of vLLM on several"
        " GPUs its all-reduce: try `-- --enforce-eager`",
        "CUDA runtime",
        plain=True,
    ),
    Rule(
        "nccl-timeout",
        r"Watchdog caught collective operation timeout|[Cc]ollective operation timeout|monitoredBarrier",
        "a GPU process waited in vain for the others (NCCL time-out)",
        "another rank died or hangs: look for its error above; see NCCL_DEBUG=INFO and `nvidia-smi topo -m`",
        "torch: ProcessGroupNCCL.cpp",
        plain=True,
        rank=WEAK,
    ),
    Rule(
        "nccl",
        r"NCCL error|DistBackendError|nccl(?:System|UnhandledCuda|Internal|InvalidUsage|Remote)Error|NCCL WARN (?!.*MNNVL)",
        "the GPUs cannot work together (NCCL): {said}",
        "run with NCCL_DEBUG=INFO for the reason; often /dev/shm is too small, P2P is broken (NCCL_P2P_DISABLE=1) or the"
        " interface is wrong (NCCL_SOCKET_IFNAME)",
        "torch: ProcessGroupNCCL.cpp; NCCL",
    ),
    Rule(
        "shared-memory-full",
        r"No space left on device: '/dev/shm|No space left on device.*/dev/shm|insufficient shared memory|unable to (?:allocate|mmap) shared memory",
        "/dev/shm of the node or container is full",
        "give the container more (--shm-size, or --ipc=host), or remove what is left in /dev/shm",
        "torch: utils/data; vLLM: shm_broadcast.py",
        plain=True,
    ),
    Rule(
        "disk-full",
        r"No space left on device(?:: '?(?P<path>[^'\n]+))?|Disk quota exceeded|StorageFull|Errno (?:28|122)\b",
        "the disk is full {path}",
        "free some space, or write to another disk; then run it again: it goes on where it stopped",
        "the kernel (ENOSPC, EDQUOT)",
        plain=True,
    ),
    Rule(
        "port-in-use",
        r"[Aa]ddress already in use|EADDRINUSE|[Pp]ort (?P<port>\d+) is (?:already )?(?:in use|taken)",
        "the port that the server wants is taken: {said}",
        "end what listens there (`ss -ltnp` names it; a server that was killed may have left processes), or give another port",
        "the kernel (EADDRINUSE), by uvicorn, vLLM and torch",
        plain=True,
    ),
    Rule(
        "permission-denied",
        r"PermissionError: .*?(?:denied|permitted)(?:: '?(?P<path>[^'\n]+))?",
        "not allowed: {path} cannot be read or written by this user",
        "mend the permissions (`ls -ld`), or give a folder of yours",
        "Python (EACCES, EPERM)",
    ),
    Rule(
        "permission-denied",
        r"^\S+: (?:line \d+: )?(?:cannot [^:]+: |can't [^:]+: )?(?P<path>\S+?):? [Pp]ermission denied$",
        "not allowed: {path}",
        "mend the permissions (`ls -ld`), or give a folder of yours",
        "sh and the common tools",
        plain=True,
        rank=WEAK,
    ),
    Rule(
        "too-many-files",
        r"(?:Errno 24\] )?Too many open files",
        "too many files or connections are open at once",
        "raise the limit (`ulimit -n`), or lower the number of requests at once",
        "the kernel (EMFILE)",
    ),
    Rule(
        "oom-killer",
        r"Out of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)|oom-kill:|Memory cgroup out of memory|oom_reaper: reaped",
        "the kernel killed a process because the machine or its container ran out of memory: {said}",
        "give it more memory, load with fewer workers, or lower what is kept in memory at once",
        "the kernel: mm/oom_kill.c",
        plain=True,
    ),
    Rule(
        "host-out-of-memory",
        r"^MemoryError|DefaultCPUAllocator: (?:can't|not enough)|[Cc]annot allocate memory|std::bad_alloc|Unable to allocate [\d.]+ [KMGT]iB",
        "the machine's memory (not the GPU's) ran out: {said}",
        "free memory, use fewer workers, or a node with more",
        "Python; torch: c10/core/impl/alloc_cpu.cpp; numpy",
        plain=True,
    ),
    Rule(
        "cuda-in-fork",
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was used before a process was forked",
        "set VLLM_WORKER_MULTIPROC_METHOD=spawn",
        "torch: cuda/__init__.py",
    ),
    Rule(
        "crashed",
        r"^Fatal Python error: (?P<what>.+)|Segfault encountered|^(?:\S+: line \d+: +\d+ )?Segmentation fault|\(core dumped\)"
        r"|[Ss]ignal(?:s\.| )?SIG(?:SEGV|ABRT|BUS|ILL)",
        "a process crashed in compiled code {what}",
        "see the stack below that line; often packages are not built for each other, or the disk or /dev/shm was full",
        "Python: faulthandler; vLLM; the shell",
        plain=True,
        rank=WEAK,
    ),
    Rule(
        "killed-by-sigkill",
        r"^(?:\S+: line \d+: +\d+ )?Killed\b(?: +\S.*)?$",
        "the process was killed by SIGKILL: the kernel's out-of-memory killer, or somebody on the node",
        "see `dmesg -T | grep -i 'killed process'` and the memory limit of the container; then start it again",
        "the shell",
        plain=True,
        rank=WEAK,
    ),
    Rule(
        "connection-lost",
        r"BrokenPipeError|ConnectionResetError|ConnectionRefusedError|RemoteDisconnected|EOFError",
        "the other side of a connection went away ({said}), and the log does not say why",
        "look at the log of the server that was spoken to",
        "Python",
        rank=WEAK,
    ),
)
