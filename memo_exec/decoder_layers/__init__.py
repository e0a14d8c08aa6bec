"""Token-wise alpha in the decoder layers of a transformers model (``memo_exec.tokenwise``).

The layers stay transformers' own modules; only their forward is played in row blocks. Swapping that follows a whole
program is in ``memo_exec/interpreter``; offloading for any torch model, without recompute, is in ``memo_exec/offload``.
"""

from memo_exec.decoder_layers.bytes_report import LayerBytes, TokenwiseReport
from memo_exec.decoder_layers.wrap import Tokenwise, tokenwise

__all__ = ["LayerBytes", "Tokenwise", "TokenwiseReport", "tokenwise"]
