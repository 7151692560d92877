"""A small training that registers at a site:
`python -m tests.integration.site_trainer URL JOB [RESUME]`.

Says its incarnation on stdout, trains until its stdin is closed, and detaches.
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
    print(json.dumps({"incarnation": attachment.incarnation, "url": attachment.url}), flush=True)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    attachment.detach()


if __name__ == "__main__":
    main()
