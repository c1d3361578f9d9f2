"""python -I [-S] BUNDLE/dflash_tui/node/__main__.py {agent,metrics,supervise,doctor,diagnose,setup} …: what the node side runs.

-I keeps the user's environment and folders out of it; then nothing puts the bundle on the path but this file.
"""

import argparse
import os
import sys
from typing import List

BUNDLE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main(arguments: List[str]) -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    # Without -I this folder would come first, and its modules would stand in for others of the same name.
    sys.path[:] = [BUNDLE] + [entry for entry in sys.path if entry not in (here, BUNDLE)]
    if arguments[:1] == ["doctor"]:
        from dflash_tui.node.doctor import main as doctor

        return doctor.main(arguments[1:])
    if arguments[:1] == ["diagnose"]:
        from dflash_tui.node.diagnose import main as diagnose

        return diagnose.main()
    if arguments[:1] == ["setup"]:
        from dflash_tui.node.setup import runner

        return runner.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="dflash-tui-node", description="The node side of dflash-tui.")
    modes = parser.add_subparsers(dest="mode", required=True)
    agent = modes.add_parser("agent", help="answer a console on standard input and output")
    agent.add_argument("--bundle", default=BUNDLE)
    agent.add_argument("--hash", default="")
    agent.add_argument("--nonce", default="")
    agent.add_argument("--default-python", default="")
    agent.add_argument("--fallback-python", default="", help="where neither that nor a worker environment is there")
    modes.add_parser("metrics", help="print a reading of this machine a second, as JSON lines")
    supervise = modes.add_parser("supervise", help="run the job of a folder, detached")
    supervise.add_argument("folder")
    supervise.add_argument("--fds", default="", help="inherited: ready pipe, job lock, GPU locks")
    supervise.add_argument("--secrets-fd", type=int, default=-1, help="inherited: a pipe with what the runner is given")
    supervise.add_argument("--adopt", action="store_true", help="end what a killed supervisor left")
    options, rest = parser.parse_known_args(arguments)
    if rest and options.mode != "metrics":
        parser.error("unknown arguments: %s" % " ".join(rest))
    if options.mode == "metrics":
        from dflash_tui.node import metrics

        return metrics.main(rest)
    if options.mode == "supervise":
        from dflash_tui.node import supervisor

        fds = tuple(int(fd) for fd in options.fds.split(",") if fd)
        return supervisor.supervise(os.path.abspath(options.folder), fds, options.adopt, options.secrets_fd)
    from dflash_tui.node.agent import Agent

    try:
        pythons = (options.default_python, options.fallback_python)
        status = Agent(options.bundle, options.hash, options.nonce, *pythons).run()
        # Not by the interpreter's end: a thread that hangs in a file could keep it, and agents would pile up.
        os._exit(status)
    except OSError as error:
        print("dflash-tui agent: %s" % error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
