"""What `--help` of a program says: the first paragraph of its docstring, and its commands."""

from __future__ import annotations

import argparse
import shutil
import textwrap

INDENT = "    "


def parser_of(doc: str | None, *, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the docstring's first paragraph, and ends with the
    indented ones: commands that can be copied, each with its continued lines."""
    first, *others = (doc or "").strip().split("\n\n")
    commands = [textwrap.dedent(each) for each in others if each.startswith(INDENT)]
    return argparse.ArgumentParser(
        prog=prog,
        # as argparse itself would
        description=textwrap.fill(first, shutil.get_terminal_size().columns - 2),
        epilog=examples("\n".join(commands)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def examples(commands: str) -> str:
    """Return command lines as the end of a help text."""
    is_one = "\n" not in commands.replace("\\\n", "")
    return f"{'example' if is_one else 'examples'}:\n{textwrap.indent(commands, '  ')}"
