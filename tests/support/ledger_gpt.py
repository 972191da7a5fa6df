"""A GPT that is small enough to be measured often, and its tokens."""

import torch

from minizero import GPTConfig

CONFIG = GPTConfig(vocabulary=64, sequence_length=8, width=64, layers=2, heads=2)
TOKENS = torch.zeros(2, 8, dtype=torch.long)
