"""Plan exports: the files and every byte in them. Pure."""
