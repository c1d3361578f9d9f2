"""What the console knows: frozen facts, one reducer, immutable snapshots. No I/O, no threads, no clock of its own."""
