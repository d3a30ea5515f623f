"""How every command of vdnn speaks: help that fits the window and keeps examples as written, errors of two lines.

A word that is not known is answered with the nearest one that is. Exit code 2: called wrongly.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

# Longer lines are hard to read, shorter ones leave no room beside the names of options.
_WIDEST, _NARROWEST = 100, 50
_HELP_COLUMN = 26
# What a shell reports of a program that was interrupted.
INTERRUPTED = 130


def program_name() -> str:
    """What the user typed: `vdnn`, or `python -m vdnn`."""
    return "python -m vdnn" if Path(sys.argv[0]).parts[-2:] == ("vdnn", "__main__.py") else "vdnn"


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'plan'?`, or nothing where no known word is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {found[0]!r}?" if found else ""


@final
class HelpText(argparse.HelpFormatter):
    """Wraps paragraphs to the window; lines that begin with a space, such as examples, stay as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        columns = shutil.get_terminal_size((_WIDEST, 24)).columns - 2
        options |= {"width": max(_NARROWEST, min(_WIDEST, columns)), "max_help_position": _HELP_COLUMN}
        super().__init__(prog, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = []
        for block in text.split("\n\n"):
            plain: list[str] = []
            lines: list[str] = []
            for line in [*block.splitlines(), " "]:
                if line.startswith(" "):
                    lines += self._split_lines(" ".join(plain), width) if plain else []
                    lines += [line] if line.strip() else []
                    plain = []
                else:
                    plain.append(line)
            blocks.append("\n".join(indent + line for line in lines))
        return "\n\n".join(blocks)

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        if action.nargs != argparse.PARSER:
            return text
        # The list of commands comes under a line of its own that says nothing, and further in than all else.
        return "".join(line[2:] for line in text.splitlines(keepends=True)[1:])


@final
class CommandParser(argparse.ArgumentParser):
    """A parser of one command, or of vdnn's first word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpText, add_help=False, **options)
        self.add_argument("-h", "--help", action="help", help="show this and stop")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses an unknown option before a missing one: who writes --batches misses --batch for that reason."""
        if self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._refuse_unknown_options(sys.argv[1:] if args is None else args)
        options, rest = super().parse_known_args(args, namespace)
        if rest:  # said here, where the command is known whose help is wanted
            self.error(f"there is more than it takes: {' '.join(rest)}")
        return options, rest

    def format_help(self) -> str:
        # What a command does comes first, --help last.
        self._action_groups.sort(key=lambda group: group is self._optionals)
        return super().format_help()

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in words:
            if word == "--":
                return
            name = word.split("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"there is no option {name}{nearest(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = ", ".join(map(str, action.choices))
        if action.nargs == argparse.PARSER:
            self.error(f"there is no command {value!r}{nearest(value, action.choices) or f'. There are: {names}.'}")
        said = nearest(str(value), map(str, action.choices))
        raise argparse.ArgumentError(action, f"expected one of {names}, got {value!r}{said}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")
