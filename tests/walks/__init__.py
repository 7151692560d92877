"""How many of our files a request enters: `python -m tests.walks [-v]`, over a real training."""
