"""The first program that runs on a node, before the bundle is there: finds or receives the bundle and becomes the agent.

It is sent as text inside the command line (see `bootstrap.py`), so it stands alone: standard library, Python 3.8.
Its argument is a JSON object in base64: nonce, hash, size (of the tar.gz), default_python, fallback_python.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import sys
import tarfile
import tempfile
from typing import Iterator, Optional

CONFIG = json.loads(base64.b64decode(sys.argv[2]).decode("utf-8"))


class Damaged(Exception):
    """The bundle is not what its name says; another folder would not make it better."""


def say(text: str) -> None:
    data = ("dflash-tui-boot %s %s\n" % (CONFIG["nonce"], " ".join(text.split()))).encode("utf-8", "replace")
    while data:
        data = data[os.write(1, data) :]


def roots() -> Iterator[str]:
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".cache")
    for base in (home, "/tmp/dflash-tui-%d" % os.getuid(), "/dev/shm/dflash-tui-%d" % os.getuid()):
        if os.path.isabs(base):
            yield os.path.join(base, "dflash-tui")


def ours(root: str, make: bool = False) -> None:
    # In /tmp anybody may have made the folder first: code is run only from what nobody else can write.
    base = os.path.dirname(root)
    public = os.path.basename(base).startswith("dflash-tui-")
    for folder in (base, root):
        if make:  # one after the other, so that nothing is made behind somebody else's link
            os.makedirs(folder, 0o700, exist_ok=True)
        if folder == base and not public:
            continue
        info = os.lstat(folder) if public else os.stat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or (public and info.st_mode & 0o022):
            raise OSError("%s belongs to somebody else or others can write it" % folder)


def whole(bundle: str) -> bool:
    listed = False  # an empty list is what a power loss left of one
    try:
        with open(os.path.join(bundle, "bundle.files"), encoding="utf-8") as listing:
            for line in listing:
                size, _, path = line.rstrip("\n").partition(" ")
                if os.stat(os.path.join(bundle, path)).st_size != int(size):
                    return False
                listed = True
    except (OSError, ValueError):
        return False
    return listed


def find() -> Optional[str]:
    for root in roots():
        bundle = os.path.join(root, CONFIG["hash"])
        try:
            ours(root)
        except OSError:
            continue
        if whole(bundle):
            return bundle
    return None


def receive() -> bytes:
    parts, left = [], CONFIG["size"]
    while left:
        part = os.read(0, min(left, 65536))
        if not part:
            sys.exit(1)
        parts.append(part)
        left -= len(part)
    plain = gzip.decompress(b"".join(parts))
    if hashlib.sha256(plain).hexdigest()[: len(CONFIG["hash"])] != CONFIG["hash"]:
        raise Damaged("the bundle arrived damaged")
    return plain


def cut_short(path: str, good: str) -> bool:
    """Whether a file is the beginning of the good one, or that and zeros: so a power loss leaves it."""
    with open(path, "rb") as left, open(good, "rb") as wanted:
        data, right = left.read(), wanted.read()
    return data != right and right.startswith(data.rstrip(b"\0"))


def unpack(plain: bytes, root: str) -> str:
    ours(root, make=True)
    bundle = os.path.join(root, CONFIG["hash"])
    fresh = tempfile.mkdtemp(prefix=".unpacking-", dir=root)
    try:
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(fresh, filter="data")
            else:
                tar.extractall(fresh)
        try:
            os.rename(fresh, bundle)
        except OSError:
            # Another console was first, a cleaner took files out, or a power loss cut some short: only those are put back.
            for folder, _, names in os.walk(fresh):
                place = os.path.join(bundle, os.path.relpath(folder, fresh))
                os.makedirs(place, 0o700, exist_ok=True)
                for name in names:
                    good, there = os.path.join(folder, name), os.path.join(place, name)
                    if not os.path.exists(there) or cut_short(there, good):
                        os.rename(good, there)
            if not whole(bundle):
                raise Damaged("somebody changed %s, remove that folder" % bundle) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return bundle


def main() -> None:
    mask = os.umask(0o077)
    bundle = find()
    if bundle is None:
        say("need")
        plain = receive()
        reasons = []
        for root in roots():
            try:
                bundle = unpack(plain, root)
                break
            except OSError as error:
                reasons.append("%s: %s" % (root, error.strerror or error))
        if bundle is None:
            say("failed no folder takes the node bundle (%s)" % "; ".join(reasons))
            sys.exit(73)
    agent = os.path.join(bundle, "dflash_tui", "node", "__main__.py")
    command = [sys.executable, "-I", agent, "agent", "--bundle", bundle, "--hash", CONFIG["hash"]]
    command += ["--nonce", CONFIG["nonce"]]
    if CONFIG.get("default_python"):
        command += ["--default-python", CONFIG["default_python"]]
    if CONFIG.get("fallback_python"):
        command += ["--fallback-python", CONFIG["fallback_python"]]
    os.umask(mask)  # what jobs write into folders of a team is as readable as what the user writes there
    os.execv(sys.executable, command)


try:
    main()
except Damaged as problem:
    say("failed %s" % problem)
    sys.exit(74)
except (OSError, ValueError, EOFError, tarfile.TarError, ImportError) as problem:
    say("failed %s: %s" % (type(problem).__name__, problem))
    sys.exit(74)
