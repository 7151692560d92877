"""The kurtosis of weights: how heavy the tails of their distribution are (a normal one has 3)."""
