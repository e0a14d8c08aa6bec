"""What a rank that fails leaves for torchrun, which prints it last: its own traceback would bury the message.

torchrun names a file to each process that it starts; a file of the form below is what it shows under "Root Cause". The
first in time counts as the cause, so a rank that only lost another one dates its message a second later.

    {"message": {"message": "memo-exec: rank 1: ...", "extraInfo": {"timestamp": "1763721600"}}}

torchrun's own exit code is 1 whatever its processes return; the same block shows theirs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave_for_torchrun(text: str, *, caused_elsewhere: bool) -> bool:
    """Write why this rank fails; return whether torchrun will print it (False without torchrun).

    ``caused_elsewhere``: another rank has failed before.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return False
    at = int(time.time()) + int(caused_elsewhere)
    message = {"message": text, "extraInfo": {"timestamp": str(at)}}
    try:
        Path(path).write_text(json.dumps({"message": message}))
    except OSError:  # then the message is printed here
        return False
    return True
