"""Example programs. They import torch; nothing imports them."""
