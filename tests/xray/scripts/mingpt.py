"""As minGPT: a Trainer that owns its loader and its callbacks, and asks for the device itself."""

from collections import defaultdict

import torch
from gpt import GPT
from torch.utils.data import DataLoader, Dataset


class SortDataset(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        numbers = torch.randint(3, (64,))
        return numbers, numbers.sort()[0]


class Trainer:
    def __init__(self, model, dataset, batch_size=8):
        self.callbacks = defaultdict(list)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.loader = DataLoader(dataset, shuffle=False, pin_memory=True, batch_size=batch_size, num_workers=0)
        self.iter_num, self.optimizer = 0, torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))

    def run_one(self):
        self.model.train()
        batch = [t.to(self.device) for t in next(iter(self.loader))]
        _, self.loss = self.model(*batch)
        self.model.zero_grad(set_to_none=True)
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.iter_num += 1
        [callback(self) for callback in self.callbacks["on_batch_end"]]


def make():
    trainer = Trainer(GPT(), SortDataset())
    trainer.callbacks["on_batch_end"].append(lambda t: print(f"iter {t.iter_num}: train loss {t.loss.item():.5f}"))
    return trainer.model, trainer.run_one
