"""`python -m axon_nb.host --run-dir DIR`: the host agent, started by the notebook."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from axon_nb.host.agent import Agent, AgentOptions
from axon_nb.host.run_dir import RunDir


def main() -> None:
    """Parse the command line and serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m axon_nb.host", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path, help="the cluster's private folder")
    parser.add_argument("--controller", type=json.loads, default=[], help="command line of the controller, as JSON")
    parser.add_argument("--entry", default="", help="what forked ranks run, as module:function")
    parser.add_argument("--later", action="store_true", help="import nothing for ranks before one is to be forked")
    args = parser.parse_args()
    os.umask(0o077)
    options = AgentOptions(controller=args.controller, entry=args.entry, imports_later=args.later)
    Agent(RunDir(args.run_dir), options).run()


if __name__ == "__main__":
    main()
