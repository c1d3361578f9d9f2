"""The fidelity table: every family of the hf backend against the plain forward, and sabotages that must be noticed.

`python -m tests.fidelity` prints it; `test_fidelity.py` is the same checks for pytest.
"""
