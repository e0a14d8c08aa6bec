"""Everything that a GPU is needed for, in one command: checks, calibration, measured against predicted, rivals.

    python -m benchmarks.gpu                         all of it, within --budget-s
    python -m benchmarks.gpu --only checks --only calibrate     some parts; the profile stays in the results folder
    python -m benchmarks.gpu --only rivals --lengths 128k,64k   memo beside what people use today: same layers and data
    python -m benchmarks.gpu --quick                            tiny shapes on any machine, to prove that it works

Results lie in the folder that MEMO_RESULTS names (else ``results``): ``rows.json`` grows row by row, so that a run that
is killed loses nothing; ``report.md`` and ``report.png`` are drawn from it. Every try runs in a process of its own:
what runs out of memory cannot spoil the next.

Needed beside torch: msgspec, numpy, safetensors and simpy; matplotlib for the picture, pytest for the GPU tests, and
whatever rivals are to run.
"""
