"""Programs that show how paramd is used. They import torch; nothing imports them."""
