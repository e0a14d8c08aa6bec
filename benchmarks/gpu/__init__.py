"""Runs everything that needs a GPU with one command: checks, calibration, measured against predicted, rivals.

    python -m benchmarks.gpu                                    all parts, within --budget-s
    python -m benchmarks.gpu --only checks --only calibrate     some parts; the profile stays in the results folder
    python -m benchmarks.gpu --only rivals --lengths 128k,64k   memo next to other systems, on the same layers and data
    python -m benchmarks.gpu --call 1                           the stages of one call of ten minutes; packs the results
    python -m benchmarks.gpu --quick                            tiny shapes on any machine, to test the script itself

Results go to the folder in the environment variable MEMO_RESULTS (default ``results``). ``rows.json`` is written after
every row, so a killed run loses nothing; ``report.md`` and ``report.png`` are made from it. After a measurement fails
or runs out of memory, the next one gets a new process, so it is not affected.

In addition to torch it needs msgspec, numpy, safetensors and simpy; matplotlib for the picture, pytest for the GPU
tests, and the libraries of the rivals to compare with.
"""
