"""What holds for every test."""

from __future__ import annotations

import signal

# A run in the background of a shell ignores ctrl+C, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
