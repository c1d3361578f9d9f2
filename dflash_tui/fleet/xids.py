"""What an XID of NVIDIA's driver means, in a line, and what to do. The numbers are those of NVIDIA's catalogue of XID errors."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Severity(IntEnum):
    """How bad it is; the worst is the lowest, so that sorting puts it first."""

    ALARM = 0  # work on this card is lost or wrong
    WARNING = 1  # it works, worse than it should, or not for long
    NOTE = 2  # worth knowing, and likely no fault of the card


class Meaning(NamedTuple):
    """`about_program`: most often the program's fault, so that it is news for a while and not for ever."""

    severity: Severity
    text: str
    remedy: str
    about_program: bool = False


_RESET = "end what runs there and reset the card: nvidia-smi --gpu-reset -i INDEX, or reboot the node"
_PROGRAM = "look at the log of the program that ran there; if several programs meet it, test the card"
_REPLACE = "stop using this card and have it tested or replaced"
_LINK = "check the other cards and the switch, reset the card; if it comes again, have the link tested"

_ALARM, _WARNING, _NOTE = Severity.ALARM, Severity.WARNING, Severity.NOTE

XIDS: dict[int, Meaning] = {
    8: Meaning(_WARNING, "the card did not finish some work in its time", _PROGRAM, True),
    13: Meaning(
        _NOTE, "a program's kernel made the graphics engine fault, often an address out of range", _PROGRAM, True
    ),
    31: Meaning(_NOTE, "a program touched GPU memory that is not mapped", _PROGRAM, True),
    32: Meaning(_WARNING, "the card was given work in a form that it cannot read", _PROGRAM, True),
    38: Meaning(_ALARM, "the driver's firmware on the card failed", _RESET),
    43: Meaning(_NOTE, "the card stopped a program's work after a fault of that program", _PROGRAM, True),
    45: Meaning(
        _NOTE, "a program's work was taken off the card, after it was killed or after another fault", _PROGRAM, True
    ),
    48: Meaning(_ALARM, "a memory error that ECC could not correct", _RESET),
    61: Meaning(_ALARM, "the card's own controller stopped at a breakpoint", _RESET),
    62: Meaning(_ALARM, "the card's own controller halted", _RESET),
    63: Meaning(_WARNING, "a bad piece of memory was marked to be replaced by a spare one", _RESET),
    64: Meaning(_ALARM, "a bad piece of memory could not be marked to be replaced", _REPLACE),
    68: Meaning(_WARNING, "the video decoder failed", _PROGRAM, True),
    69: Meaning(_WARNING, "a program's work made the graphics engine fail", _PROGRAM, True),
    74: Meaning(_ALARM, "an NVLink failed", _LINK),
    79: Meaning(
        _ALARM, "the card has fallen off the bus", "reboot the node; if it comes again, check power, seating and heat"
    ),
    92: Meaning(_WARNING, "memory errors that ECC corrects come very often", _REPLACE),
    94: Meaning(_ALARM, "a memory error stayed within one program, which was ended", _RESET),
    95: Meaning(_ALARM, "a memory error may have spoiled the work of every program on the card", _RESET),
    109: Meaning(_WARNING, "switching between programs took too long", _RESET),
    119: Meaning(_ALARM, "the card's system processor (GSP) did not answer the driver", _RESET),
    120: Meaning(_ALARM, "the card's system processor (GSP) failed", _RESET),
    121: Meaning(_WARNING, "the link between processor and card corrected errors", _LINK),
    136: Meaning(_ALARM, "the link to the memory or to another chip could not be trained", _REPLACE),
    140: Meaning(_ALARM, "a memory error that ECC could not correct, and the driver could not recover", _RESET),
    143: Meaning(_ALARM, "the card could not be started", _RESET),
    144: Meaning(_WARNING, "an NVLink reported a fault of its own logic", _LINK),
    145: Meaning(_ALARM, "an NVLink failed towards another card", _LINK),
    149: Meaning(_ALARM, "an NVLink's transport failed", _LINK),
    154: Meaning(_ALARM, "the driver asks for a step that recovers the card", _RESET),
}


def meaning(code: int) -> Meaning:
    """What a code means; of one that is not in the table, that it is a fault of the driver's list."""
    found = XIDS.get(code)
    if found is not None:
        return found
    return Meaning(_WARNING, "the driver reported a fault", f"look {code} up in NVIDIA's list of XID errors")
