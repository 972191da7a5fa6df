"""A GAN with an R1 penalty: two optimizers, a fake batch that is detached, and a gradient of a gradient."""

import torch
from torch import nn
from torch.nn import functional as F

netG = nn.Sequential(nn.ConvTranspose2d(64, 64, 4), nn.BatchNorm2d(64), nn.ReLU(True), nn.ConvTranspose2d(64, 3, 8, 8))
netD = nn.Sequential(nn.Conv2d(3, 64, 4, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4096, 1))
netG.cuda(), netD.cuda()
optD, optG = (torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (netD, netG))


def one_iteration():
    real = torch.zeros(16, 3, 32, 32).to("cuda").requires_grad_()
    noise = torch.randn(16, 64, 1, 1, device="cuda")
    optD.zero_grad()
    pred, fake = netD(real), netG(noise)
    (grad,) = torch.autograd.grad(pred.sum(), real, create_graph=True)
    penalty = grad.square().sum((1, 2, 3)).mean()
    loss_d = F.softplus(-pred).mean() + F.softplus(netD(fake.detach())).mean() + 5.0 * penalty
    loss_d.backward()
    optD.step()
    optG.zero_grad()
    loss_g = F.softplus(-netD(fake)).mean()
    loss_g.backward()
    optG.step()
    print(f"Loss_D: {loss_d.item():.4f} Loss_G: {loss_g.item():.4f}")


def make():
    return nn.ModuleList([netG, netD]), one_iteration
