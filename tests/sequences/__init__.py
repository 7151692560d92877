"""Random sequences of ordinary operations on a training whose every value is known.

    model.py       the parameters, and the arithmetic of one update: for training and reference
    training.py    the real training, in every kind of distribution
    packages.py    the same by DeepSpeed and Megatron-Core
    reference.py   what a tensor, gradient or moment is in any (incarnation, edits, step)
    session.py     a running job, its reference, and what counts as a defect
    reading.py, changing.py, striking.py   the operations: who reads, who changes, what breaks
    generate.py    sequences by seed, run and shrunk
    chosen.py      those that a test takes
    pairs.py       each thing that either side caches, before and after each event

README.md says how to run it, and which seed found what.
"""
