"""What a node can do, what it lacks and how to mend it: `python -I -S …/node/__main__.py doctor`, a child of the agent.

Standard input: a JSON object, the fields of the request `doctor` (see `request.py`) with their defaults filled in.
Standard output: one line, `{"checks": [{"name", "status", "found", "remedy"}], "gpus": [CARD], "ntp": BOOL or null}`; `status` is
one of `checks.STATUSES`, `found` and `remedy` are a line each and `remedy` may be empty. The cards are those of `metrics`:
what ails one of them is judged by the console, as it is on its screens.

Whatever may hang (a driver, a dead mount, a Python) is asked in a process of its own with a limit of its own, and such a
process that does not even die is left behind: the others are told all the same.
"""
