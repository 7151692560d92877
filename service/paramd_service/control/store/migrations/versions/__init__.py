"""One module per revision, oldest first. A released module is never changed."""
