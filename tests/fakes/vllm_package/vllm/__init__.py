"""Stands where vLLM stands, for faults that a real one does not do on request. It computes nothing a model would."""
