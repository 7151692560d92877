"""A campaign of faults against whole sites, under one oracle: `make soak MINUTES=n SEED=n`.

__main__.py   parse, run episodes until the time is over, print the table
plan.py       PURE: what happens in an episode, from seed and number alone
episode.py    runs one: the stage, everybody who uses it, one fault after the other
stage.py      jobs, control plane, store, links and small disks of an episode
trainer.py    the training, with numbers in it by which answers are judged
actors.py     who uses a job: readers on every lane, editors, operators
oracle.py     judges every answer
strike.py     does faults and undoes them
links.py      TCP links that can be cut, slowed down and reset
watchdog.py   ends what hangs
inject/       moves the clocks of processes, and has them say another version
"""
