"""A fresh node on this machine: a root folder of its own with a shell, a Python and a real sshd, and nothing else.

It is made of this machine's own files and runs in namespaces of its own (mounts, processes): whatever runs there ends
with its first process, and no mount outlives it. That takes root, which the machines that run the tests give.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.sshd import Sshd

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Of any Linux, whatever is installed on it: wheels take them from the system.
SYSTEM_LIBRARIES = (
    *("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libm.so.6", "libresolv.so.2"),
    *("libnss_files.so.2", "libnss_dns.so.2", "libstdc++.so.6", "libgcc_s.so.1", "libz.so.1"),
)
NOT_NEEDED = ("test", "idlelib", "lib2to3", "tkinter", "turtledemo", "site-packages", "dist-packages", "__pycache__")

ENTER = """
set -e
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for name in $DEVICES; do mount --bind "/dev/$name" "$root/dev/$name"; done
for place in $SHARED; do mount --bind "$place" "$root$place"; done
cd /
PATH=$PATH:/usr/sbin:/sbin
exec env -i PATH="$NODE_PATH" "$(command -v chroot)" "$root" "$@"
"""


class VirtualNode(Sshd):
    """The node, and the sshd that leads to it.

    The home, cache and state folders of `Sshd` are seen under the same paths from inside and from outside; so is what
    `shared` names. ensurepip: whether its Python can give an environment pip, as Debian's cannot. network: without it a
    session sees no interface but a loopback that is down.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shared: Iterable[Path] = (),
        ensurepip: bool = True,
        network: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        assert os.geteuid() == 0, "a node of its own (mounts, chroot) needs root: run this test as root"
        self.root = folder / "root"
        unshare = shutil.which("unshare")
        assert unshare, "a node of its own needs util-linux's unshare"
        enter = folder / "enter.sh"
        super().__init__(
            folder,
            login_shell=None if network else "/bin/offline",
            environment=environment,
            prefix=(
                *(unshare, "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"),
                *("/bin/sh", str(enter), str(self.root)),
            ),
        )
        places = [self.folder, *shared]
        assert not any(re.search(r"\s", str(place)) for place in places), "a path with a space cannot be shared"
        values = {"DEVICES": " ".join(DEVICES), "SHARED": " ".join(map(str, places)), "NODE_PATH": "/usr/bin:/bin"}
        enter.write_text("".join(f"{name}='{value}'\n" for name, value in values.items()) + ENTER)
        _build(self.root, places, ensurepip=ensurepip)
        offline = self.root / "bin" / "offline"
        offline.write_text('#!/bin/sh\nexec unshare --net /bin/sh "$@"\n')
        offline.chmod(0o755)

    @property
    def data(self) -> Path:
        """The folder of the node's data, seen from outside."""
        return self.home / ".local" / "share" / "dflash-tui"

    @property
    def options(self) -> list[object]:
        """What names the node to `dflash-tui`."""
        return ["--host", self.target, "--ssh-config", self.ssh_config]


@contextlib.contextmanager
def running_node(folder: Path, **options: object) -> Iterator[VirtualNode]:
    """A started node; at the end every process in it is gone."""
    node = VirtualNode(folder, **options)
    try:
        node.start()
        yield node
    finally:
        node.stop()


def _build(root: Path, places: Iterable[Path], *, ensurepip: bool) -> None:
    for name in ("bin", "usr/bin", "usr/sbin", "etc", "dev/shm", "proc", "run/sshd", "var/empty", "root", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for name in DEVICES:
        (root / "dev" / name).touch()
    for place in places:
        inside = root / place.relative_to("/")
        if place.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
    sshd = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    assert sshd, "the tests need OpenSSH's sshd"
    programs = [Path(sshd), *Path("/usr/lib/openssh").glob("sshd-*")]
    for program in programs:
        _copy(program, root)
    for name, there in (("sh", "bin/sh"), ("unshare", "usr/bin/unshare")):
        found = shutil.which(name)
        assert found
        shutil.copy(Path(found).resolve(), root / there)
        programs.append(Path(found).resolve())
    python, extensions = _copy_python(root, ensurepip=ensurepip)
    _copy_libraries([*programs, python, *extensions], root)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")


def _copy(path: Path, root: Path) -> None:
    """A file to its own path under `root`, what a link leads to in its place."""
    there = root / path.relative_to("/")
    there.parent.mkdir(parents=True, exist_ok=True)
    if not there.exists():
        shutil.copy(path, there)


def _copy_python(root: Path, *, ensurepip: bool) -> tuple[Path, list[Path]]:
    """The Python that runs this, as it was installed: no package beside the standard library. Its files with libraries."""
    program = Path(os.path.realpath(sys.executable))
    _copy(program, root)
    for name in ("python3", f"python3.{sys.version_info.minor}"):
        link = root / "usr/bin" / name
        if not link.exists():
            link.symlink_to(program)
    for kind in ("stdlib", "platstdlib"):
        stdlib = Path(sysconfig.get_path(kind, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix}))
        left_out = [*NOT_NEEDED, "config-*", *([] if ensurepip else ["ensurepip"])]
        if not (root / stdlib.relative_to("/")).exists():
            shutil.copytree(stdlib, root / stdlib.relative_to("/"), ignore=shutil.ignore_patterns(*left_out))
    debian = Path("/usr/share/python-wheels")
    if ensurepip and debian.is_dir():
        shutil.copytree(debian, root / debian.relative_to("/"))
    return program, list(stdlib.glob("lib-dynload/*.so"))


def _copy_libraries(programs: list[Path], root: Path) -> None:
    run = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    paths = set(re.findall(r"(/\S+) \(0x", run.stdout))
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in SYSTEM_LIBRARIES:
        found = re.search(
            rf"\t{re.escape(name)} \([^)]*x86-64[^)]*\) => (\S+)|\t{re.escape(name)} \([^)]*\) => (\S+)", cache
        )
        if found:
            paths.add(found[1] or found[2])
    for path in sorted(paths):
        _copy(Path(path), root)
