"""As nanoGPT's train.py: a flat script. Data in NumPy, micro-steps, a scaler that is off, groups with weight decay."""

from contextlib import nullcontext

import numpy as np
import torch
from gpt import GPT

batch_size, block_size, gradient_accumulation_steps, learning_rate = 4, 64, 3, 6e-4
device = "cuda"
dtype = "float32"
torch.backends.cuda.matmul.allow_tf32 = True
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=torch.bfloat16)
data = np.zeros(10_000, dtype=np.uint16)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    parts = [[torch.from_numpy(data[i + n : i + n + block_size].astype(np.int64)) for i in ix] for n in (0, 1)]
    return [torch.stack(part).pin_memory().to(device, non_blocking=True) for part in parts]


model = GPT()
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
decay, rest = ([p for p in model.parameters() if (p.dim() >= 2) == large] for large in (True, False))
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
X, Y = get_batch()
iter_num = 0


def step():
    global X, Y, iter_num
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * min(1.0, (iter_num + 1) / 100)
    for _ in range(gradient_accumulation_steps):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1


def make():
    return model, step
