"""What `record.py` asks: every call of `dflash_tui/node/` to NVML and nvidia-smi, and what may be asked later.

A call is the function, then its arguments after the handle; words that begin with NVML_ or nvml are constants of pynvml.
"""

import re

VOLATILE_AND_AGGREGATE = [(kind, counter) for counter in (0, 1) for kind in (0, 1)]

DEVICE_CALLS = [
    ("nvmlDeviceGetUUID",),
    ("nvmlDeviceGetName",),
    ("nvmlDeviceGetPciInfo_v3",),
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetMemoryInfo",),
    ("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"),
    ("nvmlDeviceGetPowerUsage",),
    ("nvmlDeviceGetEnforcedPowerLimit",),
    ("nvmlDeviceGetPowerManagementLimit",),
    ("nvmlDeviceGetPowerManagementDefaultLimit",),
    ("nvmlDeviceGetPowerManagementLimitConstraints",),
    ("nvmlDeviceGetTotalEnergyConsumption",),
    ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    ("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
    ("nvmlDeviceGetMarginTemperature",),
    *(("nvmlDeviceGetTemperatureThreshold", kind) for kind in range(8)),
    *(("nvmlDeviceGetClockInfo", clock) for clock in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_CLOCK_GRAPHICS")),
    *(("nvmlDeviceGetMaxClockInfo", clock) for clock in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_CLOCK_GRAPHICS")),
    ("nvmlDeviceGetPerformanceState",),
    ("nvmlDeviceGetCurrentClocksEventReasons",),
    ("nvmlDeviceGetCurrentClocksThrottleReasons",),
    ("nvmlDeviceGetSupportedClocksEventReasons",),
    ("nvmlDeviceGetSupportedClocksThrottleReasons",),
    *(("nvmlDeviceGetViolationStatus", policy) for policy in (0, 1, 2, 3, 4, 5, 10, 11)),
    ("nvmlDeviceGetEccMode",),
    *(("nvmlDeviceGetTotalEccErrors", *which) for which in VOLATILE_AND_AGGREGATE),
    *(("nvmlDeviceGetMemoryErrorCounter", *which, place) for which in VOLATILE_AND_AGGREGATE for place in (1, 2, 3, 7)),
    ("nvmlDeviceGetRemappedRows",),
    ("nvmlDeviceGetRowRemapperHistogram",),
    ("nvmlDeviceGetRetiredPages", 0),
    ("nvmlDeviceGetRetiredPages", 1),
    ("nvmlDeviceGetRetiredPagesPendingStatus",),
    ("nvmlDeviceGetCurrPcieLinkGeneration",),
    ("nvmlDeviceGetMaxPcieLinkGeneration",),
    ("nvmlDeviceGetGpuMaxPcieLinkGeneration",),
    ("nvmlDeviceGetCurrPcieLinkWidth",),
    ("nvmlDeviceGetMaxPcieLinkWidth",),
    ("nvmlDeviceGetPcieSpeed",),
    ("nvmlDeviceGetPcieLinkMaxSpeed",),
    ("nvmlDeviceGetPcieReplayCounter",),
    ("nvmlDeviceGetPcieThroughput", "NVML_PCIE_UTIL_TX_BYTES"),
    ("nvmlDeviceGetPcieThroughput", "NVML_PCIE_UTIL_RX_BYTES"),
    ("nvmlDeviceGetMigMode",),
    ("nvmlDeviceGetMaxMigDeviceCount",),
    ("nvmlDeviceGetMigDeviceHandleByIndex", 0),
    ("nvmlDeviceIsMigDeviceHandle",),
    ("nvmlDeviceGetAttributes_v2",),
    ("nvmlDeviceGetPersistenceMode",),
    ("nvmlDeviceGetComputeMode",),
    ("nvmlDeviceGetFanSpeed",),
    ("nvmlDeviceGetNumFans",),
    ("nvmlDeviceGetArchitecture",),
    ("nvmlDeviceGetCudaComputeCapability",),
    ("nvmlDeviceGetBoardPartNumber",),
    ("nvmlDeviceGetVbiosVersion",),
    ("nvmlDeviceGetSupportedEventTypes",),
    *(
        (f"nvmlDeviceGet{kind}RunningProcesses{version}",)
        for kind in ("Compute", "Graphics")
        for version in ("_v3", "_v2", "")
    ),
]

LINKS = 18  # of Hopper and Blackwell; other cards have fewer
LINK_CALLS = [
    ("nvmlDeviceGetNvLinkState",),
    ("nvmlDeviceGetNvLinkVersion",),
    ("nvmlDeviceGetNvLinkRemoteDeviceType",),
    ("nvmlDeviceGetNvLinkRemotePciInfo",),
    *(("nvmlDeviceGetNvLinkCapability", capability) for capability in range(6)),
    *(("nvmlDeviceGetNvLinkErrorCounter", counter) for counter in range(5)),
]

# Field values (NVML_FI_*): all of them with scope 0, and those of NVLink and of power with their scopes too.
FIELDS = range(1, 308)
ALL_LINKS = 0xFFFFFFFF
LINK_FIELDS = [*range(138, 142), *range(161, 167), *range(201, 216), *range(219, 223)]
FIELDS_OF_ALL_LINKS = range(138, 142)
POWER_FIELDS, POWER_SCOPES = range(185, 193), (1, 2)
PCIE_COUNTERS = (197, 198)

SMI_FORMAT = "--format=csv,noheader,nounits"
SMI_COMMANDS = {
    "gpus": [
        "--query-gpu=index,uuid,name,utilization.gpu,memory.used,memory.total,power.draw,power.limit,"
        "temperature.gpu,clocks.sm,clocks.mem",
        SMI_FORMAT,
    ],
    "processes": ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", SMI_FORMAT],
    "unknown_gpu": ["--id=99", "--query-gpu=index,uuid", SMI_FORMAT],
    "unknown_field": ["--query-gpu=index,uuid,no.such.field,name", SMI_FORMAT],
    "list": ["-L"],
    "full": ["-q", "-x"],
    "nvlink_status": ["nvlink", "-s"],
    "nvlink_errors": ["nvlink", "-e"],
    "mig_instances": ["mig", "-lgi"],
    "mig_compute_instances": ["mig", "-lci"],
}
HELP = ["--help-query-gpu"]
# Names of `--query-gpu` that are left out of the recording: they name one board, slot or machine.
NOT_RECORDED = re.compile(
    r"serial|guid|board_id|pdi|uuid_|slot|tray|host_id|module_id|peer|^platform|^fabric|^pci\.(domain|bus|device)$"
)

# Load of the busy phases; argv: what to do. It says "ready …", then works until SIGTERM and says what it moved.
LOAD = """
import os, signal, sys, time, torch
what, end, ended = sys.argv[1], time.monotonic() + 90, []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
size = 1 << 28
if what == "matmul":
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    step, moved_a_step = (lambda: a @ a), 0
else:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(size, dtype=torch.uint8, device="cuda")
    step = (lambda: card.copy_(host, non_blocking=True)) if what == "to_card" else (lambda: host.copy_(card, non_blocking=True))
    moved_a_step = size
step()
torch.cuda.synchronize()
print("ready", os.getpid(), torch.__version__, torch.cuda.get_device_name(), flush=True)
started, moved = time.monotonic(), 0
while not ended and time.monotonic() < end:
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    moved += 8 * moved_a_step
print("moved", moved, time.monotonic() - started, flush=True)
"""
