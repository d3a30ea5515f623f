"""Checks a source distribution: python check_sdist.py SDIST

It has to hold every file of the package and of the native core that the checkout has, and neither tests nor build
products. This is a program, not a test module: it runs once the file is made.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("vdnn", "csrc", "cmake", "examples")
SINGLE = ("CMakeLists.txt", "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml", "setup.py")
BUILT = {".so", ".pyc", ".o"}
FOREIGN = {"tests", "benchmarks", "deferred", "build", ".github", ".ci"}


def in_checkout() -> set[str]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    names = {path.relative_to(ROOT).as_posix() for path in files if path.suffix not in BUILT}
    return {name for name in names if ".ipynb_checkpoints" not in name} | set(SINGLE)


def main() -> int:
    with tarfile.open(sys.argv[1]) as archive:
        members = [PurePosixPath(member.name) for member in archive.getmembers() if member.isfile()]
    held = {PurePosixPath(*path.parts[1:]).as_posix() for path in members}
    missing = sorted(in_checkout() - held)
    foreign = sorted(name for name in held if name.split("/")[0] in FOREIGN or PurePosixPath(name).suffix in BUILT)
    if missing or foreign:
        print(f"sdist: FAILED: missing {missing}, and should not be there {foreign}")
        return 1
    print(f"sdist: {len(held)} files, all of the package and the core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
