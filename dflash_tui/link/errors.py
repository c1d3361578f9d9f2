"""What can go wrong between the console and a node: a code for scripts, one line for people, and the remedy."""

from __future__ import annotations

from dflash_tui.link.facts import clean

# Trying again mends none of these by itself.
REFUSED_CODES = frozenset(
    {
        "bad-target",
        "bad-ssh-config",
        "unknown-host-key",
        "changed-host-key",
        "revoked-host-key",
        "auth-failed",
        "key-needs-passphrase",
        "no-usable-key",
        "no-python",
        "protocol-mismatch",
    }
)
# Trying again may mend these, but a command that waits for its first answer should not wait for that.
UNREACHABLE_CODES = frozenset(
    {"unknown-host", "port-refused", "unreachable", "connect-timeout", "proxy-failed", "bootstrap-failed", "internal"}
)


class LinkError(Exception):
    """One thing that went wrong on the way to a node. `str()` is one line: the message and the remedy.

    Messages quote shells, servers and proxies: what would act on a terminal is taken out here, for all of them.
    """

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(code, message, remedy)
        self.code = code
        self.message = clean(message) or ""
        self.remedy = clean(remedy) or ""

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


class RequestRefused(LinkError):
    """The agent answered that it does not do what was asked; the codes stand in `node/protocol.py`."""
