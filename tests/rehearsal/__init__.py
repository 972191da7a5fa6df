"""What is meant for GPUs, run where there is none: `python -m tests.rehearsal` names each line that mixes devices.

`device.py` is the pretend GPU. `programs.py` runs the README, the notebooks, the docstrings and tests/gpu on it.
`left_out.py` names what is not run, and why.
"""
