"""Links packages of one environment into another, so that they need not be downloaded again:

    python lent_packages.py SITE_PACKAGES torch scipy matplotlib

The Python that has the packages runs this. It links each package and its requirements into SITE_PACKAGES, with their
metadata, so that pip finds them there. Nothing else of its environment is visible. Both Pythons need the same version.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def needed(names: list[str]) -> list[Distribution]:
    """Returns these packages and their installed requirements. Those of extras and other systems are often not
    installed."""
    found: dict[str, Distribution] = {}
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            if name in names:
                sys.exit(f"lent_packages: {name} is not installed for {sys.executable}")
            continue
        wanted = [text for text in found[name].requires or [] if "extra ==" not in text]
        left += [re.split(r"[^\w.-]", text.strip(), maxsplit=1)[0] for text in wanted]
    return list(found.values())


def lend(package: Distribution, site_packages: Path) -> None:
    for part in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        link = site_packages / part
        if not link.exists():  # packages may share a folder
            link.symlink_to(Path(str(package.locate_file(part))).resolve())


def main() -> None:
    site_packages, names = Path(sys.argv[1]), sys.argv[2:]
    packages = needed(names)
    for package in packages:
        lend(package, site_packages)
    print(f"lent: {', '.join(sorted(package.metadata['Name'] for package in packages))}")


if __name__ == "__main__":
    main()
