"""A small training that registers at a site:
`python -m tests.integration.site_trainer URL JOB [RESUME]`.

Says its incarnation on stdout, trains until its stdin is closed, and detaches. A line on stdin
makes it train a larger model from then on.
"""

import json
import select
import sys

import torch

import paramd


def main() -> None:
    url, job, *more = sys.argv[1:]
    resume = more[0] if more else "never"
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attachment = paramd.attach(model, optimizer, job=job, control=url, resume=resume)
    while True:
        said = {"incarnation": attachment.incarnation, "url": attachment.url}
        print(json.dumps(said), flush=True)
        train(model, optimizer)
        if not sys.stdin.readline():
            break
        model = torch.nn.Linear(8, model.out_features + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        attachment.refresh(model, optimizer)
    attachment.detach()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
