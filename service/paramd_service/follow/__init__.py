"""Followers: the changes since a state that they have, in place of the whole next one."""
