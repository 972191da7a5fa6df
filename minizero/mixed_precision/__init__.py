"""The claims of the mixed-precision paper, each as a small run.

    table1.py        seven networks in FP32 and in mixed precision
    report.py        its table and its picture
    step_memory.py   the memory of one step against the batch size
    experiments.py   why training in 16 bits fails: where gradients lie, which updates are lost

Micikevicius et al., 2018, "Mixed Precision Training". `python -m minizero.mixed_precision --help`.
"""
