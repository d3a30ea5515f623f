"""The parser and help text that all commands share.

Help fits the terminal and keeps the lines of examples. An error is two lines, and exits with 2. The error for an
unknown word suggests the nearest known one.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from vdnn.errors import RehearsalError

# Wider lines are hard to read, narrower ones leave no room beside the names of options.
_WIDEST, _NARROWEST = 100, 50
_HELP_COLUMN = 26
INTERRUPTED = 130  # the exit code that a shell reports for an interrupted program


def program_name() -> str:
    """The command that the user typed: `vdnn` or `python -m vdnn`."""
    return "python -m vdnn" if Path(sys.argv[0]).parts[-2:] == ("vdnn", "__main__.py") else "vdnn"


def nearest(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'plan'?`, or an empty string if no known word is similar."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def say_error(program: str, error: Exception, *, with_traceback: bool = False) -> None:
    """Writes a message to stderr, after the traceback of the user's error if that is wanted."""
    if with_traceback:
        sys.stderr.write("".join(traceback.format_exception(error.__cause__ or error)))
    hint = "\n  --traceback shows all lines." if isinstance(error, RehearsalError) and not with_traceback else ""
    sys.stderr.write(f"{program}: {error}{hint}\n")


@final
class HelpText(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal. Lines that begin with a space, such as examples, are not wrapped."""

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
        # argparse puts a heading without text above the list of commands and indents the list by two more columns.
        return "".join(line[2:] for line in text.splitlines(keepends=True)[1:])


@final
class CommandParser(argparse.ArgumentParser):
    """The parser of one command, or of vdnn itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpText, add_help=False, **options)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reports an unknown option before a missing one: a user who types --batches also lacks --batch."""
        if self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._refuse_unknown_options(sys.argv[1:] if args is None else args)
        options, rest = super().parse_known_args(args, namespace)
        if rest:  # reported here because this parser knows which command's help to suggest
            self.error(f"unexpected arguments: {' '.join(rest)}")
        return options, rest

    def format_help(self) -> str:
        # The group with --help comes last.
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
        suggestion = nearest(str(value), map(str, action.choices))
        raise argparse.ArgumentError(action, f"expected one of {names}, got {value!r}{suggestion}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")
