"""Measures what model code of today's frameworks launches on one GPU: row-wise modules, products, whole layers.

``python -m benchmarks.frameworks -o FILE`` writes one JSON document. It needs torch alone. Profiles of ``memo_exec
calibrate`` say how fast memo's own kernels run; this says how many kernels, passes over memory and host launches the
same operators cost as frameworks write them, eager and compiled, and how much slower products run inside a busy layer
than alone.
"""
