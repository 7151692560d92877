"""Long runs with random kinds, random faults and hurried readers: `make soak MINUTES=n SEED=n`.

__main__.py   parse, run episodes until the time is over, report
plan.py       PURE: what happens in an episode, from seed and number alone
episode.py    runs one: trainers, readers, events, and what must hold all the while
readers.py    clients that summon as fast as it goes
usage.py      memory and descriptors of processes over time
"""
