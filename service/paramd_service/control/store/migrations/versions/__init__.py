"""One module a revision, oldest first. A module is never changed once it was released."""
