"""The main job: train a small GPT on real text under DDP and ZeRO 1, 2, 3, and measure each.

    python -m minizero.train                                    4 ranks as threads, every stage
    torchrun --nproc-per-node 4 -m minizero.train --stage 3     each rank a process
    ... --stage 3 --save state ; ... --stage 2 --resume state   stop, and go on in another stage or on other ranks

It ends with a table and, with --output, with pictures and their numbers. `loop.py` is to be read first.
"""
