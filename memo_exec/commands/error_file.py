"""Writes a failed rank's message to torchrun's error file, so that torchrun prints it last.

Printed here, the message would be lost above torchrun's own traceback. torchrun gives the path of a file to each
process. It shows the file's message under "Root Cause" if the file has this form:

    {"message": {"message": "memo-exec: rank 1: ...", "extraInfo": {"timestamp": "1763721600"}}}

torchrun takes the earliest message as the cause. So a rank that failed because another one had stopped dates its
message one second later. torchrun's own exit code is always 1; the same block shows the exit code of the process.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave_for_torchrun(text: str, *, caused_elsewhere: bool) -> bool:
    """Write this rank's error message; return whether torchrun will print it (False without torchrun).

    ``caused_elsewhere`` says that another rank has failed first.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return False
    at = int(time.time()) + int(caused_elsewhere)
    message = {"message": text, "extraInfo": {"timestamp": str(at)}}
    try:
        Path(path).write_text(json.dumps({"message": message}))
    except OSError:  # the caller prints the message instead
        return False
    return True
