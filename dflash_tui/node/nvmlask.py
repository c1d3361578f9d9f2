"""Questions to one card by NVML: the first fault is kept, and what a card does not have is not asked again each second."""

import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

Attempt = Tuple[Any, ...]  # the name of a function and its arguments after the handle
Field = Tuple[int, int]  # a number of nvml.h (NVML_FI_*) and its scope: a link, a part of the board

# NVML's return codes, nvml.h.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 25
DEPRECATED = 26

# Another entry point may know: the driver and pynvml are of different ages.
OTHER_ENTRY_POINT = (INVALID_ARGUMENT, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED)
# The card has no such thing, or hides it: "not available" and no fault.
NOT_AVAILABLE = (NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, *OTHER_ENTRY_POINT)
CARD_GONE = (GPU_IS_LOST, RESET_REQUIRED)
# These stay as they are for long: only another mode (MIG, say) or another driver changes them.
LASTING = (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED)
ASK_AGAIN_S = 600.0

# What the union of a field's value holds, by its type.
VALUE_OF_TYPE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class Questions:
    """The questions to one card. A card that is gone is asked no further until `begin`.

    `error` is the first fault of a question about its load, `faults` are those of the others: they hide nothing.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._handle: Any = None
        self._gone = False
        self._without: Dict[Tuple[Any, ...], float] = {}  # what it does not have, and when to ask for it again
        self._lenient = False
        self.error: Optional[str] = None
        self.faults: List[str] = []

    @property
    def gone(self) -> bool:
        return self._gone

    def begin(self, handle: Any) -> None:
        """Another round, with the handle that the card has now."""
        self._handle, self._gone, self._lenient = handle, False, False
        self.error, self.faults = None, []

    def lenient(self) -> None:
        """From here on a fault costs nothing but what was asked for."""
        self._lenient = True

    def ask(self, what: str, *attempts: Attempt, of: Any = None) -> Any:
        """The answer of the first entry point that this driver has, or None; `of` is the handle of a MIG instance."""
        now = self._clock()
        for attempt in attempts:
            name, *arguments = attempt
            function: Optional[Callable[..., Any]] = getattr(self._nvml, name, None)
            if function is None or self._gone or (of is None and self._without.get(attempt, now) > now):
                continue
            try:
                return function(self._handle if of is None else of, *arguments)
            except self._nvml.NVMLError as error:
                if of is None and error.value in LASTING:
                    self._without[attempt] = now + ASK_AGAIN_S
                if error.value in OTHER_ENTRY_POINT:
                    continue
                self._note(what, error)
                return None
            except getattr(self._nvml, "NVMLLibraryMismatchError", ()):
                self._without[attempt] = now + ASK_AGAIN_S
                continue  # what pynvml says instead of "function not found"
        return None

    def fields(self, what: str, wanted: Sequence[Field]) -> Dict[Field, Any]:
        """Field values, all by one call; one that the card does not have is None."""
        now = self._clock()
        asked = [field for field in wanted if self._without.get(field, now) <= now]
        found: Dict[Field, Any] = dict.fromkeys(wanted)
        if not asked:
            return found
        for field, said in zip(asked, self.ask(what, ("nvmlDeviceGetFieldValues", tuple(asked))) or ()):
            if said.nvmlReturn == 0:
                found[field] = getattr(said.value, VALUE_OF_TYPE.get(said.valueType, "ullVal"), None)
            elif said.nvmlReturn in LASTING or said.nvmlReturn == INVALID_ARGUMENT:
                self._without[field] = now + ASK_AGAIN_S
        return found

    def _note(self, what: str, error: Any) -> None:
        if error.value in CARD_GONE:
            self._gone = True
            self.error = str(error)
        elif error.value in NOT_AVAILABLE:
            return
        elif self._lenient:
            self.faults.append("%s: %s" % (what, error))
        elif self.error is None:
            self.error = "%s: %s" % (what, error)
