"""Both backends on the same samples, measured, and what they wrote compared. Loads no torch by itself."""
