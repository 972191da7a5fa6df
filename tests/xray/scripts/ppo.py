"""PPO as in CleanRL: a rollout in buffers on the card, an environment in NumPy, epochs of minibatches."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
num_steps, num_envs = 16, 8


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def get_action_and_value(self, x, action=None):
        h = self.body(x)
        probs = Categorical(logits=self.actor(h))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(h).flatten()


def make():
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs = torch.zeros((num_steps, num_envs, 4)).to(device)
    actions, logprobs, rewards, values = (torch.zeros((num_steps, num_envs)).to(device) for _ in range(4))

    def step():
        next_obs = torch.zeros(num_envs, 4).to(device)
        for n in range(num_steps):
            obs[n] = next_obs
            with torch.no_grad():
                action, logprob, _, values[n] = agent.get_action_and_value(next_obs)
            actions[n], logprobs[n] = action, logprob
            environment = action.cpu().numpy() * np.zeros((5, num_envs), np.float32)
            *state, rewards[n] = torch.tensor(environment).to(device)
            next_obs = torch.stack(state, 1)
        b_obs, b_actions, b_logprobs, b_adv = (x.flatten(0, 1) for x in (obs, actions, logprobs, rewards - values))
        for mb in np.split(np.random.permutation(num_steps * num_envs), 4):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            pg_loss = torch.max(-b_adv[mb] * ratio, -b_adv[mb] * ratio.clamp(0.8, 1.2)).mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * (newvalue - b_adv[mb]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

    return agent, step
