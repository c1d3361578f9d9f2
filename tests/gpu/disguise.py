"""Replaces what identifies a card or a machine in a recording, the same thing by the same thing throughout."""

import re
import sys

# Tags of `nvidia-smi -q -x` and keys of structures whose values name one board, slot or machine.
IDENTIFIES = r"serial|guid|board_id|pdi|cluster_uuid|clique_id|slot_number|tray_index|host_id|module_id|peer_type"
SECRET_TAGS = re.compile(rf"<([a-z0-9_]*(?:{IDENTIFIES})[a-z0-9_]*)>([^<]*)</\1>")
PCI_TAGS = re.compile(r"<(pci_domain|pci_bus|pci_device)>[^<]*</\1>")
UUID = re.compile(r"\b((?:GPU-|MIG-)?)([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\b", re.IGNORECASE)
BUS_ID = re.compile(r"\b(?:[0-9A-F]{8}|[0-9A-F]{4}):([0-9A-F]{2}:[0-9A-F]{2})\.[0-9A-F]\b", re.IGNORECASE)
# "PCI:0000:3b:00" of the kernel's log has no function.
KERNEL_BUS_ID = re.compile(r"\b(PCI:)(?:[0-9a-f]{4,8}:)?([0-9a-f]{2}:[0-9a-f]{2})\b", re.IGNORECASE)
KERNEL_SERIAL = re.compile(r"(serial(?: number)?\s*[:=]\s*)\S+", re.IGNORECASE)
KERNEL_NAME = re.compile(r"(name=)('[^']*'|[^,\s]+)")


class Disguise:
    def __init__(self):
        self.uuids = {}
        self.buses = {}

    def text(self, text):
        text = SECRET_TAGS.sub(self._tag, text)
        text = PCI_TAGS.sub(lambda m: f"<{m.group(1)}>00</{m.group(1)}>", text)
        text = UUID.sub(self._uuid, text)
        text = BUS_ID.sub(lambda m: f"00000000:{self._bus(m.group(1))}.0", text)
        text = KERNEL_BUS_ID.sub(lambda m: f"{m.group(1)}0000:{self._bus(m.group(2))}", text)
        return text.replace(sys.executable, "/usr/bin/python3")

    def kernel_line(self, text):
        """A line of the kernel's log; what a process there is called is nobody's business."""
        return KERNEL_NAME.sub(r"\1python3", KERNEL_SERIAL.sub(r"\g<1>0", text))

    def value(self, value):
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            hidden = ("bus", "device", "domain") if "busId" in value else ()
            return {self.text(str(key)): 0 if key in hidden else self.value(item) for key, item in value.items()}
        return value

    def _tag(self, match):
        kept = match.group(2).strip() in ("N/A", "")
        return match.group(0) if kept else f"<{match.group(1)}>0</{match.group(1)}>"

    def _uuid(self, match):
        number = self.uuids.setdefault(match.group(2).lower(), len(self.uuids))
        return f"{match[1]}00000000-0000-4000-8000-{number:012d}"

    def _bus(self, bus_and_device):
        number = self.buses.setdefault(bus_and_device.lower(), len(self.buses))
        return f"{0x10 + number:02X}:00"
