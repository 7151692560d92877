"""Staged edits of this rank, from the first byte to applied, undone or gone."""
