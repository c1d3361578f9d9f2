"""dflash-tui: an operations console for teams that train DFlash drafters."""

__version__ = "0.1.0"
