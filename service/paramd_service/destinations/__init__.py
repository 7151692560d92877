"""Where an export is written: a directory or an object store."""
