"""What the server imports before ranks fork from it: they share the pages and start at once."""

import memo_exec.commands.run
import memo_sim.program.lower
import tests.distributed.parity

__all__ = ["memo_exec", "memo_sim", "tests"]
