"""As run_clm: texts in blocks, a scheduler with warmup, an evaluation in each step, functions with arguments."""

import argparse
import math

import torch
from gpt import GPT
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)


def evaluate(model, loader, device):
    model.eval()
    with torch.no_grad():
        losses = [model(ids.to(device), ids.to(device))[1].repeat(4) for (ids,) in loader]
    model.train()
    return math.exp(torch.cat(losses).mean())


def make():
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = torch.zeros(64, 64, dtype=torch.long)
    train = DataLoader(TensorDataset(blocks), batch_size=args.per_device_train_batch_size, num_workers=2)
    valid = DataLoader(TensorDataset(blocks[:16]), batch_size=8, num_workers=1, persistent_workers=True)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 10))

    def step():
        for (ids,) in (batch for batch, _ in zip(train, range(args.gradient_accumulation_steps))):
            ids = ids.to(device)
            _, loss = model(ids, ids)
            (loss / args.gradient_accumulation_steps).backward()
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        print(f"perplexity {evaluate(model, valid, device):.2f}")

    return model, step
