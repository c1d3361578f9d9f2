"""Makes a node's pinned Python environments: a plan, and a job that can be killed and goes on. Needs nothing but a Python 3.8."""
