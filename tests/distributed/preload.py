"""Imported by the fork server before ranks fork from it, so that they share the pages and start quickly."""

import memo_exec.commands.run
import memo_sim.program.lower
import tests.distributed.parity

__all__ = ["memo_exec", "memo_sim", "tests"]
