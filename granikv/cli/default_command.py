"""A group of commands of which one runs where no other is named."""

from typing import ClassVar

import typer.core
from typer import Context


class DefaultCommandGroup(typer.core.TyperGroup):
    """`granikv validate LIVE` is `granikv validate runs LIVE`."""

    default_command: ClassVar[str] = "runs"

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Name the default command where the first word is no command and asks for no help."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)
