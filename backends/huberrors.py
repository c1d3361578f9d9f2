"""What went wrong with the hub, in one line that names the way out. Loads nothing but the standard library."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, ClassVar

from backends.errors import JobError, one_line
from backends.hubname import HubName

_LOG_IN = "log in on the node with `hf auth login`"
_NETWORK = (
    "ConnectError",
    "TransportError",
    "TimeoutException",
    "ConnectionError",
    "Timeout",
    "ProxyError",
    "SSLError",
)


class HubUnavailable(JobError):
    """The hub cannot be asked, or not now: nothing that the user typed is wrong, and the same may work later."""

    status: ClassVar[int] = 1


def explain(error: BaseException, name: HubName, token_sent: bool) -> JobError:
    """An error of huggingface_hub or of what it stands on as a line with its remedy; it never shows the token."""
    if isinstance(error, JobError):
        return error
    causes = list(_causes(error))
    names = [{base.__name__ for base in type(cause).__mro__} for cause in causes]
    has = {name for each in names for name in each}
    for cause in causes:
        # Xet's part of the library tells it by its text alone.
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(cause):
            return JobError(
                f"the disk of the hub's cache {_cache()} is full", "free some space, or set HF_HOME to another disk"
            )
        if isinstance(cause, PermissionError):
            return JobError(
                f"the hub's cache {_cache()} cannot be written: {one_line(cause)}",
                "mend its permissions, or set HF_HOME to a folder of yours",
            )
    response: Any = next((found for cause in causes if (found := getattr(cause, "response", None)) is not None), None)
    status = getattr(response, "status_code", None)
    if "GatedRepoError" in has:
        who = "the token's account has no access to it" if token_sent else "no token was sent"
        return JobError(
            f"{_what(name)} is gated, and {who}",
            f"accept its terms at {_page(name)}, and {_token(token_sent, 'of that account')}",
        )
    if status == 401 and (token_sent or _refuses_token(response)):
        return JobError(
            f"the hub {endpoint()} refuses the token (401): it is wrong or has expired",
            f"make one at {endpoint()}/settings/tokens and give it with --hf-token-file",
        )
    if "RevisionNotFoundError" in has:
        return JobError(
            f"{_what(name)} has no revision {name.revision!r}",
            f"name a branch, a tag or a commit that {_page(name)} lists",
        )
    if status in (401, 404) or "RepositoryNotFoundError" in has or "HFValidationError" in has:
        return _not_found(name, token_sent)
    if "DisabledRepoError" in has:
        return JobError(f"the hub has disabled {_what(name)}", "give a folder, or another name")
    if status == 403:
        return JobError(
            f"the hub {endpoint()} does not let {_what(name)} be read (403)",
            f"{_token(token_sent, 'that may read it')}",
        )
    if status == 429:
        wait = f"in {text} s" if (text := str(response.headers.get("Retry-After", ""))).isdecimal() else "later"
        return HubUnavailable(
            f"the hub {endpoint()} answers that there were too many requests (429)",
            f"run it again {wait}: what was downloaded is kept; with a token the limit is higher (give one with --hf-token-file, or {_LOG_IN})",
        )
    if "OfflineModeIsEnabled" in has:
        return HubUnavailable(
            f"HF_HUB_OFFLINE is set on the node, and {_what(name)} is not in its cache {_cache()}",
            f"unset it, or {_by_hand(name)}",
        )
    if isinstance(status, int) and status >= 500:
        return HubUnavailable(
            f"the hub {endpoint()} fails ({status})", "run it again later: what was downloaded is kept"
        )
    if has & set(_NETWORK):
        why = one_line(causes[-1], 200)
        return HubUnavailable(
            f"the hub {endpoint()} cannot be reached from the node ({why})"
            + ("" if name.typed.startswith("hf://") else f", and no folder there is called {name.typed}"),
            f"set HF_ENDPOINT to a mirror, or {_by_hand(name)}",
        )
    if "Consistency check failed" in str(error) or "EntryNotFoundError" in has or "FileMetadataError" in has:
        return HubUnavailable(
            f"{_what(name)} did not arrive as the hub describes it: {one_line(error, 200)}",
            "run it again: files that are whole are kept",
        )
    return HubUnavailable(
        f"{_what(name)} cannot be downloaded: {type(error).__name__}: {one_line(error, 300)}", _by_hand(name)
    )


def endpoint() -> str:
    """The hub that the node asks: HF_ENDPOINT, else the public one."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _refuses_token(response: Any) -> bool:
    return "Invalid credentials" in str(response.headers.get("X-Error-Message", ""))


def _what(name: HubName) -> str:
    return f"the hub's {name.kind} {name.name}"


def _page(name: HubName) -> str:
    return f"{endpoint()}/{'datasets/' if name.kind == 'dataset' else ''}{name.name}"


def _token(sent: bool, which: str) -> str:
    return f"give a token {which} with --hf-token-file" + ("" if sent else f", or {_LOG_IN}")


def _by_hand(name: HubName) -> str:
    kind = "--repo-type dataset " if name.kind == "dataset" else ""
    return (
        f"run `hf download {kind}{name.name} --local-dir DIR` where there is a network, rsync DIR to the node and give that"
        " folder, or copy the whole cache and set HF_HOME"
    )


def _not_found(name: HubName, token_sent: bool) -> JobError:
    sees = "that the token may see" if token_sent else "that can be seen without a token"
    folder = "" if name.typed.startswith("hf://") else f"no folder on the node is called {name.typed}, and "
    return JobError(
        f"{folder}the hub {endpoint()} has no {name.kind} {name.name} {sees}",
        f"check the name, begin a folder with / or ./, or for a private one {_token(token_sent, 'that may read it')}",
    )
