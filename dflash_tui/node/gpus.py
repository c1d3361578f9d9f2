"""Which GPUs a request means, and whether it may have them."""

import re
from typing import Any, Callable, Dict, Iterable, List, Optional

from dflash_tui.node import locks, protocol
from dflash_tui.node.protocol import Refused

# More than a driver and a display keep for themselves; a process that uses a GPU holds more.
_IDLE_BYTES = 1 << 30

Card = Dict[str, Any]


def select(reading: Optional[Dict[str, Any]], wanted: Iterable[Any]) -> List[Card]:
    """The cards of a metrics reading that indices or UUIDs mean, each once. Raises Refused (gpu-unknown)."""
    names = [str(name).strip() for name in wanted]
    if not names:
        return []
    if reading is None:
        raise Refused(
            protocol.GPU_UNKNOWN,
            "the GPUs of this node could not be read yet",
            "wait until the console shows them and try again",
        )
    cards = reading.get("gpus") or []
    chosen: List[Card] = []
    for name in names:
        card = next((card for card in cards if _means(name, card)), None)
        if card is None:
            raise Refused(
                protocol.GPU_UNKNOWN, "there is no GPU %s: %s" % (name, _existing(reading)), "choose one that exists"
            )
        if not card.get("uuid"):
            why = card.get("error") or "the driver gives it no UUID"
            raise Refused(protocol.GPU_UNKNOWN, "GPU %s cannot be used: %s" % (name, why), "choose another")
        if card not in chosen:
            chosen.append(card)
    return chosen


def check_free(root: str, cards: List[Card], share: bool, orphan_on: Callable[[str], Optional[str]]) -> None:
    """Raises Refused: gpu-locked where a job of ours holds one, gpu-busy where others use one and `share` is not set."""
    for card in cards:
        uuid = str(card["uuid"])
        holder = locks.gpu_holder(root, uuid, share)
        if holder is not None:
            raise locked(card, holder)
        orphan = orphan_on(uuid)
        if orphan is not None:
            raise Refused(
                protocol.GPU_LOCKED,
                "GPU %s may still be used by what is left of job %s" % (card.get("index"), orphan),
                "end it first: dflash-tui stop %s" % orphan,
            )
        user = None if share else _user_of(card)
        if user is not None:
            raise Refused(
                protocol.GPU_BUSY,
                "GPU %s is busy: %s" % (card.get("index"), user),
                "choose another GPU, or share it with --share",
            )


def locked(card: Card, job: str) -> Refused:
    return Refused(
        protocol.GPU_LOCKED,
        "GPU %s is locked by job %s" % (card.get("index"), job),
        "choose another GPU, wait for that job, or stop it: dflash-tui stop %s" % job,
    )


def in_record(card: Card) -> Dict[str, Any]:
    """A card as a job's record holds it; `baseline_bytes` is what was in use before the job."""
    return {
        "index": card.get("index"),
        "uuid": card["uuid"],
        "name": card.get("name"),
        "baseline_bytes": card.get("memory_used_bytes"),
    }


def memory_by_pid(reading: Optional[Dict[str, Any]]) -> Dict[int, Optional[int]]:
    """Bytes of GPU memory that each process holds, over all cards."""
    held: Dict[int, Optional[int]] = {}
    for card in (reading or {}).get("gpus") or []:
        for process in card.get("processes") or []:
            pid, memory = process.get("pid"), process.get("memory_bytes")
            if memory is not None:
                held[pid] = (held.get(pid) or 0) + memory
    return held


def _means(name: str, card: Card) -> bool:
    if re.match(r"[0-9]+\Z", name):
        return card.get("index") == int(name)
    return bool(card.get("uuid")) and str(card["uuid"]).lower() == name.lower()


def _existing(reading: Dict[str, Any]) -> str:
    cards = reading.get("gpus") or []
    if not cards:
        why = reading.get("gpu_error")
        return "this node shows no GPU" + (" (%s)" % why if why else "")
    indices = ", ".join(str(card.get("index")) for card in cards)
    return "this node has GPU %s" % indices if len(cards) == 1 else "this node has GPUs %s" % indices


def _user_of(card: Card) -> Optional[str]:
    """Who uses the card, in words, or None."""
    every = card.get("processes") or []
    # Our own jobs are the locks' affair; one that just ended may still stand in the last reading.
    users = [process for process in every if not process.get("job")]
    if every and not users:
        return None
    if users:
        first = users[0]
        memory = first.get("memory_bytes")
        more = " and %d more" % (len(users) - 1) if len(users) > 1 else ""
        held = " holds %.1f GiB" % (memory / 2**30) if memory is not None else " uses it"
        who = "process %s (%s)" % (first.get("pid"), (first.get("command") or "outside this container")[:60])
        return who + held + more
    used = card.get("memory_used_bytes")
    if used is not None and used > _IDLE_BYTES:
        return "%.1f GiB of its memory are held by a process outside this container" % (used / 2**30)
    return None
