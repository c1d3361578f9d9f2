"""Answers as `pynvml` does, from a recording that `tests/gpu/record.py` made on a real card.

Constants, error classes and the shapes of answers are those of the real `pynvml`; only the driver's part is replayed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

FOLDER = Path(__file__).resolve().parent
RECORDING = FOLDER.parent / "data" / "gpu" / "h200-x2.json"
SMI = FOLDER / "nvidia-smi"
EVENT_CALLS = ("nvmlEventSetCreate", "nvmlEventSetWait_v2", "nvmlEventSetFree", "nvmlDeviceRegisterEvents")


def recording() -> dict[str, Any]:
    return json.loads(RECORDING.read_text(encoding="utf-8"))


class ReplayedNvml:
    """The module object for `dflash_tui.node.nvml.Nvml`.

    cards: how many; the first recorded card stands for each, with a UUID and a bus id of its own.
    errors: (card, name of a function or "*") -> NVML error code that it raises instead.
    processes: (card, function) -> what is answered instead of the recorded list, as dicts of its fields.
    answers: (card, call as in the recording) -> what is answered instead.
    fields: (card, "ID:SCOPE") -> the field value instead, or an NVML error code as `{"error": CODE}`.
    without: functions that this driver is too old to have.
    mig: card -> its MIG instances, as dicts of `uuid`, `name`, `used`, `total`; what NVML documents for a card in that mode.
    `asked` lists every call by its name in the recording, `unrecorded` those that are not in it ("not supported" then);
    `xids` are (card, code) that have come and were not fetched yet.
    """

    def __init__(
        self,
        phase: str = "busy",
        cards: int = 1,
        errors: dict[tuple[int, str], int] | None = None,
        processes: dict[tuple[int, str], list[dict[str, Any]]] | None = None,
        answers: dict[tuple[int, str], Any] | None = None,
        fields: dict[tuple[int, str], Any] | None = None,
        without: tuple[str, ...] = (),
        mig: dict[int, list[dict[str, Any]]] | None = None,
    ) -> None:
        self._answers = recording()["phases"][phase]["nvml"]["devices"][0]
        self._cards = cards
        self.errors = errors or {}
        self._processes = processes or {}
        self.answers = answers or {}
        self.fields = fields or {}
        self._without = without
        self.mig = mig or {}
        self.init_error: int | None = None
        self.count_error: int | None = None
        self.asked: list[str] = []
        self.unrecorded: list[str] = []
        self.xids: list[tuple[int, int]] = []
        self.listening: set[int] = set()
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.count_error is not None:
            raise pynvml.NVMLError(self.count_error)
        return self._cards

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._raise(index, "nvmlDeviceGetHandleByIndex")
        return index

    def _raise(self, card: int, name: str) -> None:
        code = self.errors.get((card, name), self.errors.get((card, "*")))
        if name in self._without:
            code = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        if code is not None:
            raise pynvml.NVMLError(code)

    def __getattr__(self, name: str) -> Any:
        if name in EVENT_CALLS:
            return getattr(self, f"_{name}")
        if not name.startswith("nvmlDeviceGet"):
            return getattr(pynvml, name)
        if name == "nvmlDeviceGetFieldValues":
            return self._field_values
        return self._function(name)

    def _function(self, name: str) -> Callable[..., Any]:
        def call(card: Any, *arguments: Any) -> Any:
            if isinstance(card, str):
                return self._of_instance(card, name)
            key = f"{name}({', '.join(map(str, arguments))})"
            self.asked.append(key)
            self._raise(card, name)
            if (card, name) in self._processes:
                return [SimpleNamespace(**fields) for fields in self._processes[card, name]]
            if (card, key) in self.answers:
                return _object(self.answers[card, key])
            if card in self.mig and name in MIG_ANSWERS:
                return MIG_ANSWERS[name](card, self.mig[card], *arguments)
            answer = self._recorded(name, key, arguments)
            if "error" in answer:
                if answer["error"] is None:
                    raise pynvml.NVMLLibraryMismatchError(answer["message"])
                raise pynvml.NVMLError(answer["error"])
            if name == "nvmlDeviceGetUUID":
                return f"GPU-00000000-0000-4000-8000-{card:012d}"
            if name.startswith("nvmlDeviceGetPciInfo"):
                return _object({**answer["value"], "busId": f"00000000:{0x10 + card:02X}:00.0"})
            return _object(answer["value"])

        return call

    def _recorded(self, name: str, key: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        if name.startswith("nvmlDeviceGetNvLink"):
            links = self._answers.get("links", [])
            rest = f"{name}({', '.join(map(str, arguments[1:]))})"
            found = links[arguments[0]].get(rest) if arguments[0] < len(links) else None
        else:
            found = self._answers.get(key)
        if found is None:
            self.unrecorded.append(key)
        return found or {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}

    def _field_values(self, card: int, wanted: Any) -> list[Any]:
        self.asked.append(f"nvmlDeviceGetFieldValues({len(wanted)})")
        self._raise(card, "nvmlDeviceGetFieldValues")
        found = []
        for field, scope in wanted:
            key = f"{field}:{scope}"
            answer = self._answers.get("fields", {}).get(key)
            if answer is None:
                self.unrecorded.append(f"field {key}")
            answer = answer or {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}
            instead = self.fields.get((card, key))
            if instead is not None:
                answer = instead if isinstance(instead, dict) else {"value": instead, "type": 3}
            said = pynvml.c_nvmlFieldValue_t()
            said.fieldId, said.scopeId = field, scope
            if "error" in answer:
                said.nvmlReturn = answer["error"]
            else:
                said.valueType = answer["type"]
                names = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
                setattr(said.value, names[answer["type"]], answer["value"])
            found.append(said)
        return found

    def _of_instance(self, handle: str, name: str) -> Any:
        card, place = (int(part) for part in handle.split(":")[1:])
        instance = self.mig[card][place]
        if name == "nvmlDeviceGetMemoryInfo":
            return SimpleNamespace(
                used=instance["used"], total=instance["total"], free=instance["total"] - instance["used"]
            )
        words = {"nvmlDeviceGetUUID": instance["uuid"], "nvmlDeviceGetName": instance["name"]}
        words.update(nvmlDeviceGetGpuInstanceId=place + 1, nvmlDeviceGetComputeInstanceId=0)
        if name not in words:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return words[name]

    def _nvmlEventSetCreate(self) -> str:
        self._raise(-1, "nvmlEventSetCreate")
        return "events"

    def _nvmlDeviceRegisterEvents(self, card: int, kinds: int, events: str) -> None:
        self._raise(card, "nvmlDeviceRegisterEvents")
        assert events == "events" and kinds == pynvml.nvmlEventTypeXidCriticalError
        self.listening.add(card)

    def _nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0, "a look must not wait"
        self._raise(-1, "nvmlEventSetWait_v2")
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        card, code = self.xids.pop(0)
        return SimpleNamespace(device=card, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=code)

    def _nvmlEventSetFree(self, events: str) -> None:
        self.listening.clear()


def _not_supported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _instance_handle(card: int, instances: list[dict[str, Any]], place: int) -> str:
    if place >= len(instances):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return f"mig:{card}:{place}"


# nvml.h on a card in MIG mode: at most seven instances, handles with gaps, and no utilisation of the whole.
MIG_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetMigMode": lambda card, instances: [1, 1],
    "nvmlDeviceGetMaxMigDeviceCount": lambda card, instances: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _instance_handle,
    "nvmlDeviceGetUtilizationRates": _not_supported,
}


def _object(value: Any) -> Any:
    if isinstance(value, list):
        return [_object(item) for item in value]
    return SimpleNamespace(**value) if isinstance(value, dict) else value
