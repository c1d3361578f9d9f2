"""`dflash-tui`: the console, and a command for every action of its screens."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from backends.spec import SpecError
from dflash_tui import __version__, config, hftoken
from dflash_tui.commands import (
    compare,
    demo,
    diagnose,
    doctor,
    export,
    jobs,
    launch,
    logs,
    parity,
    plan,
    prepare,
    read,
    setup,
    show,
    status,
    stop,
    verify,
)
from dflash_tui.commands.console import open_console
from dflash_tui.commands.outcome import EXIT_CODES_HELP, CommandError, Exit, of_link_error
from dflash_tui.commands.output import report
from dflash_tui.config import ConfigError, Settings
from dflash_tui.link import LinkError

Run = Callable[[argparse.Namespace, Settings], int]

COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Run]] = {
    "status": (status.HELP, status.add_arguments, status.run),
    "plan": (plan.HELP, plan.add_arguments, plan.run),
    "launch": (launch.HELP, launch.add_arguments, launch.run),
    "restart": (launch.RESTART_HELP, launch.add_restart_arguments, launch.run_restart),
    "jobs": (jobs.HELP, jobs.add_arguments, jobs.run),
    "stop": (stop.HELP, stop.add_arguments, stop.run),
    "logs": (logs.HELP, logs.add_arguments, logs.run),
    "prepare": (prepare.HELP, prepare.add_arguments, prepare.run),
    "verify": (verify.HELP, verify.add_arguments, verify.run),
    "export": (export.HELP, export.add_arguments, export.run),
    "compare": (compare.HELP, compare.add_arguments, compare.run),
    "parity": (parity.HELP, parity.add_arguments, parity.run),
    "diagnose": (diagnose.HELP, diagnose.add_arguments, diagnose.run),
    "read": (read.HELP, read.add_arguments, read.run),
    "show": (show.HELP, show.add_arguments, show.run),
    "doctor": (doctor.HELP, doctor.add_arguments, doctor.run),
    "setup": (setup.HELP, setup.add_arguments, setup.run),
    "demo": (demo.HELP, demo.add_arguments, demo.run),
}

DESCRIPTION = "Without a command: the console, on the hosts given. Every action of its screens is a command too."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("dflash-tui").strip()  # the program's own name is printed before every error
        raise CommandError(Exit.BAD_INPUT, f"{command}: {message}" if command else message, f"see `{self.prog} --help`")


def make_parser() -> argparse.ArgumentParser:
    """The options of the console stand before or after the command."""
    parser = _Parser(
        prog="dflash-tui",
        description=DESCRIPTION,
        epilog=EXIT_CODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dflash-tui {__version__}")
    _add_common(parser, before=True)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (line, add_arguments, _) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=line,
            description=line,
            epilog=EXIT_CODES_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_arguments(command)
        _add_common(command, before=False)
    return parser


def _add_common(parser: argparse.ArgumentParser, *, before: bool) -> None:
    """A default after the command would overwrite what was given before it."""
    absent: Any = None if before else argparse.SUPPRESS
    off: Any = False if before else argparse.SUPPRESS
    common = parser.add_argument_group("hosts and connection")
    common.add_argument(
        "--host",
        action="append",
        dest="host_before" if before else "host_after",
        metavar="HOST",
        help='user@host:port, an alias of your ssh_config, or "local" (no SSH); may be repeated (default: those of config.toml; commands else take local)',
    )
    common.add_argument(
        "--ssh-config", type=Path, default=absent, metavar="FILE", help="an ssh_config in place of yours"
    )
    common.add_argument(
        "--accept-new-host-key",
        action="store_true",
        default=off,
        help="add the key of a host never seen before to known_hosts",
    )
    common.add_argument(
        "--python", default=absent, metavar="PATH", help="the worker Python on the node, the one that has torch"
    )
    common.add_argument(
        "--hf-token-file",
        type=Path,
        default=absent,
        metavar="FILE",
        help="token for models and datasets named on the hub (default: HF_TOKEN, else that of `hf auth login`)",
    )
    common.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        dest="env_before" if before else "env_after",
        metavar="NAME=VALUE",
        help="variable of the jobs that are started, as HF_HOME=/data/hf or HF_ENDPOINT=https://mirror; may be repeated",
    )
    common.add_argument("--ask-hf-token", action="store_true", default=off, help="ask for that token on the terminal")
    common.add_argument("--read-only", action="store_true", default=off, help="launch, stop and write nothing")
    common.add_argument("--theme", default=absent, metavar="NAME", help="theme of the console")
    common.add_argument("--json", action="store_true", default=off, help="one JSON document on stdout")


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    try:
        config.variables({name: value})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be: give NAME=VALUE, {error}") from None
    if not given:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of config.toml with the flags over them. Raises ConfigError."""
    settings = config.load()
    args.host = list(dict.fromkeys([*(args.host_before or ()), *(getattr(args, "host_after", None) or ())]))
    if args.host:
        settings = replace(settings, hosts=tuple(args.host))
    elif not settings.hosts and args.command:
        settings = replace(settings, hosts=(config.LOCAL,))
    return replace(
        settings,
        ssh_config=args.ssh_config or settings.ssh_config,
        python={config.EVERY_HOST: args.python} if args.python else settings.python,
        theme=args.theme or settings.theme,
        read_only=args.read_only or settings.read_only,
        accept_new_host_key=args.accept_new_host_key,
        env={**settings.env, **dict(args.env_before), **dict(getattr(args, "env_after", ()))},
        hf_token=hftoken.given(args.hf_token_file, args.ask_hf_token),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code, as `--help` explains them. Nothing that goes wrong shows a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        return int(_run(words))
    except SystemExit as done:  # argparse's --help and --version
        return int(done.code or 0)
    except CommandError as error:
        return _end(error, as_json)
    except LinkError as error:
        return _end(of_link_error(error), as_json)
    except (SpecError, ConfigError) as error:
        return _end(CommandError(Exit.BAD_INPUT, str(error)), as_json)
    except KeyboardInterrupt:
        return _end(CommandError(Exit.CTRL_C, "interrupted"), as_json)
    except BrokenPipeError:
        _give_up_stdout()
        return Exit.BROKEN_PIPE
    except OSError as error:
        return _end(CommandError(Exit.FAILED, str(error), "see whether the file and the disk are in order"), as_json)
    except Exception as error:
        return _end(_crashed(error, words), as_json)


def _run(words: list[str]) -> int:
    args = make_parser().parse_args(words)
    settings = settings_of(args)
    if args.command is None:
        return open_console(settings)
    return COMMANDS[args.command][2](args, settings)


def _end(error: CommandError, as_json: bool) -> int:
    try:
        report(error, as_json)
    except BrokenPipeError:
        _give_up_stdout()
    return error.code


def _give_up_stdout() -> None:
    """Python flushes stdout once more at exit; by then it must lead somewhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _crashed(error: Exception, words: list[str]) -> CommandError:
    """A fault of ours: its traceback goes to a file, and the user is told which."""
    file = config.state_dir() / time.strftime("crash-%Y%m%d-%H%M%S.txt")
    what = f"a fault of dflash-tui itself: {type(error).__name__}: {error}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"dflash-tui {__version__}, Python {sys.version}\n{words}\n\n{''.join(traceback.format_exception(error))}",
            encoding="utf-8",
        )
    except OSError as unwritable:
        return CommandError(Exit.FAILED, what, f"its traceback could not be kept: {unwritable}")
    return CommandError(Exit.FAILED, what, f"its traceback is in {file}; please report it")


if __name__ == "__main__":
    sys.exit(main())
